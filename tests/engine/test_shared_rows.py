"""Which sequences draw a token in a step that tenants share: the split itself, and what many answers of one tenant
do to another's first token, in virtual time."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.core.step_cost import StepCost, StepMix
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.sharing.step_shares import even_quotas
from cumulo.engine.decide.sharing.tenants import Tenant
from cumulo.engine.simulate.engine import simulate
from cumulo.engine.simulate.run import Arrival, Run, StepTime
from tests import thorough
from tests.engine.invariants import problems


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 60))
@settings(max_examples=thorough.examples(200), deadline=None)
def test_rows_are_split_evenly_and_nobody_gets_none(counts: list[int], bound: int) -> None:
    wanted = {Tenant(str(number)): count for number, count in enumerate(counts)}
    quotas = even_quotas(wanted, bound)
    assert all(1 <= quotas[tenant] <= wanted[tenant] for tenant in wanted)
    assert sum(quotas.values()) <= max(bound, len(counts))
    assert sum(quotas.values()) >= min(bound, sum(counts))
    for one in wanted:  # who gets less than another wanted no more, or they differ by rounding
        assert all(quotas[one] >= quotas[other] - 1 or quotas[one] == wanted[one] for other in wanted)


def test_steps_that_are_short_allow_more_rows_at_once_and_long_ones_fewer_by_and_by() -> None:
    cost = StepCost(shared_step_s=0.04)
    for _ in range(50):
        cost.observe(StepMix(8), 0.058)
    assert cost.rows_in(0.04) == 5
    cost.observe(StepMix(1), 0.012)  # one row says nothing about five
    assert cost.rows_in(0.04) == 5
    for _ in range(5):
        cost.observe(
            StepMix(cost.rows_in(0.04)), 0.005
        )  # a faster device: its steps hardly depend on their rows
    assert cost.rows_in(0.04) > 100


def test_what_a_prompt_token_takes_is_learnt_from_steps_of_any_mix() -> None:
    """6 ms for a step, 6 for a row, 5 for a token of a prompt: neither part is taken for the other for long."""
    chance, cost = random.Random(0), StepCost(shared_step_s=0.04)
    for _ in range(300):
        rows, tokens = chance.randrange(1, 6), chance.randrange(4, 30)
        cost.observe(StepMix(rows, 0, tokens), 6e-3 + 6e-3 * rows + 5e-3 * tokens)
        cost.observe(StepMix(rows), 6e-3 + 6e-3 * rows)
    assert 4e-3 < cost.prompt_s_per_token < 6e-3
    assert 6e-3 < cost.s_per_row < 9e-3


# -- the scheduler ------------------------------------------------------------------------------------------
def make(**chosen: Any) -> Scheduler:
    usual: dict[str, Any] = dict(blocks=2000, max_context=4096, max_running=32, prefix_cache=False)
    scheduler = Scheduler(SchedulerConfig(**(usual | chosen)))
    scheduler.costs.s_per_row = 7e-3  # 5 rows in a shared step
    scheduler.costs.prompt_s_per_token = 5e-3
    return scheduler


def ask(scheduler: Scheduler, name: str, tenant: str, prompt: int, now_s: float, samples: int = 1) -> Request:
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=samples)
    made = Request(name, [1] * prompt, params, seed=0, tenant=tenant, arrived_s=now_s)
    scheduler.add(made)
    return made


def step(scheduler: Scheduler, now_s: float) -> StepPlan:
    plan = scheduler.plan(now_s)
    assert plan is not None
    scheduler.apply(plan, StepResult(tokens=[7] * len(plan.draw_rows)), now_s)
    assert problems(scheduler) == []
    return plan


def test_without_keys_all_sequences_draw_in_every_step() -> None:
    scheduler = make()
    ask(scheduler, "many", "", 8, 0.0, samples=8)
    step(scheduler, 0.0)
    assert [step(scheduler, 0.0).tokens for _ in range(3)] == [8, 8, 8]


def test_the_sequences_of_a_tenant_with_many_take_turns_while_others_are_about() -> None:
    scheduler = make()
    many = ask(scheduler, "many", "heavy", 8, 0.0, samples=8)
    step(scheduler, 0.0)
    light = ask(scheduler, "one", "light", 20, 0.0)
    first = step(scheduler, 0.0)
    # A first token of one who was served less: the other draws one token, and the step is as short as it can be.
    assert sorted(first.counts) == [1, 20] and light.story.first_token_s == 0.0
    drawn = [s.output_length for s in many.sequences]
    for _ in range(8):
        assert step(scheduler, 0.0).tokens == 5
    gained = [s.output_length - before for s, before in zip(many.sequences, drawn, strict=True)]
    assert sum(gained) == 32 and max(gained) - min(gained) <= 1
    assert light.sequences[0].output_length == 9  # in every step
    told = [event.describe() for event in many.story.events if event.kind == "turns"]
    assert told == ["from step 1 on its samples take turns: steps are kept short for other keys"]


def test_a_newcomer_that_cannot_be_admitted_slows_nobody_down() -> None:
    scheduler = make(max_running=8)
    ask(scheduler, "many", "heavy", 8, 0.0, samples=8)
    step(scheduler, 0.0)
    ask(scheduler, "more than its share", "light", 20, 0.0, samples=8)
    assert [step(scheduler, 0.0).tokens for _ in range(3)] == [5, 5, 5]


def test_long_steps_are_not_planned_ahead_where_others_may_come() -> None:
    nobody = make()
    ask(nobody, "many", "", 8, 0.0, samples=32)
    step(nobody, 0.0)
    assert nobody.plans_ahead(step(nobody, 0.0), 0.0)  # no keys
    scheduler = make()
    ask(scheduler, "many", "heavy", 8, 0.0, samples=5)
    step(scheduler, 0.0)
    plan = step(scheduler, 0.0)
    assert plan.tokens == 5 and scheduler.plans_ahead(plan, 0.0)  # alone: 35 ms twice
    ask(scheduler, "one", "light", 20, 0.0)
    assert not scheduler.plans_ahead(plan, 0.0)
    scheduler.costs.s_per_row = 1e-3
    assert scheduler.plans_ahead(plan, 0.0)  # a fast device: 5 ms twice


# -- in virtual time ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SlowCost:
    """Two ARM cores with the built-in model: 5 ms for a prompt's token, 7 ms for a row that draws one."""

    def time_of(self, plan: StepPlan, shared: Any) -> StepTime:
        decodes = sum(count == 1 for count in plan.counts)
        return StepTime(2e-4, 5e-3 + 7e-3 * decodes + 5e-3 * (plan.tokens - decodes), 5e-4)

    def decode(self, rows: int) -> None:
        return None

    def arrival_s(self, prompt_tokens: int) -> float:
        return 1e-4


