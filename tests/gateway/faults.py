"""Faults under load: streams through a gateway while replicas are killed, stopped, drained and replaced, and while
the gateway itself is. Every stream must end with the tokens it would have had:

python -m tests.gateway.faults --streams 500
python -m tests.gateway.faults --streams 200 --kind latent --tp 2 --prefill 1 --seed 3
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cumulo.base.report import Row, machine, table, write_json
from cumulo.cli.shared.terminal import out
from cumulo.load.connection import ConnectionLost, Pool
from cumulo.load.http_response import Response
from cumulo.load.sse import EventReader
from tests.gateway.running_gateway import RunningGateway, address, fleet_server, gateway_of, key_file
from tests.serve.rank_pids import rank_pids
from tests.serve.running_server import RunningServer
from tests.serve.tiny_model import KINDS, NAME, save_tiny_model

_TOKENS = 120
_DIFFERENT = 320  # requests; after them they repeat
_LOGPROB = 1e-4
_ASIDE = " Think of the sea, of bread and of rain first."  # repeated, a prompt that is worth handing over
_SCHEMA = {"type": "array", "items": {"enum": ["word", "other"]}, "minItems": 20}
_TOOL = {"type": "function", "function": {"name": "note", "parameters": {
    "type": "object", "properties": {"words": _SCHEMA}, "required": ["words"]}}}  # fmt: skip


def asked(number: int, asides: int = 0) -> tuple[str, dict[str, Any]]:
    """The request of a stream: of eight kinds, with prompts and seeds of their own."""
    number %= _DIFFERENT
    ask = f"Say something long about number {number % 40}." + _ASIDE * asides
    chat: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": ask}], "stream": True, "max_tokens": _TOKENS,
    }  # fmt: skip
    text: dict[str, Any] = {
        "model": NAME,
        "prompt": ask,
        "stream": True,
        "max_tokens": _TOKENS,
        "ignore_eos": True,
    }
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat | {"temperature": 0, "ignore_eos": True}),
        ("/v1/chat/completions", chat | {"temperature": 1.1, "seed": number, "ignore_eos": True}),
        ("/v1/chat/completions", chat | {"temperature": 0, "logprobs": True, "ignore_eos": True}),
        ("/v1/chat/completions", chat | {"temperature": 0.7, "seed": number, "tools": [_TOOL],
                                         "tool_choice": "required", "max_tokens": 300}),
        ("/v1/chat/completions", chat | {"temperature": 0.7, "seed": number, "max_tokens": 300, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}}),
        ("/v1/completions", text | {"temperature": 0.9, "seed": number}),
        ("/v1/completions", text | {"temperature": 0, "n": 2}),
        ("/v1/responses", {"model": NAME, "input": ask, "stream": True, "temperature": 0,
                           "max_output_tokens": _TOKENS}),
    ]  # fmt: skip
    return kinds[number % len(kinds)]


@dataclass(slots=True)
class Told:
    """What a client was told: texts by choice, log-probabilities, and the ends."""

    texts: dict[str, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    error: str = ""
    longest_pause_s: float = 0.0

    def add(self, event: Any) -> None:
        if "error" in event or event.get("type") in ("error", "response.failed"):
            self.error = json.dumps(event)
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            calls = "".join(one["function"].get("arguments") or "" for one in delta.get("tool_calls") or ())
            new = (choice.get("text") or delta.get("content") or "") + calls
            self.texts[str(choice["index"])] = self.texts.get(str(choice["index"]), "") + new
            for entry in (choice.get("logprobs") or {}).get("content", ()) if delta is not None else ():
                self.logprobs.append(entry["logprob"])
            if choice["finish_reason"]:
                self.ends.append(f"{choice['index']} {choice['finish_reason']}")
        if event.get("type") == "response.output_text.delta":
            self.texts[""] = self.texts.get("", "") + event["delta"]
        if event.get("type") in ("response.completed", "response.incomplete"):
            self.ends.append(event["type"])

    def difference(self, other: "Told") -> str:
        """What differs, in words; empty: nothing. Log-probabilities of another batch may differ in float32."""
        if self.texts != other.texts or len(self.logprobs) != len(other.logprobs):
            mine, theirs = json.dumps(self.texts), json.dumps(other.texts)
            pairs = enumerate(zip(mine, theirs, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
            mine, theirs = mine[at - 20 : at + 20], theirs[at - 20 : at + 20]
            return f"text {mine!r} instead of {theirs!r} at {at}"
        if sorted(self.ends) != sorted(other.ends):
            return f"ends {self.ends} instead of {other.ends}"
        far = max((abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)), default=0.0)
        return f"a log-probability is off by {far:.2g}" if far > _LOGPROB else ""


async def listen(pool: Pool, number: int, asides: int) -> Told:
    path, body = asked(number, asides)
    told, reader, last_s = Told(), EventReader(), 0.0

    def on_body(response: Response, piece: bytes, _: float) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if last_s:
            told.longest_pause_s = max(told.longest_pause_s, now_s - last_s)
        last_s = now_s
        if response.status != 200:
            told.error += piece.decode("utf-8", "replace")
            return
        for event in reader.feed(piece):
            if event != b"[DONE]":
                told.add(json.loads(event))

    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {pool.host_header}\r\nContent-Type: application/json\r\n"
    try:
        await pool.exchange(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content, on_body)
    except (ConnectionLost, OSError) as error:
        told.error = f"connection lost: {error}"
    return told


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the servers are."""

    kind: str = "dense"
    tp: int = 1
    prefill: int = 0  # engines that compute prompts for a server's others
    servers: int = 3
    hang_s: float = 3.0  # of silence, until the gateway takes one for hung

    @property
    def options(self) -> list[str]:
        ranks = ["--tp", str(self.tp)] if self.tp > 1 else []
        roles = ["--prefill", str(self.prefill), "--decode", "1"] if self.prefill else []
        return [*ranks, *roles]


