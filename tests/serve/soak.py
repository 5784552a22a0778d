"""A soak: clients of every kind keep a server saturated, then its books are checked. Used by test_soak, and as

    python -m tests.serve.soak --minutes 10

Clients that read to the end, hang up while they wait, while they are answered or right away; forms, tools,
several answers; prompts that are too long, bodies that are no JSON. Afterwards nothing may run, wait, or hold a KV
block, and neither process may have grown: the median of its resident memory over the last fifth of the time is
compared with that over the fifth after the warm-up (the first two fifths), and Theil and Sen's slope is reported.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cumulo.base.report import machine
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.soak_clients import CLIENTS, PROBES, Hurt, Visit, weights
from tests.serve.tiny_model import save_tiny_model

# More clients than places: somebody always waits, and some are turned away. So few blocks that requests preempt
# each other, and so few stories that their memory is full before the warm-up ends.
SERVER = (
    "--no-console", "--max-running", "16", "--max-queue", "12", "--stories", "200", "--max-context", "512",
    "--kv-memory-gib", "0.002",
)  # fmt: skip
CLIENTS_AT_ONCE = 40
PATIENCE_S = 300.0  # for one request: more is stuck
ALLOWED_GROWTH = 0.03  # of a process, plus this much: allocators breathe
ALLOWED_GROWTH_MIB = 4.0
# In less than this, first uses (a grammar, log-probabilities, a worker) look like a leak: only what an attack could
# take at once, hundreds of MiB, is then told from them.
LONG_ENOUGH_TO_SEE_A_LEAK_S = 120.0
SHORT_GROWTH_MIB = 64.0


@dataclass(slots=True)
class Memory:
    """One process's resident memory over time, in MiB."""

    pid: int
    times_s: list[float] = field(default_factory=list)
    sizes_mib: list[float] = field(default_factory=list)

    def sample(self, now_s: float) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.times_s.append(now_s)
        self.sizes_mib.append(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20))

    def fifth(self, index: int) -> float:
        """The median over a fifth of the time."""
        count = len(self.sizes_mib)
        part = self.sizes_mib[count * index // 5 : count * (index + 1) // 5]
        return statistics.median(part or [0.0])  # a soak that broke off has too few

    @property
    def growth_mib(self) -> float:
        return self.fifth(4) - self.fifth(2)

    @property
    def slope_mib_per_minute(self) -> float:
        """After the warm-up: the median of the slopes between all pairs of (at most 200) samples."""
        first = len(self.times_s) * 2 // 5
        step = max(1, (len(self.times_s) - first) // 200)
        points = list(zip(self.times_s[first::step], self.sizes_mib[first::step], strict=True))
        slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :]]
        return 60 * statistics.median(slopes or [0.0])

    @property
    def grew(self) -> bool:
        return self.growth_mib > self.fifth(2) * ALLOWED_GROWTH + ALLOWED_GROWTH_MIB

    def leaked(self, seconds: float) -> bool:
        return self.grew if seconds >= LONG_ENOUGH_TO_SEE_A_LEAK_S else self.growth_mib > SHORT_GROWTH_MIB


@dataclass(slots=True)
class Report:
    seconds: float
    outcomes: Counter[str]  # of visits: what kind and how it ended
    problems: list[str]
    server: Memory
    engine: Memory
    left: dict[str, float]  # what the server says of itself afterwards

    def lines(self) -> list[str]:
        said = [f"{sum(self.outcomes.values()):,} visits in {self.seconds:.0f} s"]
        said += [f"  {count:>8,} {kind}" for kind, count in sorted(self.outcomes.items())]
        for name, memory in (("server", self.server), ("engine", self.engine)):
            said.append(
                f"{name}: {memory.fifth(2):.1f} MiB after the warm-up, {memory.fifth(4):.1f} MiB at the end "
                f"({memory.growth_mib:+.1f}; {memory.slope_mib_per_minute:+.2f} MiB a minute)"
            )
        said.append("left: " + ", ".join(f"{name} {value:g}" for name, value in self.left.items()))
        return said + [f"PROBLEM: {problem}" for problem in self.problems]


