"""What planning costs: `cumulo bench scheduler` drives the real scheduler with a runner that takes no time.

Times are CPU seconds of the planning thread, so that other programs on the machine do not count.
"""

import gc
import statistics
import time
from collections.abc import Callable

from cumulo.base.report import Row
from cumulo.bench.turns import median_ratio
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler

BLOCK_SIZE = 16
STEPS = 200
QUEUED = 100_000
QUEUED_PROMPT_TOKENS = 128


def measure(repeats: int = 5, tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    """All rows; `tell` hears what is being measured."""
    alone = ((256, 0), (512, 0), (1024, 0))
    costs_s: dict[tuple[int, int], list[float]] = {case: [] for case in (*alone, (256, QUEUED))}
    for repeat in range(repeats):
        for (count, queued), samples in costs_s.items():
            tell(f"{count:,} decoding requests, {queued:,} queued, {repeat + 1} of {repeats}")
            scheduler = _decoding(count)
            _queue(scheduler, queued)
            samples.append(_step_cost_s(scheduler))
    # Ratios within a repeat: whatever slowed the machine then slowed both sides.
    slowdown = median_ratio(costs_s[256, QUEUED], costs_s[256, 0])
    bend = median_ratio(costs_s[1024, 0], costs_s[256, 0]) / 4
    return [
        *(
            Row(
                f"plan + apply, {case[0]:,} decoding", statistics.median(costs_s[case]) * 1e3, "ms", "lower",
                must=case[0] / 256,
            )
            for case in alone
        ),
        Row("1,024 against 4 × 256", bend, "×", "lower", must=1.25, note="1 is linear"),
        Row(f"256 decoding, {QUEUED:,} queued against none", slowdown, "×", "lower", must=1.25),
    ]  # fmt: skip


def _decoding(count: int) -> Scheduler:
    """A scheduler with `count` requests past their prompts, of staggered lengths as in real life."""
    tokens_each = 2 * BLOCK_SIZE + STEPS + 16
    scheduler = Scheduler(
        SchedulerConfig(
            blocks=(count + 1) * (tokens_each // BLOCK_SIZE + 2),
            block_size=BLOCK_SIZE,
            max_context=4096,
            max_running=count,
            max_tokens_per_step=2 * BLOCK_SIZE * count,  # all prompts in one step
        )
    )
    params = SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True)
    for number in range(count):
        # Different first tokens: no request finds another's prefix in the cache.
        prompt = [number, *range(1, BLOCK_SIZE + number % BLOCK_SIZE)]
        scheduler.add(Request(f"running-{number}", prompt, params, seed=number))
    while any(sequence.computed < sequence.prompt_length for sequence in scheduler.running) or (
        len(scheduler.running) < count
    ):
        _step(scheduler)
    return scheduler


def _queue(scheduler: Scheduler, count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    prompt = list(range(QUEUED_PROMPT_TOKENS))
    for number in range(count):
        scheduler.add(Request(f"queued-{number}", prompt, params, seed=number, arrived_s=1.0))


def _step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(2.0)
    assert plan is not None
    scheduler.apply(plan, StepResult(tokens=[7] * len(plan.draw_rows)), 2.0)
    return plan


def _step_cost_s(scheduler: Scheduler) -> float:
    """Mean CPU seconds of plan + apply, garbage collection included."""
    gc.collect()
    expected = len(scheduler.running)
    total_s = 0.0
    for _ in range(STEPS):
        began_s = time.thread_time()
        plan = scheduler.plan(2.0)
        planned_s = time.thread_time()
        assert plan is not None and len(plan.draw_rows) == expected
        result = StepResult(tokens=[7] * expected)  # the runner's work, not the scheduler's
        resumed_s = time.thread_time()
        scheduler.apply(plan, result, 2.0)
        total_s += (planned_s - began_s) + (time.thread_time() - resumed_s)
    return total_s / STEPS