class Siege:
    """A fleet, its gateway, and what is done to them."""

    def __init__(
        self, folder: Path, stack: contextlib.ExitStack, concurrency: int, fleet: Fleet = Fleet()
    ) -> None:
        self._model, self._key = save_tiny_model(folder, 1024, kind=fleet.kind), key_file(folder)
        self._stack, self._fleet = stack, fleet
        self.servers = [self._serve() for _ in range(fleet.servers)]
        self.gateway: RunningGateway = stack.enter_context(
            gateway_of(self.servers, self._key, *self._gateway_options())
        )
        self._slots = asyncio.Semaphore(concurrency)
        self.faults: list[str] = []

    def _gateway_options(self) -> list[str]:
        return ["--hang-timeout", str(self._fleet.hang_s), "--log-level", "warning", "--drain-timeout", "240"]

    def _serve(self) -> RunningServer:
        return self._stack.enter_context(fleet_server(self._model, self._key, *self._fleet.options))

    async def play(self, numbers: range) -> list[Told]:
        pool = Pool(self.gateway.url)

        async def one(number: int) -> Told:
            async with self._slots:
                return await listen(pool, number, 10 if self._fleet.prefill else 0)

        return await asyncio.gather(*(one(number) for number in numbers))

    async def harm(self, seed: int) -> None:
        """One fault after the other until cancelled; each replica comes back, or another in its place."""
        chance = random.Random(seed)
        faults = [
            self._kill,
            self._stop,
            self._kill_engine,
            self._drain,
            self._replace_gateway,
            self._terminate,
        ]
        faults += [self._kill_rank] * (self._fleet.tp > 1)
        faults += [self._kill_prefill, self._stop_prefill] * (self._fleet.prefill > 0)
        while True:
            for fault in chance.sample(faults, len(faults)):
                await asyncio.sleep(chance.uniform(0.1, 1.0))
                await fault(chance.choice(self.servers))

    async def _kill(self, victim: RunningServer) -> None:
        os.kill(victim.process.pid, signal.SIGKILL)
        self.faults.append("replica killed")
        await self._replace(victim)

    async def _terminate(self, victim: RunningServer) -> None:
        victim.process.send_signal(signal.SIGTERM)
        self.faults.append("replica ended by SIGTERM")
        await asyncio.to_thread(victim.process.wait, 120)
        await self._replace(victim)

    async def _replace(self, victim: RunningServer) -> None:
        self.servers.remove(victim)
        new = await asyncio.to_thread(self._serve)
        self.servers.append(new)
        await asyncio.to_thread(self.gateway.operate, "POST", "", url=new.url)
        await asyncio.to_thread(self.gateway.operate, "DELETE", f"/{address(victim)}")

    async def _stop(self, victim: RunningServer) -> None:
        os.kill(victim.process.pid, signal.SIGSTOP)
        self.faults.append("replica stopped")
        try:
            await asyncio.sleep(self._fleet.hang_s + 2)
        finally:
            os.kill(victim.process.pid, signal.SIGCONT)
        await self._until_ready(victim)

    async def _kill_engine(self, victim: RunningServer) -> None:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(victim.engine_pid(), signal.SIGKILL)
            self.faults.append("engine killed")
            await self._until_ready(victim)

    async def _kill_rank(self, victim: RunningServer) -> None:
        found = list[int]()
        with contextlib.suppress(AssertionError, OSError):  # an engine that has just been killed has none
            found = await asyncio.to_thread(lambda: rank_pids(victim.engine_pid()))
        await self._signalled(found[-1:], signal.SIGKILL, "rank killed", victim)

    async def _kill_prefill(self, victim: RunningServer) -> None:
        found = await self._prefill_pids(victim)
        await self._signalled(found, signal.SIGKILL, "prefill engine killed", victim)

    async def _stop_prefill(self, victim: RunningServer) -> None:
        found = await self._prefill_pids(victim)
        try:
            await self._signalled(found, signal.SIGSTOP, "prefill engine stopped", victim)
            await asyncio.sleep(3)
        finally:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def _signalled(self, pids: list[int], number: int, what: str, victim: RunningServer) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self.faults.append(what)
        await self._until_ready(victim)

    async def _prefill_pids(self, server: RunningServer) -> list[int]:
        answer = await asyncio.to_thread(server.get, "/v1/fleet")
        return [one["pid"] for one in answer.json()["prefill_engines"] if one["pid"]]

    async def _drain(self, victim: RunningServer) -> None:
        await asyncio.to_thread(self.gateway.operate, "POST", f"/{address(victim)}/drain?move=true")
        self.faults.append("replica drained")
        await asyncio.to_thread(self.gateway.operate, "POST", f"/{address(victim)}/undrain")

    async def _replace_gateway(self, _: RunningServer) -> None:
        """A new one on the same port; the old one drains. Streams of the old one end there."""
        old, port = self.gateway, self.gateway.url.rpartition(":")[2]
        options = (self._key, *self._gateway_options(), "--port", port)
        self.gateway = await asyncio.to_thread(
            lambda: self._stack.enter_context(gateway_of(self.servers, *options))
        )
        old.process.send_signal(signal.SIGTERM)
        self.faults.append("gateway replaced")
        await asyncio.to_thread(old.process.wait, 300)

    async def _until_ready(self, server: RunningServer) -> None:
        while self.gateway.replica(server.url)["state"] != "ready":
            await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Outcome:
    streams: int
    lost: int
    wrong: int
    pauses_s: list[float]
    faults: list[str]
    examples: list[str]


