"""Routing on real replicas next to the simulation of the same: hit rate, TTFT and throughput of each router.

    python benchmarks/fleet_routing.py mooncake_conversation_trace.jsonl.gz

Plays a scaled-down Mooncake trace (a hashed block of 512 tokens becomes one KV block of 16) through the Fleet of
`cumulo serve --replicas 3`, with three engine processes on this machine's CPU, and through `simulate_fleet` with
the same scheduler, the same KV blocks and the same routers. What a step costs is fitted twice: to other requests of
the trace, played beforehand by the same three engines, and to the steps of the run that is compared.
The time outside the engines (to them and back, waiting for a core) is fitted to the same requests that were played
beforehand: the client's TTFT less the engine's. There is no HTTP and no tokenization in it.
"""

import argparse
import asyncio
import gzip
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from cumulo.base.report import machine
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.routing import ROUTERS, router
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.outputs import Delta
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.fleet import simulate_fleet
from cumulo.engine.simulate.run import Arrival, DecodeTime, StepTime
from cumulo.plan.serve.fleet import shared_cache_share
from cumulo.plan.serve.step_cost import load_of
from cumulo.plan.serve.traffic import Traffic
from cumulo.serve.engine_link.engine_settings import EngineSettings
from cumulo.serve.engine_link.in_flight import Failure, Inbox, InFlight
from cumulo.serve.engine_link.messages import Finished, Ready, Stats, StepRecord, Submit
from cumulo.serve.replicas.fleet import Fleet
from tests.serve.tiny_model import Sizes, save_tiny_model

BLOCK, SCALE = 16, 32  # a block of 512 tokens of the trace becomes one of 16
_WINDOW = 4000  # requests of the trace to choose from
SIZES = Sizes(layers=4, hidden=128, ffn=384, heads=4, kv_heads=2, head_dim=32)
_ALIKE = 20  # measured steps on both sides of a size, of which one is drawn
HOST_S = 2e-4  # of the loop to plan a step or to take one in; hidden behind the step before


