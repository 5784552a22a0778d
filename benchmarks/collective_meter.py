"""What timing every collective of a training run costs: steps of two data-parallel ranks with the meter on and off,
in turns, in processor time, and the same for one call of the smallest all-reduce.

python benchmarks/collective_meter.py
"""

import statistics
import sys
import time

import torch

from cumulo.base import report
from cumulo.base.report import Row
from cumulo.bench.overlapped.message_order import LENGTH, ROWS, SPEC, OrderPlan, _batch
from cumulo.ranks.collective_meter import CollectiveMeter, meter
from cumulo.ranks.collectives import barrier
from cumulo.ranks.groups import Groups, world_group
from cumulo.ranks.start import run_ranks
from cumulo.train.run.model_run import ModelRun

ROUNDS = 15


def _rank(rank: int, ranks: int) -> tuple[list[float], list[float], float, int]:
    config = OrderPlan(ranks, False, (1.0,), 1).config("ready")
    run = ModelRun(SPEC, config, Groups(config.layout, rank), torch.device("cpu"))
    batch, calls = _batch(rank), 0
    times: dict[bool, list[float]] = {True: [], False: []}
    real = CollectiveMeter.add
    for number in range(2 * ROUNDS + 2):
        on = number % 2 == 0
        CollectiveMeter.add = real if on else lambda *_: None  # type: ignore[method-assign]
        barrier(world_group())
        began_s = time.process_time()
        run.gradients(batch, ranks * ROWS * LENGTH)
        run.clip()
        run.step(1.0)
        found = meter.take_times()
        if number >= 2:
            times[on].append(time.process_time() - began_s)
            calls = max(calls, sum(one.calls for one in found))
    CollectiveMeter.add = real  # type: ignore[method-assign]
    one, tensor = CollectiveMeter(), torch.zeros(1)
    began_s = time.process_time()
    for _ in range(100_000):
        one.add("all_reduce", tensor, 2, time.perf_counter())
    return times[True], times[False], (time.process_time() - began_s) / 100_000, calls


def main() -> None:
    on, off, call_s, calls = run_ranks(_rank, 2, 2, timeout_s=600)[0]
    ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
    step_s = statistics.median(off)
    rows = [
        Row("one call of the meter", call_s * 1e6, "µs", "lower"),
        Row("collectives of a step", calls),
        Row("share of a step's processor time", 100 * calls * call_s / step_s, "%", "lower", must=1.0),
        Row(
            "steps with the meter over steps without", ratio, "×", "lower", note=f"middle of {len(on)} pairs"
        ),
    ]
    from rich.console import Console

    Console().print(report.table("timing of collectives, 2 ranks", rows))
    sys.exit(not all(row.ok for row in rows))


if __name__ == "__main__":
    main()