async def siege(streams: int, concurrency: int, seed: int = 0, made_of: Fleet = Fleet()) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        fleet = await asyncio.to_thread(Siege, Path(folder), stack, concurrency, made_of)
        right = await fleet.play(range(min(streams, _DIFFERENT)))
        harm = asyncio.create_task(fleet.harm(seed))
        try:
            told = await fleet.play(range(streams))
        finally:
            harm.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await harm
    pairs = [(one, right[number % len(right)], number) for number, one in enumerate(told)]
    lost = [one for one, good, _ in pairs if one.error or (not one.ends and good.ends)]
    wrong = [
        f"stream {number}: {found}"
        for one, good, number in pairs
        if not one.error and (found := one.difference(good))
    ]
    examples = [one.error for one in lost[:3]] + wrong[:3]
    pauses_s = sorted(one.longest_pause_s for one in told)
    return Outcome(streams, len(lost), len(wrong), pauses_s, fleet.faults, examples)


def rows_of(outcome: Outcome) -> list[Row]:
    pauses, count = outcome.pauses_s, len(outcome.pauses_s)
    happened = ", ".join(f"{outcome.faults.count(one)} × {one}" for one in dict.fromkeys(outcome.faults))
    return [
        Row("streams", outcome.streams, "", note=happened),
        Row("lost", outcome.lost, "", "lower", must=0.0, note="; ".join(outcome.examples)),
        Row("with a wrong, missing or doubled token", outcome.wrong, "", "lower", must=0.0),
        Row("longest pause of a stream, p50", round(pauses[count // 2], 3), "s", "lower"),
        Row("longest pause of a stream, p99", round(pauses[int(count * 0.99)], 3), "s", "lower"),
        Row("longest pause of all", round(pauses[-1], 3), "s", "lower"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="dense", help="of the tiny model")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each engine; one of them is killed, too")
    parser.add_argument("--prefill", type=int, default=0, help="prefill engines of each server, hurt as well")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument(
        "--hang-timeout", type=float, default=3.0, help="of the gateway; more if machines are busy"
    )
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    fleet = Fleet(chosen.kind, chosen.tp, chosen.prefill, chosen.servers, chosen.hang_timeout)
    rows = rows_of(asyncio.run(siege(chosen.streams, chosen.concurrency, chosen.seed, fleet)))
    out.print(table(f"faults, on {machine()['cpu']}", rows))
    write_json(chosen.json, rows)
    sys.exit(not all(row.ok for row in rows))


if __name__ == "__main__":
    main()