async def _client(
    number: int,
    url: str,
    goes_on: Callable[[], bool],
    expected: dict[str, str],
    outcomes: Counter[str],
    problems: list[str],
) -> None:
    """One visitor after the other, each with a mind of its own."""
    chance = random.Random(number)
    kinds, odds = list(CLIENTS), weights()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        while goes_on():
            kind = chance.choices(kinds, odds)[0]
            visit = Visit(http, chance, expected)
            try:
                outcome = await asyncio.wait_for(CLIENTS[kind].play(visit), PATIENCE_S)
            except Hurt as hurt:
                outcome = "wrong"
                problems.append(f"{kind}: {hurt}")
            except TimeoutError:
                outcome = "stuck"
                problems.append(f"{kind}: nothing for {PATIENCE_S:g} s")
            except httpx.HTTPError as error:
                outcome = "lost"
                problems.append(f"{kind}: {error!r}")
            outcomes[f"{kind}: {outcome}"] += 1
            if len(problems) > 20:
                return


async def _soak(server: RunningServer, seconds: float, enough: Callable[[Counter[str]], bool]) -> Report:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        expected = {prompt: await probe_alone(http, prompt) for prompt in PROBES}
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    memories = Memory(server.process.pid), Memory(server.engine_pid())
    began_s = time.monotonic()

    def goes_on() -> bool:
        return time.monotonic() < began_s + seconds and not enough(outcomes)

    clients = [
        asyncio.create_task(_client(number, server.url, goes_on, expected, outcomes, problems))
        for number in range(CLIENTS_AT_ONCE)
    ]
    while goes_on() and len(problems) <= 20:
        await asyncio.sleep(0.25)
        try:
            for memory in memories:
                memory.sample(time.monotonic() - began_s)
        except FileNotFoundError:
            problems.append("a process of the server ended")
            break
    for client in clients:
        await client
    return Report(time.monotonic() - began_s, outcomes, problems, *memories, left={})


async def probe_alone(http: httpx.AsyncClient, prompt: str) -> str:
    return await Visit(http, random.Random(0), {}).greedy(prompt)


def soak(
    server: RunningServer, seconds: float, enough: Callable[[Counter[str]], bool] = lambda outcomes: False
) -> Report:
    """For so long, or until there were visits enough."""
    engine = server.engine_pid()
    report = asyncio.run(_soak(server, seconds, enough))
    names = {
        "running": "cumulo:num_requests_running", "waiting": "cumulo:num_requests_waiting",
        "blocks in use": "cumulo:kv_cache_usage_perc", "restarts": "cumulo:engine_restarts",
    }  # fmt: skip

    def is_idle() -> bool:
        report.left = {name: server.sample(metric) for name, metric in names.items()}
        return not any(report.left.values())

    try:
        wait_for(is_idle, "the end of all requests", server)
    except AssertionError:
        report.problems.append(f"not idle 30 s after the last request: {report.left}")
    if server.engine_pid() != engine:
        report.problems.append("the engine was replaced")
    if "Traceback" in server.log:
        report.problems.append(server.log[server.log.index("Traceback") :][:2000])
    for name, memory in (("server", report.server), ("engine", report.engine)):
        if memory.leaked(report.seconds):
            report.problems.append(f"the {name} process grew by {memory.growth_mib:.1f} MiB")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder))
        with running_server(str(model), *SERVER) as server:
            report = soak(server, chosen.minutes * 60)
    print("\n".join(report.lines()))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(_rows(report), indent=1) + "\n")
    raise SystemExit(1 if report.problems else 0)


def _rows(report: Report) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"name": "soak: visits", "value": sum(report.outcomes.values()), "unit": "requests", "better": "higher"},
        {"name": "soak: problems", "value": len(report.problems), "unit": "", "better": "lower", "must": 0,
         "ok": not report.problems},
    ]  # fmt: skip
    for name, memory in (("server", report.server), ("engine", report.engine)):
        must = memory.fifth(2) * ALLOWED_GROWTH + ALLOWED_GROWTH_MIB
        rows.append(
            {"name": f"soak: growth of the {name} process", "value": round(memory.growth_mib, 2), "unit": "MiB",
             "better": "lower", "must": round(must, 2), "ok": not memory.grew,
             "slope_mib_per_minute": round(memory.slope_mib_per_minute, 3), "size_mib": round(memory.fifth(2), 1)}
        )  # fmt: skip
    return {
        "machine": machine(),
        "seconds": report.seconds,
        "rows": rows,
        "outcomes": dict(sorted(report.outcomes.items())),
    }


if __name__ == "__main__":
    main()
