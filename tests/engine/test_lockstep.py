"""Lockstep: how often a plan repeats, held against the scheduler asked at every step."""

import random

import pytest

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.simulate.lockstep import Lockstep


def decoding(seed: int, count: int = 6, **params: object) -> tuple[Scheduler, StepPlan]:
    """A scheduler whose requests all decode, with one step in flight."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        blocks=128, block_size=8, max_context=256, max_running=8, max_tokens_per_step=512
    )
    scheduler = Scheduler(config)
    for number in range(count):
        chosen = SamplingParams(max_tokens=rng.randint(3, 60), **({"ignore_eos": True} | params))
        prompt = [number] * rng.randint(1, 30)
        scheduler.add(Request(str(number), prompt, chosen, seed=0, eos_ids=(99,)))
    before = scheduler.plan(0.0)
    assert before is not None
    plan = scheduler.plan(0.0)
    scheduler.apply(before, StepResult([0] * len(before.draw_rows)), 0.0)
    assert plan is not None
    return scheduler, plan


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_repeats_as_often_as_the_scheduler_makes_it_again(seed: int) -> None:
    lockstep = Lockstep(decoding(seed)[0].batch)
    assert lockstep.join({})
    repeat = lockstep.plan()
    assert repeat is not None
    scheduler, in_flight = decoding(seed)
    made = []
    for _ in range(repeat.steps + 1):
        plan = scheduler.plan(0.0)
        scheduler.apply(in_flight, StepResult([0] * len(in_flight.draw_rows)), 0.0)
        if plan is None:
            break
        made.append(plan)
        in_flight = plan
    first, *again = made[: repeat.steps]
    assert (first.index, len(first.slots)) == (repeat.first_index, repeat.rows)
    assert sum(first.starts) + repeat.rows == repeat.context_tokens
    assert first.extend == lockstep.batch.next_plan.extend
    for number, plan in enumerate(again, start=1):
        assert plan.slots == first.slots and not (plan.extend or plan.begin)
        assert plan.starts == [start + number for start in first.starts]
    if len(made) > repeat.steps:  # then something changed: a block was filled, or somebody ended
        following = made[repeat.steps]
        filled = any(start % 8 == 0 for start in following.starts)
        assert filled or following.slots != first.slots


def test_who_may_be_ended_by_a_token_is_in_no_lockstep() -> None:
    assert not Lockstep(decoding(0, ignore_eos=False)[0].batch).join({})
    assert not Lockstep(decoding(0, stop_token_ids=(5,))[0].batch).join({})


def test_a_plan_that_needs_more_blocks_than_are_free_is_left_to_the_scheduler() -> None:
    scheduler, _ = decoding(1)
    lockstep = Lockstep(scheduler.batch)
    assert lockstep.join({})
    scheduler.pool.allocate_many(scheduler.pool.free_count)
    while (repeat := lockstep.plan()) is not None:
        lockstep.advance(repeat.steps)
        lockstep.apply(repeat.first_index + repeat.steps - 2, 0.0)
    position = lockstep.batch.next_plan.index
    assert any((position - offset) % 8 == 0 for offset in lockstep._offsets)