def read_trace(path: Path, first: int, count: int, rate: float) -> list[Arrival]:
    """Requests of the trace, scaled down, at the given mean rate but with its own bursts. So few requests share
    next to nothing unless they are of the same conversations: those whose first three blocks occur thrice or more.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        window = [json.loads(line) for line in file][first : first + _WINDOW]
    times = Counter(tuple(line["hash_ids"][:3]) for line in window)
    lines = [line for line in window if times[tuple(line["hash_ids"][:3])] >= 3][:count]
    begun, ended = lines[0]["timestamp"], lines[-1]["timestamp"]
    factor = (len(lines) - 1) / rate / max(1, ended - begun)
    arrivals = []
    for line in lines:
        tokens = max(1, line["input_length"] // SCALE)
        shared = tuple((name, BLOCK) for name in line["hash_ids"][: tokens // BLOCK])
        output = max(2, line["output_length"] // SCALE)
        arrivals.append(Arrival((line["timestamp"] - begun) * factor, tokens, output, shared))
    return arrivals


def prompt_of(arrival: Arrival, number: int, vocabulary: int) -> bytes:
    """Token ids: the same for the same hashed block, and the rest of its own."""
    found = array("i")
    for name, tokens in arrival.shared:
        rng = random.Random(name)
        found.extend(rng.randrange(vocabulary) for _ in range(tokens))
    own = random.Random(f"own {number}")
    found.extend(own.randrange(vocabulary) for _ in range(arrival.prompt_tokens - len(found)))
    return found.tobytes()


@dataclass
class Watched:
    """The Observer of a real run."""

    due_s: dict[str, float] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    engine_ttft_s: dict[str, float] = field(default_factory=dict)
    cached: int = 0
    failures: list[str] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def on_progress(self, stats: Stats) -> None:
        self.records += stats.records

    def on_delta(self, request: InFlight, delta: Delta, now_s: float) -> None:
        self.first_s.setdefault(delta.request_id, now_s)

    def on_end(self, request: InFlight, end: Finished | Failure) -> None:
        self.ended_s[request.submit.request_id] = time.perf_counter()
        if isinstance(end, Failure):
            self.failures.append(end.message)
        else:
            self.cached += end.story.cached_tokens
            self.engine_ttft_s[request.submit.request_id] = end.story.ttft_s or 0.0
        if len(self.ended_s) == len(self.due_s):
            self.done.set()

    def outside_s(self) -> list[float]:
        """Of every request, the part of its TTFT that it was not in its engine for, in order of size."""
        return sorted(
            self.first_s[name] - due_s - self.engine_ttft_s[name] for name, due_s in self.due_s.items()
        )


@dataclass(frozen=True, slots=True)
class Result:
    tok_s: float
    ttft_s: list[float]  # in order of size
    engine_p50_s: float  # of it in the engine
    cached_share: float
    busiest: float

    def ttft_ms(self, share: float) -> float:
        return 1e3 * self.ttft_s[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]


async def play(
    folder: Path, arrivals: Sequence[Arrival], policy: str, chosen: argparse.Namespace
) -> tuple[Result, Watched, Ready]:
    """A fresh fleet, so that no cache is left from the run before."""
    watched = Watched()
    config = EngineConfig(device="cpu", threads=1, kv_blocks=chosen.blocks, max_context=4096, max_running=64)
    fleet = Fleet(EngineSettings(model=str(folder), config=config), watched, chosen.replicas, policy)
    try:
        info = await fleet.start()
        while any(replica.refuses for replica in fleet.replicas.values()):
            await asyncio.sleep(0.05)
        prompts = [prompt_of(one, number, info.vocab_size) for number, one in enumerate(arrivals)]
        for number in range(3 * chosen.replicas):  # steps of all kinds have run once
            submit(fleet, watched, f"warm-{number}", prompts[-1 - number][: 4 * 200], 8)
        await watched.done.wait()
        watched.due_s.clear(), watched.first_s.clear(), watched.ended_s.clear(), watched.records.clear()
        watched.done.clear()
        watched.cached = 0
        before = {one.name: one.prompt_tokens - one.cached_tokens for one in fleet.replicas.values()}
        began_s = time.perf_counter()
        for number, one in enumerate(arrivals):
            watched.due_s[f"due-{number}"] = began_s + one.arrived_s
        for number, one in enumerate(arrivals):
            await asyncio.sleep(max(0.0, began_s + one.arrived_s - time.perf_counter()))
            submit(fleet, watched, f"due-{number}", prompts[number], one.output_tokens, note=False)
        await watched.done.wait()
        span_s = max(watched.ended_s.values()) - began_s
        work = [one.prompt_tokens - one.cached_tokens - before[one.name] for one in fleet.replicas.values()]
    finally:
        await fleet.close()
    if watched.failures:
        raise SystemExit(f"{len(watched.failures)} requests failed: {watched.failures[0]}")
    prompt_tokens = sum(one.prompt_tokens for one in arrivals)
    found = Result(
        sum(one.output_tokens for one in arrivals) / span_s,
        sorted(watched.first_s[name] - due_s for name, due_s in watched.due_s.items()),
        statistics.median(watched.engine_ttft_s[name] for name in watched.due_s),
        watched.cached / prompt_tokens,
        max(work) * len(work) / max(1, sum(work)),
    )
    return found, watched, info


def submit(fleet: Fleet, watched: Watched, name: str, prompt: bytes, tokens: int, note: bool = True) -> None:
    if note:
        watched.due_s[name] = time.perf_counter()
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=1)
    fleet.submit(Submit(name, prompt, params, stream=True), Inbox())


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A step costs so much, and so much for each prompt token, each decoded one, and each pair of a prompt token
    with one that it attends to; times what steps of the same size were found to take more or less, drawn anew for
    each. On a machine that others use, too, that spread is most of what a request waits for."""

    step_s: float
    prefill_s: float
    decode_s: float
    pair_s: float
    spread: tuple[float, ...] = (1.0,)  # measured over fitted, of every step ...
    sizes_s: tuple[float, ...] = (
        0.0,
    )  # ... by what was fitted, in order: long steps vary less than short ones
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def of_steps(cls, records: Sequence[StepRecord]) -> "FittedCost":
        """Least squares on relative errors, so that a slow step counts as one step; no term is negative."""
        rows = np.array([(1.0, one.prefill_tokens, one.decode_tokens, one.prompt_pairs) for one in records])
        took = np.array([one.finished_s - one.started_s for one in records])
        terms = np.ones(4, dtype=bool)
        while True:
            values = np.zeros(4)
            values[terms], *_ = np.linalg.lstsq(
                rows[:, terms] / took[:, None], np.ones(len(took)), rcond=None
            )
            if (values >= 0).all():
                break
            terms &= values > 0
        fitted = np.maximum(rows @ values, 1e-6)
        by_size = np.argsort(fitted, kind="stable")
        spread = (took / fitted)[by_size].tolist()
        return cls(*map(float, values), tuple(spread), tuple(fitted[by_size].tolist()))

    def time_of(self, plan: StepPlan, shared: Mapping[int, int]) -> StepTime:
        load = load_of(plan)
        decodes = plan.counts.count(1)
        fitted_s = (
            self.step_s
            + self.prefill_s * (plan.tokens - decodes)
            + self.decode_s * decodes
            + self.pair_s * load.chunk_pairs
        )
        at = bisect_left(self.sizes_s, fitted_s) + self.rng.randint(-_ALIKE, _ALIKE)
        ratio = self.spread[min(len(self.spread) - 1, max(0, at))]
        return StepTime(HOST_S, fitted_s * ratio, HOST_S)

    def decode(self, rows: int) -> DecodeTime:
        """What the router expects of a step; steps themselves are timed one by one."""
        return DecodeTime(HOST_S, self.step_s + self.decode_s * rows, 0.0, 0.0, HOST_S)

    def arrival_s(self, prompt_tokens: int) -> float:
        return HOST_S


