"""A siege: attackers of every kind beside honest clients. Used by test_siege, and as

    python -m tests.serve.siege --minutes 10 [--gateway]

Honest clients have keys of their own and repeat requests whose answers are known: each must be answered, with
status 200 and with the right text, however busy the attackers are; so must each line of a batch. No attack may get
a 5xx other than 503 ("come again"). Afterwards nothing may run, wait or hold a KV block, and no process may have
grown (as in soak.py). --gateway: a gateway is besieged, with two servers and a hostile one behind it.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from cumulo.base.report import machine
from cumulo.serve.access.keys import new_key
from tests import processes
from tests.gateway.hostile_upstream import NAME as HOSTILE
from tests.gateway.hostile_upstream import hostile_upstream
from tests.gateway.running_gateway import RunningGateway, key_file
from tests.serve.batches.help import begin, end_of, line, results
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.soak import Memory
from tests.serve.tiny_model import NAME, save_tiny_model

SERVER = (
    "--no-console",
    "--max-running",
    "16",
    "--stories",
    "200",
    "--max-context",
    "512",
    "--kv-memory-gib",
    "0.02",
)
HONEST_CLIENTS = 4
THINKS_S = 0.1  # an honest client, before it asks again
PATIENCE_S = 300.0
PROMPTS = tuple(f"Honest question number {number}." for number in range(12))


@dataclass(frozen=True, slots=True)
class Besieged:
    """What attackers and honest clients ask, and the servers that answer: itself, or those behind a gateway."""

    front: RunningServer
    servers: tuple[RunningServer, ...]
    keys: dict[str, str]

    def processes(self) -> dict[str, int]:
        gateway = {} if self.front in self.servers else {"gateway": self.front.process.pid}
        for number, server in enumerate(self.servers, 1):
            gateway |= {f"server {number}": server.process.pid, f"engine {number}": server.engine_pid()}
        return gateway


@contextlib.contextmanager
def besieged_server(folder: Path, *, gateway: bool = False) -> Iterator[Besieged]:
    path = folder / "keys.json"
    keys = {name: new_key(path, name) for name in ("ann", "bob", "eve")}
    model, asks_keys = str(save_tiny_model(folder)), ("--api-keys", str(path))
    if not gateway:
        with running_server(model, *asks_keys, *SERVER) as server:
            yield Besieged(server, (server,), keys)
        return
    fleet = key_file(folder)
    with contextlib.ExitStack() as ends:
        options = (model, "--fleet-key-file", fleet, *SERVER)
        servers = tuple(ends.enter_context(running_server(*options)) for _ in range(2))
        hostile = ends.enter_context(hostile_upstream())
        pools = [f"--pool={NAME}={server.url}" for server in servers] + [f"--pool={HOSTILE}={hostile}"]
        front = RunningGateway("--fleet-key-file", fleet, *asks_keys, *pools)
        ends.callback(front.end)
        yield Besieged(front, servers, keys)


@dataclass(slots=True)
class Report:
    seconds: float
    answered: int = 0
    batched: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    quiet_ttft_ms: list[float] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memories: dict[str, Memory] = field(default_factory=dict)

    def lines(self) -> list[str]:
        said = [
            f"{self.answered:,} honest requests answered in {self.seconds:.0f} s, and {self.batched:,} of batches, "
            f"beside {sum(self.attacks.values()):,} attacks",
            f"TTFT undisturbed p50 {_share(self.quiet_ttft_ms, 0.5):.0f} ms, "
            f"p99 {_share(self.quiet_ttft_ms, 0.99):.0f} ms; besieged "
            f"p50 {_share(self.ttft_ms, 0.5):.0f} ms, p99 {_share(self.ttft_ms, 0.99):.0f} ms",
        ]
        said += [f"  {count:>8,} {kind}" for kind, count in sorted(self.attacks.items())]
        said += [
            f"{name}: {memory.fifth(2):.1f} MiB after the warm-up, {memory.fifth(4):.1f} MiB at the end"
            for name, memory in self.memories.items()
        ]
        return said + [f"PROBLEM: {problem}" for problem in self.problems]


def _share(times: list[float], share: float) -> float:
    ordered = sorted(times) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _question(prompt: str) -> dict[str, Any]:
    return {
        "model": NAME, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 12,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip


async def _ask(http: httpx.AsyncClient, prompt: str) -> tuple[str, float]:
    """A streamed greedy answer, and the milliseconds to its first event."""
    text, first_ms, began_s = "", 0.0, time.perf_counter()
    async with http.stream("POST", "/v1/chat/completions", json=_question(prompt)) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code} {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            first_ms = first_ms or (time.perf_counter() - began_s) * 1e3
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text, first_ms


async def _honest(
    number: int, url: str, key: str, goes_on: Callable[[], bool], expected: dict[str, str], report: Report
) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, headers=headers) as http:
        while goes_on() and len(report.problems) < 20:
            prompt = PROMPTS[(report.answered + number) % len(PROMPTS)]
            try:
                text, first_ms = await _ask(http, prompt)
            except (AssertionError, httpx.HTTPError) as error:
                report.problems.append(f"an honest request was lost: {error!r}")
                continue
            report.answered += 1
            report.ttft_ms.append(first_ms)
            if text != expected[prompt]:
                report.problems.append(f"wrong answer to {prompt!r}: {text!r}, not {expected[prompt]!r}")
            await asyncio.sleep(THINKS_S)


def _batches(
    besieged: Besieged, goes_on: Callable[[], bool], expected: dict[str, str], report: Report
) -> None:
    """One batch of an honest client after the other; the last is waited for, however long attackers are served."""
    client = besieged.front.client(besieged.keys["bob"])
    lines = [line(prompt, {key: value for key, value in _question(prompt).items() if key != "stream"})
             for prompt in PROMPTS]  # fmt: skip
    while goes_on():
        try:
            ended = end_of(client, begin(client, lines), besieged.front)
            found = results(client, ended.output_file_id)
            texts = {
                name: one["response"]["body"]["choices"][0]["message"]["content"]
                for name, one in found.items()
            }
        except (openai.OpenAIError, AssertionError) as error:
            report.problems.append(f"a batch was lost: {error!r}")
            return
        report.batched += len(texts)
        if texts != expected:
            report.problems.append(f"a batch ended as {ended.status} with {texts}, not {expected}")
            return


async def _besiege(besieged: Besieged, seconds: float, seed: int) -> Report:
    report, keys, url = Report(seconds), besieged.keys, besieged.front.url
    headers = {"Authorization": f"Bearer {keys['ann']}"}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, headers=headers) as http:
        expected = {prompt: (await _ask(http, prompt))[0] for prompt in PROMPTS}
        for prompt in PROMPTS * 3:
            report.quiet_ttft_ms.append((await _ask(http, prompt))[1])
    report.memories = {name: Memory(pid) for name, pid in besieged.processes().items()}
    said = tempfile.TemporaryFile()  # noqa: SIM115
    attackers = processes.start_module(
        "tests.serve.siege_attackers", url, keys["eve"], str(seconds), str(seed), stdout=said
    )
    began_s = time.monotonic()

    def goes_on() -> bool:
        in_time = time.monotonic() < began_s + seconds
        return attackers.poll() is None and (in_time or report.answered < 10 * HONEST_CLIENTS)

    clients = [
        asyncio.create_task(
            _honest(number, url, keys["ann" if number % 2 else "bob"], goes_on, expected, report)
        )
        for number in range(HONEST_CLIENTS)
    ]
    clients.append(asyncio.create_task(asyncio.to_thread(_batches, besieged, goes_on, expected, report)))
    while attackers.poll() is None:
        await asyncio.sleep(0.25)
        try:
            for memory in report.memories.values():
                memory.sample(time.monotonic() - began_s)
        except FileNotFoundError:
            report.problems.append("a process of the server ended")
            break
    await asyncio.gather(*clients)
    await asyncio.to_thread(attackers.wait)
    report.seconds = time.monotonic() - began_s
    said.seek(0)
    found = json.loads(said.read() or b'{"outcomes": {}, "bad": ["the attackers broke down"]}')
    report.attacks = Counter(found["outcomes"])
    report.problems += [f"an attack got {bad}" for bad in found["bad"]]
    return report


def besiege(besieged: Besieged, seconds: float, seed: int = 0) -> Report:
    """Attacks begin for so long; the last of each attacker is waited for."""
    pids = besieged.processes()
    report = asyncio.run(_besiege(besieged, seconds, seed))
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_restarts")
    left: dict[str, float] = {}

    def is_idle() -> bool:
        left.update({name: sum(one.sample(f"cumulo:{name}") for one in besieged.servers) for name in names})
        return not any(left.values())

    _stop_batches(besieged)
    try:
        wait_for(is_idle, "the end of all requests", besieged.front)
    except AssertionError:
        report.problems.append(f"not idle minutes after the siege: {left}")
    if besieged.processes() != pids:
        report.problems.append("an engine was replaced")
    for one in dict.fromkeys((besieged.front, *besieged.servers)):
        if "Traceback" in one.log:
            report.problems.append(one.log[one.log.index("Traceback") :][:2000])
    report.problems += [
        f"the process of {name} grew by {memory.growth_mib:.1f} MiB"
        for name, memory in report.memories.items()
        if memory.leaked(report.seconds)
    ]
    return report


def _stop_batches(besieged: Besieged) -> None:
    """Those that the attackers have left behind."""
    client = besieged.front.client(besieged.keys["eve"])
    for batch in client.batches.list(limit=100):
        if batch.status in ("validating", "in_progress"):
            with contextlib.suppress(openai.OpenAIError):  # it has ended meanwhile
                client.batches.cancel(batch.id)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gateway", action="store_true", help="besiege a gateway before two servers")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        besieged_server(Path(folder), gateway=chosen.gateway) as besieged,
    ):
        report = besiege(besieged, chosen.minutes * 60, chosen.seed)
    print("\n".join(report.lines()))
    if chosen.json is not None:
        rows: list[dict[str, Any]] = [
            {"name": "siege: honest requests answered", "value": report.answered, "unit": "requests",
             "better": "higher"},
            {"name": "siege: problems", "value": len(report.problems), "unit": "", "better": "lower", "must": 0,
             "ok": not report.problems},
        ]  # fmt: skip
        chosen.json.write_text(
            json.dumps({"machine": machine(), "seconds": report.seconds, "rows": rows}, indent=1)
        )
    raise SystemExit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
