"""Hurts the replicas of a server under many streams, and compares every token with an undisturbed run. To measure:

python -m tests.serve.fleet_faults --streams 500
"""

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cumulo.base.report import machine
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.tiny_model import NAME, Sizes, save_tiny_model

REPLICAS = 3
STALL_S = 5.0
# Large enough that the engines, not the API process, set the pace; else clients would wait for its backlog.
SIZES = Sizes(layers=6, hidden=256, ffn=768, heads=4, kv_heads=2, head_dim=64)
WORDS: dict[str, Any] = {"type": "array", "items": {"enum": ["word", "other"]}, "minItems": 40}


def bodies(streams: int, tokens: int) -> list[dict[str, Any]]:
    """Every answer is determined: greedy, or drawn from a seed; one in ten is guided, one has log-probabilities."""
    asked = []
    for number in range(streams):
        body: dict[str, Any] = {
            "model": NAME, "messages": [{"role": "user", "content": f"Story {number % 7}: a cat sat on {number}"}],
            "max_tokens": tokens, "stream": True, "return_token_ids": True, "temperature": 0.9, "seed": number,
        }  # fmt: skip
        if number % 10 == 0:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": WORDS}}
        else:
            body["ignore_eos"] = True
        if number % 10 == 1:
            body |= {"logprobs": True, "top_logprobs": 2}
        elif number % 10 == 2:
            body["temperature"] = 0
        asked.append(body)
    return asked


@dataclass(slots=True)
class Heard:
    """What one client heard, and when."""

    request_id: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    times_s: list[float] = field(default_factory=list)
    error: str | None = None
    lines: list[bytes] = field(default_factory=list)  # read when all is over: a slow client would be measured

    def read(self) -> None:
        for line in self.lines:
            self._take(json.loads(line[6:]))
        self.lines.clear()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
            return
        self.request_id = event["id"]
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.tokens += choice.get("token_ids") or []
            self.logprobs += [
                round(one["logprob"], 4) for one in (choice.get("logprobs") or {}).get("content") or []
            ]
            self.finish = choice["finish_reason"] or self.finish

    @property
    def said(self) -> tuple[Any, ...]:
        return self.text, self.tokens, self.logprobs, self.finish, self.error

    def pause_s(self, at_s: float) -> float | None:
        """The longest silence that ended after this moment; None if nothing came after it."""
        after = [number for number, time_s in enumerate(self.times_s) if time_s > at_s and number]
        return max((self.times_s[n] - self.times_s[n - 1] for n in after), default=None)