def honest(count: int) -> list[Arrival]:
    return [Arrival(0.1 + number * 0.387, 23, 2, tenant="honest") for number in range(count)]


def attack(samples: int, output: int, every_s: float, until_s: float) -> list[Arrival]:
    """Many answers to one prompt at a time, again and again."""
    return [
        Arrival(1.0 + number * every_s, 33, output, ((1, 32),), tenant="attacker")
        for number in range(int(until_s / every_s) + 1)
        for _ in range(samples)
    ]


def run_of(arrivals: list[Arrival]) -> Run:
    in_order = sorted(arrivals, key=lambda one: one.arrived_s)
    run = simulate(in_order, Scheduler(SchedulerConfig(blocks=4000, max_context=4096)), SlowCost())
    assert run.all_finished
    return run


def slowest_ttft_s(arrivals: list[Arrival]) -> float:
    """The 99th percentile of the honest tenant's."""
    run = run_of(arrivals)
    times = []
    for served in run.served:
        if served.arrival.tenant == "honest":
            assert served.first_token_s is not None
            times.append(served.first_token_s - served.arrival.arrived_s)
    return sorted(times)[int(len(times) * 0.99)]


@pytest.mark.long
@pytest.mark.parametrize(("samples", "output", "every_s"), [(8, 32, 2.5), (64, 32, 20.0), (128, 16, 20.0)])
def test_many_answers_of_one_tenant_at_most_double_anothers_first_token(
    samples: int, output: int, every_s: float
) -> None:
    asked = honest(60)
    undisturbed = slowest_ttft_s(asked)
    during = slowest_ttft_s(asked + attack(samples, output, every_s, asked[-1].arrived_s))
    assert during <= 2 * undisturbed


def test_taking_turns_costs_the_tenant_with_many_sequences_little() -> None:
    def many(tenant: str) -> list[Arrival]:
        return [Arrival(0.0, 33, 40, ((1, 32),), tenant=tenant) for _ in range(32)]

    alone = run_of(many(""))
    other = [Arrival(0.1, 1, 1, tenant="light")]  # about, and asks for nothing more
    shared = run_of(many("heavy") + other)
    assert shared.steps > 3 * alone.steps
    assert shared.ended_s <= 1.15 * alone.ended_s
