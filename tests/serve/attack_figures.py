"""What each attack does to an honest client's TTFT and to /health, as a table:

    python -m tests.serve.attack_figures [--json figures.json] [--gateway]

One server, or a gateway before two, with the built-in model, a key for the attacker and one for the honest client,
who asks one short question after the other (attack_probe.py). Every attack is measured beside undisturbed requests
of the same minute. Timings are no test: they depend on the machine, and the ratio is what counts.
"""

import argparse
import contextlib
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from cumulo.base.report import Row, machine
from cumulo.serve.access.keys import new_key
from tests.gateway.running_gateway import gateway_of, key_file
from tests.serve.attack_probe import Probe
from tests.serve.bodies.attack_bodies import ATTACKS
from tests.serve.http.raw import Client
from tests.serve.running_server import MODEL, RunningServer, running_server

SERVER = ("--no-console", "--max-context", "4096")


class Attacks:
    """Each public method is one attack of a second or a few."""

    def __init__(self, server: RunningServer, key: str) -> None:
        self._url = server.url
        self._http = httpx.Client(
            base_url=server.url,
            timeout=120,
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        self._chance = random.Random(0)

    def huge_bodies(self) -> None:
        """Bodies of 4 MiB with a million values, one after the other."""
        for name in ("parts", "messages", "prompts of one token", "input of responses"):
            attack = ATTACKS[name]
            self._http.post(attack.path, content=attack.body)

    def hostile_schemas(self) -> None:
        """A schema whose automaton has a hundred million states."""
        schema = {"type": "integer", "multipleOf": self._chance.choice([99_999_989, 99_999_971, 99_999_959])}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        self._post("/v1/chat/completions", self._chat(response_format=form))

    def header_floods(self) -> None:
        """Header lines without end, before any key is shown."""
        client = Client(self._url)
        client.send(b"GET / HTTP/1.1\r\nHost: x\r\n")
        client.flood(b"X-Header: value\r\n" * 1000, 64 << 20)
        client.socket.close()

    def half_sent_requests(self) -> None:
        """300 connections that begin a request and stop."""
        held = [Client(self._url) for _ in range(300)]
        for client in held:
            client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        time.sleep(2)
        for client in held:
            client.socket.close()

    def long_prompts(self) -> None:
        """Four prompts of 3,500 tokens at once, of which nothing is cached, given up after ten seconds."""
        prompts = [[self._chance.randrange(100, 40_000) for _ in range(3500)] for _ in range(4)]
        body = json.dumps({"model": MODEL, "prompt": prompts, "max_tokens": 1})
        with contextlib.suppress(httpx.ReadTimeout):
            self._http.post("/v1/completions", content=body, timeout=10)

    def texts_without_spaces(self) -> None:
        """Four connections with 600,000 Chinese characters, marks on letters, and many long prompts."""
        chinese = "".join(chr(self._chance.randint(0x4E00, 0x9FFF)) for _ in range(600_000))
        many = [chinese[begin : begin + 4000] for begin in range(0, 512_000, 4000)]
        asked = [
            ("/v1/chat/completions", self._chat(messages=[{"role": "user", "content": chinese}])),
            ("/v1/completions", {"model": MODEL, "prompt": "e\u0301" * 300_000, "max_tokens": 1}),
            ("/v1/embeddings", {"model": MODEL, "input": many}),
            ("/tokenize", {"model": MODEL, "prompt": chinese[:100_000]}),
        ]
        for path, body in asked:
            together(lambda path=path, body=body: self._post(path, body), 4)  # type: ignore[misc]

    def uploads(self) -> None:
        """Fifteen connections that send a file of 60 MiB each."""
        head, tail = (
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
            b'Content-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n',
            b"\r\n--x--\r\n",
        )
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        body = head + b"x" * (60 << 20) + tail
        together(lambda: self._send_file(body, headers), 15)

    def json_for_files(self) -> None:
        """Four connections that send 30 MiB of JSON where a file is expected."""
        body = json.dumps({"file": [[1]] * (5 << 20)}).encode()
        together(lambda: self._send_file(body, {}), 4)

    def log_probabilities(self) -> None:
        """Many answers with twenty log-probabilities for each token."""
        self._post("/v1/chat/completions", self._chat(n=8, logprobs=True, top_logprobs=20, max_tokens=32))

    def log_probabilities_of_prompts(self) -> None:
        """Log-probabilities of every token of long prompts."""
        prompt = [self._chance.randrange(100, 40_000) for _ in range(1000)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20, "logprobs": 5}
        self._patiently("/v1/completions", body)

    def all_places(self) -> None:
        """Two requests with 128 answers each: as many as run at a time."""
        chat = self._chat(n=128, max_tokens=64, temperature=1.0)
        together(lambda: self._patiently("/v1/chat/completions", chat), 2)

    def best_of_many(self) -> None:
        """Twenty answers for every one that is returned."""
        body = {"model": MODEL, "prompt": "Hi", "best_of": 20, "n": 1, "max_tokens": 48}
        self._patiently("/v1/completions", body)

    def beams(self) -> None:
        """A search with many beams."""
        body = self._chat(use_beam_search=True, n=16, max_tokens=32)
        self._patiently("/v1/chat/completions", body)

    def embeddings(self) -> None:
        """Sixteen long texts at once."""
        texts = [[self._chance.randrange(100, 40_000) for _ in range(400)] for _ in range(16)]
        self._patiently("/v1/embeddings", {"model": MODEL, "input": texts})

    def guided_answers(self) -> None:
        """Many answers by a schema that nobody has used before."""
        schema = {
            "type": "object",
            "properties": {f"p{self._chance.random()}": {"type": "string"} for _ in range(20)},
        }
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        self._patiently("/v1/chat/completions", self._chat(response_format=form, n=16, max_tokens=48))

    def short_questions(self) -> None:
        """Thirty short prompts at once, none of them cached."""

        def ask() -> None:
            prompt = [self._chance.randrange(100, 40_000) for _ in range(40)]
            self._patiently("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2})

        together(ask, 30)

    def _send_file(self, body: bytes, headers: dict[str, str]) -> None:
        with contextlib.suppress(httpx.TransportError):  # refused before it was read
            self._http.post("/v1/files", content=body, headers=headers)

    def _patiently(self, path: str, body: dict[str, Any]) -> None:
        """For ten seconds."""
        with contextlib.suppress(httpx.ReadTimeout):
            answer = self._http.post(path, content=json.dumps(body), timeout=10)
            if answer.status_code != 200:
                raise SystemExit(f"this attack is refused, so it shows nothing: {answer.text[:500]}")

    def _chat(self, **more: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2} | more

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self._http.post(path, content=json.dumps(body))


def together(attack: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=attack) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _story(server: RunningServer, key: str, request_id: str) -> str:
    """What happened to a request: where its time went."""
    url = f"{server.url}/v1/requests/{request_id}/explain"
    told = httpx.get(url, headers={"Authorization": f"Bearer {key}"}).json()["data"][0]
    return "\n".join(f"    {event['at_ms']:8.1f} ms  {event['words']}" for event in told["events"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=40, help="honest requests per figure")
    parser.add_argument("--only", default="", help="part of an attack's name")
    parser.add_argument("--gateway", action="store_true", help="attack a gateway before two servers")
    parser.add_argument("--stories", action="store_true", help="the slowest honest request's story")
    chosen = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        path = Path(folder) / "keys.json"
        honest, attacker = new_key(path, "honest"), new_key(path, "attacker")
        keys = ("--api-keys", str(path))
        if chosen.gateway:
            fleet = key_file(Path(folder))
            servers = [
                ends.enter_context(running_server("--fleet-key-file", fleet, *SERVER)) for _ in range(2)
            ]
            server: RunningServer = ends.enter_context(gateway_of(servers, fleet, *keys))
        else:
            server = ends.enter_context(running_server(*keys, *SERVER))
        attacks = Attacks(server, attacker)
        names = [name for name in vars(Attacks) if not name.startswith("_") and chosen.only in name]
        with Probe(server, key=honest, at_least=chosen.requests) as probe:
            probe.figures()
            for name in names:
                quiet = probe.figures()
                during = probe.figures(lambda name=name: getattr(attacks, name)())  # type: ignore[misc]
                print(f"{name}\n  quiet   {quiet}\n  during  {during}", flush=True)
                if chosen.stories:
                    print(_story(server, honest, during.slowest_id), flush=True)
                ratio = during.ttft_p99_ms / quiet.ttft_p99_ms
                rows += [
                    Row(f"{name}: TTFT p99 over undisturbed", ratio, "", "lower", must=2.0),
                    Row(f"{name}: slowest /health", during.health_worst_ms / 1e3, "s", "lower", must=1.0),
                    Row(
                        f"{name}: honest requests lost",
                        float(len(during.failures)),
                        "",
                        "lower",
                        must=0.0,
                    ),
                ]
    if chosen.json is not None:
        report = {"machine": machine(), "rows": [row.as_dict() for row in rows]}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