async def listen(url: str, body: dict[str, Any], heard: Heard) -> None:
    """Over a socket of its own, without an HTTP client: hundreds of those would be what is measured."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    packed = json.dumps(body).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (place.netloc.encode(), len(packed)) + packed
    )
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            heard.times_s.append(time.perf_counter())
            heard.lines.append(line)
        elif line.startswith(b'{"error"'):
            heard.error = line.decode()
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()


@dataclass(slots=True)
class Played:
    heard: list[Heard]
    at_s: float  # when the fault was


def play(server: RunningServer, asked: list[dict[str, Any]], fault: Callable[[], None] | None) -> Played:
    """All streams at once; the fault comes when most of them run. The server says when: what clients have read yet
    lags behind."""

    def hurt() -> float:
        assert fault is not None
        wait_for(lambda: sum(one["running"] for one in replicas(server)) > 0.8 * len(asked), "load", server)
        at_s = time.perf_counter()
        fault()
        return at_s

    async def playing() -> Played:
        heard = [Heard() for _ in asked]
        streams = [
            asyncio.create_task(listen(server.url, body, one)) for body, one in zip(asked, heard, strict=True)
        ]
        at_s = await asyncio.to_thread(hurt) if fault is not None else 0.0
        await asyncio.gather(*streams)
        for one in heard:
            one.read()
        return Played(heard, at_s)

    return asyncio.run(playing())


def replicas(server: RunningServer) -> list[dict[str, Any]]:
    return list(server.get("/v1/fleet").json()["replicas"])


def all_ready(server: RunningServer) -> bool:
    return all(one["state"] == "ready" for one in replicas(server))


def faults(server: RunningServer) -> dict[str, Callable[[], None]]:
    def victim() -> dict[str, Any]:
        return max(replicas(server), key=lambda one: one["in_flight"])

    def operate(path: str) -> None:
        answer = server.post(path, None)
        assert answer.status_code in (200, 202), answer.text

    return {
        "kill": lambda: os.kill(victim()["pid"], signal.SIGKILL),
        "rank": lambda: os.kill(victim()["ranks"][-1]["pid"], signal.SIGKILL),  # with --tp
        "hang": lambda: os.kill(victim()["pid"], signal.SIGSTOP),
        "drain": lambda: operate(f"/v1/fleet/replicas/{victim()['name']}/drain?move=true"),
        "rolling": lambda: operate("/v1/fleet/restart"),
    }


def measure(
    server: RunningServer, name: str, asked: list[dict[str, Any]], undisturbed: list[Heard]
) -> list[dict[str, Any]]:
    before = {one["name"]: one["pid"] for one in replicas(server)}
    played = play(server, asked, faults(server)[name])
    lost = sum(one.finish is None or one.error is not None for one in played.heard)
    wrong = sum(one.said != other.said for one, other in zip(played.heard, undisturbed, strict=True))
    paths = [
        server.get(f"/v1/requests/{one.request_id}/explain").json()["data"][0]["replicas"]
        for one in played.heard
    ]
    moved = [one for one, path in zip(played.heard, paths, strict=True) if len(path) > 1]
    pauses_s = sorted(one.pause_s(played.at_s) or 0.0 for one in moved) or [0.0]
    calm_s = sorted(one.pause_s(0.0) or 0.0 for one in undisturbed)
    if name == "drain":
        for one in replicas(server):
            if one["state"] == "draining":
                server.post(f"/v1/fleet/replicas/{one['name']}/undrain", None)
    if name == "rolling":
        wait_for(
            lambda: not {one["pid"] for one in replicas(server)} & set(before.values()), "new engines", server
        )
    wait_for(lambda: all_ready(server), "all replicas", server)

    def row(what: str, value: float, unit: str, must: float | None = None) -> dict[str, Any]:
        bound = {} if must is None else {"must": must, "ok": value <= must}
        return {"name": f"{name}: {what}", "value": value, "unit": unit, "better": "lower", **bound}

    def at(values: list[float], share: float) -> float:
        return round(values[min(len(values) - 1, int(share * len(values)))], 3)

    return [
        row("streams lost", lost, f"of {len(asked)}", 0),
        row("streams with a wrong, missing or doubled token", wrong, f"of {len(asked)}", 0),
        {
            "name": f"{name}: streams moved",
            "value": len(moved),
            "unit": f"of {len(asked)}",
            "better": "higher",
        }
        | ({} if name == "rolling" else {"must": 1, "ok": bool(moved)}),
        row("pause of a moved stream, p50", at(pauses_s, 0.5), "s"),
        row("pause of a moved stream, p99", at(pauses_s, 0.99), "s"),
        row("pause of a moved stream, longest", round(pauses_s[-1], 3), "s"),
        row("longest gap of an undisturbed stream, p50", at(calm_s, 0.5), "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--faults", default="kill,hang,drain,rolling", help="also: rank, with --tp 2")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args()
    asked, rows = bodies(chosen.streams, chosen.tokens), []
    with tempfile.TemporaryDirectory() as folder:
        options = (
            "--no-console", "--replicas", str(chosen.replicas), "--tp", str(chosen.tp), "--kv-memory-gib", "0.4",
            "--max-running", "512", "--stall-timeout", str(STALL_S), "--drain-timeout", "1", "--stories", "4000",
        )  # fmt: skip
        with running_server(str(save_tiny_model(Path(folder), sizes=SIZES)), *options) as server:
            wait_for(lambda: all_ready(server), "all replicas", server)
            undisturbed = play(server, asked, None).heard
            print(f"undisturbed: {sum(len(one.tokens) for one in undisturbed):,} tokens")
            for name in chosen.faults.split(","):
                for row in measure(server, name, asked, undisturbed):
                    rows.append(row)
                    print(f"{row['name']}: {row['value']} {row['unit']}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    raise SystemExit(0 if all(row.get("ok", True) for row in rows) else 1)


if __name__ == "__main__":
    main()
