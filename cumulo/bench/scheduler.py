"""What planning costs: `cumulo bench scheduler` drives the real scheduler with a runner that takes no time.

Times are CPU seconds of the planning thread, so that other programs on the machine do not count.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable

from cumulo.base.report import Row
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler

BLOCK_SIZE = 16
STEPS = 200
QUEUED = 100_000
QUEUED_PROMPT_TOKENS = 128
BYTES_PER_TOKEN = 4  # array("i")


def measure(repeats: int = 5, tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    """All rows; `tell` hears what is being measured."""
    costs_s: dict[int, list[float]] = {256: [], 512: [], 1024: []}
    queued_s: list[float] = []
    for repeat in range(repeats):
        for count, samples in costs_s.items():
            tell(f"{count:,} decoding requests, {repeat + 1} of {repeats}")
            samples.append(_step_cost_s(_decoding(count)))
        tell(f"256 decoding with {QUEUED:,} queued, {repeat + 1} of {repeats}")
        scheduler = _decoding(256)
        _queue(scheduler, QUEUED)
        queued_s.append(_step_cost_s(scheduler))
    cost_s = {count: statistics.median(samples) for count, samples in costs_s.items()}
    # Ratios within a repeat: whatever slowed the machine then slowed both sides.
    bend = statistics.median(
        most / 4 / least for least, most in zip(costs_s[256], costs_s[1024], strict=True)
    )
    slowdown = statistics.median(
        with_queue / alone for with_queue, alone in zip(queued_s, costs_s[256], strict=True)
    )
    tell("memory of a queue")
    per_request_bytes, growth_bytes = _queue_memory()
    return [
        Row("plan + apply, 256 decoding", cost_s[256] * 1e3, "ms", "lower", must=1.0),
        Row("plan + apply, 512 decoding", cost_s[512] * 1e3, "ms", "lower", must=2.0),
        Row("plan + apply, 1,024 decoding", cost_s[1024] * 1e3, "ms", "lower", must=4.0),
        Row("1,024 against 4 × 256", bend, "×", "lower", must=1.25, note="1 is linear"),
        Row(f"256 decoding, {QUEUED:,} queued against none", slowdown, "×", "lower", must=1.25),
        Row(
            "memory per queued request", per_request_bytes, "bytes", "lower",
            note=f"{QUEUED_PROMPT_TOKENS * BYTES_PER_TOKEN} of them its {QUEUED_PROMPT_TOKENS} tokens",
        ),
        Row(
            f"its growth in {STEPS} steps of others", growth_bytes, "bytes", "lower", must=1.0,
            note="beyond what the same steps take with an empty queue",
        ),
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


def _queue_memory() -> tuple[float, float]:
    """Bytes a queued request takes, and bytes by which each one grows while 256 others decode."""
    growth_alone, _ = _traced_growth(queued=0)
    growth, queue_bytes = _traced_growth(queued=QUEUED)
    return queue_bytes / QUEUED, max(0.0, growth - growth_alone) / QUEUED


def _traced_growth(queued: int) -> tuple[int, int]:
    """Bytes that STEPS steps of 256 decoding requests leave behind, and bytes of the queue beside them."""
    scheduler = _decoding(256)
    gc.collect()
    tracemalloc.start()
    try:
        _queue(scheduler, queued)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(STEPS):
            _step(scheduler)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, before
    finally:
        tracemalloc.stop()