def simulate(
    arrivals: Sequence[Arrival],
    policy: str,
    cost: FittedCost,
    front_door_s: float,
    info: Ready,
    replicas: int,
) -> Result:
    config = SchedulerConfig(
        blocks=info.kv_blocks, block_size=info.block_size, max_context=info.max_context,
        max_running=info.max_running, max_tokens_per_step=info.max_tokens_per_step,
    )  # fmt: skip
    engines = [SimulatedEngine(Scheduler(config), cost, step_by_step=True) for _ in range(replicas)]
    runs = simulate_fleet(arrivals, engines, router(policy))
    served = [one for run in runs for one in run.served]
    span_s = max(run.ended_s for run in runs) - arrivals[0].arrived_s
    ttft_s = sorted((one.first_token_s or 0.0) - one.arrival.arrived_s for one in served)
    work = [sum(one.arrival.prompt_tokens - one.cached_tokens for one in run.served) for run in runs]
    return Result(
        sum(one.output_tokens for one in arrivals) / span_s,
        [one + front_door_s for one in ttft_s],
        statistics.median(ttft_s),
        sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in arrivals),
        max(work) * len(work) / max(1, sum(work)),
    )


_FIGURES: tuple[tuple[str, str, float | None, Callable[[Result], float]], ...] = (
    ("throughput", "tok/s", 0.10, lambda one: one.tok_s),
    ("TTFT p50", "ms", 0.15, lambda one: one.ttft_ms(0.5)),
    ("TTFT p50 in the engine", "ms", None, lambda one: 1e3 * one.engine_p50_s),
    ("TTFT p99", "ms", None, lambda one: one.ttft_ms(0.99)),
    ("cached share of prompt tokens", "", None, lambda one: one.cached_share),
    ("busiest replica over the mean", "", None, lambda one: one.busiest),
)


def rows_of(policy: str, real: Result, before: Result, own: Result) -> list[dict[str, Any]]:
    """`before`: simulated with step costs of requests played beforehand; `own`: with those of the run itself.
    They differ where other programs use the machine, too."""
    rows = []
    for name, unit, aim, read in _FIGURES:
        measured, simulated, again = read(real), read(before), read(own)
        error = abs(simulated / measured - 1) if measured else 0.0
        rows.append(
            {"name": f"{policy}: {name}", "unit": unit, "better": "higher" if unit == "tok/s" else "lower",
             "value": round(measured, 3), "simulated": round(simulated, 3), "error": round(error, 3),
             "simulated_with_own_costs": round(again, 3)}
            | ({} if aim is None else {"aim": aim, "ok": error <= aim})
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second, on average")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=3000, help="KV blocks of a replica")
    parser.add_argument("--calibrate", type=int, default=150, help="requests that the costs are fitted to")
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    arrivals = read_trace(chosen.trace, 0, chosen.requests, chosen.rate)
    others = read_trace(chosen.trace, 6000, chosen.calibrate, chosen.rate)
    with tempfile.TemporaryDirectory() as made:
        folder = save_tiny_model(Path(made), 4096, SIZES)
        _, watched, info = asyncio.run(play(folder, others, "round-robin", chosen))
        cost = FittedCost.of_steps(watched.records)
        print(
            f"fitted to {len(watched.records):,} steps of {chosen.calibrate} other requests: a step takes "
            f"{cost.step_s * 1e3:.2f} ms and {cost.prefill_s * 1e6:.0f} us per prompt token, "
            f"{cost.decode_s * 1e6:.0f} us per decoded one, {cost.pair_s * 1e9:.0f} ns per pair; the median step "
            f"takes {np.quantile(cost.spread, 0.5):.2f} times that, one in twenty "
            f"{np.quantile(cost.spread, 0.95):.2f} times"
        )
        outside_s = watched.outside_s()
        front_door_s = float(np.quantile(outside_s, 0.5))
        print(
            f"outside the engine these requests spent {front_door_s * 1e3:.2f} ms of their TTFT (p50; one in ten "
            f"{np.quantile(outside_s, 0.9) * 1e3:.2f} ms): added to every simulated TTFT"
        )
        ideal = shared_cache_share(
            Traffic(tuple(arrivals)), chosen.replicas * info.kv_blocks, info.block_size
        )
        print(f"one cache as large as all {chosen.replicas} would find {ideal:.1%} of the prompt tokens")
        rows = []
        for policy in chosen.routers.split(","):
            real, watched, _ = asyncio.run(play(folder, arrivals, policy, chosen))
            before, own = (
                simulate(arrivals, policy, one, front_door_s, info, chosen.replicas)
                for one in (cost, FittedCost.of_steps(watched.records))
            )
            rows += rows_of(policy, real, before, own)
            for row in rows[-len(_FIGURES) :]:
                print(
                    f"{row['name']}: {row['value']:g} {row['unit']} (simulated {row['simulated']:g}, "
                    f"{row['error']:.1%} off; with the run's own step costs {row['simulated_with_own_costs']:g})",
                    flush=True,
                )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
