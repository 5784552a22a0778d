"""The core of the scheduler without any extension: it admits, preempts and finishes by itself."""

import pytest

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.core.scheduler import CoreScheduler
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepResult
from tests.engine.invariants import problems


@pytest.mark.parametrize("blocks", [6, 12, 64])
def test_the_core_serves_everybody_without_extensions(blocks: int) -> None:
    """Few blocks, so that some are preempted; samples share blocks; a more important request comes later."""
    scheduler = CoreScheduler(
        SchedulerConfig(blocks=blocks, block_size=4, max_context=24, max_running=4, max_tokens_per_step=8)
    )
    made = [
        Request(
            f"r{number}",
            range(1, 4 + number % 5),
            SamplingParams(max_tokens=6 + number % 3, ignore_eos=True, n=1 + number % 2),
            seed=number,
            arrived_s=float(number),
            priority=-(number % 7 == 6),
        )
        for number in range(10)
    ]
    for request in made:
        scheduler.add(request)
    for now_s in range(10, 1000):
        if not scheduler.has_work:
            break
        plan = scheduler.plan(float(now_s))
        assert plan is not None
        scheduler.apply(plan, StepResult(tokens=[7] * len(plan.draw_rows)), float(now_s))
        assert problems(scheduler) == []
    assert not scheduler.has_work and scheduler.pool.used_count == 0
    for request in made:
        assert [s.output_length for s in request.sequences] == [request.output_limit] * request.params.n
        assert {s.finish_reason for s in request.sequences} == {"length"}
    if blocks == 6:
        assert sum(request.story.preemptions for request in made) > 0
