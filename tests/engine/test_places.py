"""Slots and KV blocks between tenants: nobody keeps the others out."""

from typing import Any

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request, State
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from tests.engine.invariants import problems


def make(**chosen: Any) -> Scheduler:
    usual: dict[str, Any] = dict(blocks=400, max_context=2048, max_running=16, prefix_cache=False)
    scheduler = Scheduler(SchedulerConfig(**(usual | chosen)))
    scheduler.costs.prompt_s_per_token = scheduler.costs.s_per_row = 1e-6
    return scheduler


def ask(
    scheduler: Scheduler, name: str, tenant: str, prompt: int = 8, samples: int = 1, priority: int = 0
) -> Request:
    params = SamplingParams(max_tokens=400, ignore_eos=True, n=samples)
    made = Request(name, [1] * prompt, params, seed=0, tenant=tenant, arrived_s=0.0, priority=priority)
    scheduler.add(made)
    return made


def step(scheduler: Scheduler, now_s: float = 0.0) -> StepPlan:
    plan = scheduler.plan(now_s)
    assert plan is not None
    scheduler.apply(plan, StepResult(tokens=[7] * len(plan.draw_rows)), now_s)
    assert problems(scheduler) == []
    return plan


def running(request: Request) -> int:
    return sum(sequence.state == State.RUNNING for sequence in request.sequences)


def test_a_tenant_that_holds_all_places_gives_one_up_for_another() -> None:
    scheduler = make()
    many = ask(scheduler, "many", "heavy", samples=16)
    step(scheduler)
    assert running(many) == 16
    one = ask(scheduler, "one", "light")
    step(scheduler)
    assert running(many) == 15
    step(scheduler)
    assert running(one) == 1 and one.story.first_token_s == 0.0
    (told,) = [event.describe() for event in many.story.events if event.kind == "preempted"]
    assert told.startswith("preempted in step 1 by one, whose key holds less than its share")
    scheduler.abort("one", 0.0)
    step(scheduler)
    assert running(many) == 16  # the place is its own again


def test_a_tenant_within_its_share_gives_up_nothing() -> None:
    scheduler = make()
    half = ask(scheduler, "half", "heavy", samples=8)
    step(scheduler)
    others = [ask(scheduler, f"other-{number}", "light") for number in range(9)]
    for _ in range(4):
        step(scheduler)
    assert running(half) == 8 and half.story.preemptions == 0
    assert sum(running(one) for one in others) == 8


def test_while_others_are_about_an_eighth_of_the_places_is_left_to_them() -> None:
    scheduler = make()
    ask(scheduler, "here", "light")
    for number in range(20):
        ask(scheduler, f"one-{number}", "heavy")
    for _ in range(4):
        step(scheduler)
    assert len(scheduler.kv.free_slots) == 2
    waiting = next(one for one in scheduler.requests.values() if one.story.admitted_s is None)
    assert "waits for places and KV blocks that are left to other keys" in waiting.story.describe()


def test_a_request_that_does_not_fit_keeps_no_one_waiting_who_stays_within_a_share() -> None:
    scheduler = make()
    ask(scheduler, "many", "heavy", samples=8)
    step(scheduler)
    large = ask(scheduler, "large", "heavy", samples=12)
    small = ask(scheduler, "small", "light")
    step(scheduler)
    assert running(small) == 1 and large.story.admitted_s is None


def test_long_contexts_of_one_tenant_give_way_to_a_request_of_another() -> None:
    scheduler = make(blocks=64)
    for number in range(2):
        ask(scheduler, f"long-{number}", "heavy", prompt=480)
    step(scheduler)
    assert scheduler.pool.free_count == 4
    one = ask(scheduler, "one", "light", prompt=100)
    for _ in range(2):
        step(scheduler)
    assert running(one) == 1


def test_a_more_important_request_gives_up_nothing_for_a_share() -> None:
    scheduler = make()
    urgent = ask(scheduler, "urgent", "heavy", samples=16, priority=-1)
    step(scheduler)
    ask(scheduler, "one", "light")
    step(scheduler)
    assert running(urgent) == 16
