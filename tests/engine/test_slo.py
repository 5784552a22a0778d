"""Latency by promise: what is let in keeps its TTFT and ITL, and what cannot be kept is said at the door."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.extension import StepTiming
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.core.step_cost import StepCost, StepMix
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.slo import learning_prompts
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.run import Arrival, Run, Served, StepTime
from cumulo.errors import CumuloError, Overloaded
from cumulo.spec.slo import ITL_SHARE, Slo
from tests.engine.invariants import problems
from tests.engine.test_simulated import LinearCost

pytestmark = pytest.mark.long

SLO = Slo(0.6, 0.05)
COST = LinearCost(fixed_s=0.006, token_s=4e-5, context_s=1e-7)


def config(**chosen: Any) -> SchedulerConfig:
    usual = dict(
        blocks=8192, block_size=16, max_context=4096, max_running=128, max_tokens_per_step=4096,
        prefix_cache=False, slo=SLO,
    )  # fmt: skip
    return SchedulerConfig(**(usual | chosen))


def traffic(rate: float, count: int = 250, seed: int = 1) -> list[Arrival]:
    rng, now_s, made = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        made.append(Arrival(now_s, min(3000, int(rng.lognormvariate(6, 1)) + 1), rng.randint(2, 120)))
    return made


def play(settings: SchedulerConfig, arrivals: list[Arrival]) -> Run:
    engine = SimulatedEngine(Scheduler(settings), COST, step_by_step=True)
    engine.arrivals, engine.run.itl_bound_s = arrivals, SLO.itl_s
    engine.advance(float("inf"))
    assert problems(engine.scheduler) == []
    return engine.end()


def kept(run: Run) -> int:
    return sum(
        one.finished
        and (one.first_token_s or 0) - one.arrival.arrived_s <= (SLO.ttft_s or 0)
        and one.late_tokens <= (1 - ITL_SHARE) * one.tokens
        for one in run.served
    )


@pytest.mark.parametrize("rate", [10.0, 60.0])
def test_promises_are_kept_below_and_far_above_what_the_engine_can_take(rate: float) -> None:
    run = play(config(), traffic(rate))
    admitted = [one for one in run.served if one.refused is None]
    assert kept(run) >= 0.99 * len(admitted)
    if rate < 20:
        assert len(admitted) == len(run.served)
    else:
        fixed = [play(config(slo=None, max_tokens_per_step=tokens), traffic(rate)) for tokens in (256, 4096)]
        assert kept(run) >= 1.3 * max(map(kept, fixed))


def test_a_refusal_says_why_and_when_to_come_back() -> None:
    run = play(config(), traffic(80.0))
    refused = [one.refused for one in run.served if one.refused is not None]
    assert refused and "are promised" in refused[-1] and "try again in" in refused[-1]


def test_a_refusal_for_want_of_kv_blocks_says_how_many_are_wanted() -> None:
    scheduler = _taught()
    for number in range(40):
        _ask(scheduler, f"waits {number}", 3000, 100.0, slo=Slo(ttft_s=1500.0))
    with pytest.raises(
        Overloaded,
        match=r"and 25 min are promised: it and 43 that wait need 8272 KV blocks .* need 3 more, and 8192 of",
    ):
        for number in range(40, 60):
            _ask(scheduler, f"waits {number}", 3000, 100.0, slo=Slo(ttft_s=1500.0))


def test_with_late_queue_nobody_is_refused_and_more_are_in_time_than_without_promises() -> None:
    run = play(config(slo_late="queue"), traffic(60.0))
    assert all(one.finished for one in run.served)
    assert kept(run) >= 1.3 * kept(play(config(slo=None, max_tokens_per_step=256), traffic(60.0)))


def _taught() -> Scheduler:
    """A scheduler that knows its steps."""
    engine = SimulatedEngine(Scheduler(config()), COST, step_by_step=True)
    engine.arrivals = traffic(15.0, 40)
    engine.advance(float("inf"))
    return engine.scheduler


def _ask(scheduler: Scheduler, name: str, tokens: int, now_s: float, **more: Any) -> Request:
    params, tag = SamplingParams(max_tokens=8), Served(Arrival(now_s, tokens, 8))
    request = Request(name, [1] * tokens, params, seed=0, arrived_s=now_s, tag=tag, **more)
    scheduler.add(request)
    return request


@pytest.mark.parametrize("drafts", ["rounds", "model"])
def test_drafts_make_no_step_longer_than_the_itl_allows(drafts: str) -> None:
    """A step takes 6 ms: of four rounds in one step nobody would have a token in 10 ms."""
    slo = Slo(1.0, 0.010)
    engine = SimulatedEngine(
        Scheduler(config(slo=slo, speculate=drafts)), COST, step_by_step=True, acceptance=0.7
    )
    for tokens in learning_prompts(engine.scheduler.costs, slo, 4096):
        engine.arrivals.append(Arrival(engine.clock_s, tokens, 3))
        engine.advance(float("inf"))
    began, engine.run.itl_bound_s = len(engine.arrivals), slo.itl_s
    now_s = engine.clock_s
    engine.arrivals += [replace(one, arrived_s=now_s + one.arrived_s) for one in traffic(4.0, 60)]
    engine.advance(float("inf"))
    served = engine.end().served[began:]
    admitted = [one for one in served if one.refused is None]
    assert len(admitted) >= 0.95 * len(served) == 57
    assert sum(one.late_tokens > (1 - ITL_SHARE) * one.tokens for one in admitted) == 0
    assert any(one.tokens < one.arrival.output_tokens - 1 for one in admitted), "nothing was drafted"


def test_a_request_may_ask_for_more_time_or_less() -> None:
    scheduler = _taught()
    for number in range(3):
        _ask(scheduler, f"first {number}", 3000, 100.0)
    with pytest.raises(Overloaded):
        _ask(scheduler, "late", 3000, 100.0)
    patient = _ask(scheduler, "patient", 3000, 100.0, slo=Slo(ttft_s=5.0))
    assert patient.story.promise is not None and patient.story.promise.itl_s == SLO.itl_s
    with pytest.raises(Overloaded) as refusal:
        _ask(scheduler, "hasty", 3000, 100.0, slo=Slo(ttft_s=0.01))
    assert refusal.value.retry_after_s >= 1


def test_an_itl_that_no_step_can_keep_is_refused_and_keeps_nobody_else_out() -> None:
    scheduler = _taught()
    with pytest.raises(Overloaded, match=r"its next token would take 6\.\d+ ms .* its ITL is 1 µs"):
        _ask(scheduler, "greedy", 10, 100.0, slo=Slo(itl_s=1e-6))
    quick = _ask(scheduler, "quick", 10, 100.0, slo=Slo(itl_s=0.01))
    plan = scheduler.plan(100.0)
    assert plan is not None and quick.sequences[0].slot in plan.slots
    scheduler.observe(plan, StepTiming(0.01), 100.01)
    scheduler.apply(plan, StepResult([1]), 100.01)
    assert _ask(scheduler, "next", 300, 100.01).story.promise is not None


def test_a_tighter_deadline_overtakes_unless_that_breaks_a_promise() -> None:
    scheduler = _taught()
    for number in range(3):
        _ask(scheduler, f"first {number}", 3000, 100.0)
    quick = _ask(scheduler, "quick", 64, 100.0, slo=Slo(ttft_s=0.3))
    plan = scheduler.plan(100.0)
    assert plan is not None and quick.sequences[0].slot in plan.slots
    with pytest.raises(Overloaded, match=r"would miss its own TTFT|come first"):
        for number in range(20):
            _ask(scheduler, f"more {number}", 800, 100.0, slo=Slo(ttft_s=0.55))


def test_many_short_prompts_do_not_make_a_step_longer_than_the_itl_allows() -> None:
    scheduler = _taught()
    promises = scheduler.slo.promises
    assert promises is not None
    _ask(scheduler, "decodes", 12, 100.0)
    plan = scheduler.plan(100.0)
    assert plan is not None
    scheduler.observe(plan, StepTiming(0.01), 100.01)
    scheduler.apply(plan, StepResult([1]), 100.01)
    for number in range(120):
        _ask(scheduler, f"short {number}", 12, 100.01)
    assert scheduler.plan(100.01) is not None
    assert 0.5 * SLO.itl_s < promises.in_flight_s(100.01) <= promises.step_s + 1e-6


def test_who_is_promised_nothing_comes_after_those_who_are() -> None:
    scheduler = _taught()
    batch = _ask(scheduler, "batch", 3000, 100.0, priority=1)
    person = _ask(scheduler, "person", 3000, 100.0)
    assert batch.story.promise is None and person.story.promise is not None
    plan = scheduler.plan(100.0)
    assert plan is not None
    assert person.sequences[0].computed > 0 and batch.sequences[0].computed == 0


def test_a_less_important_request_is_promised_what_it_asks_for_and_no_more() -> None:
    batch = _ask(_taught(), "batch", 300, 100.0, priority=1, slo=Slo(ttft_s=9.0))
    assert batch.story.promise is not None
    assert (batch.story.promise.ttft_s, batch.story.promise.itl_s) == (9.0, None)


def test_a_key_that_had_most_of_the_time_leaves_room_to_others() -> None:
    scheduler = _taught()
    admitted = 0
    for number in range(30):
        try:
            _ask(scheduler, f"noisy {number}", 500, 100.0, tenant="noisy")
            admitted += 1
        except Overloaded:
            break
    alone = admitted
    scheduler = _taught()
    scheduler.shares.tenant("noisy").computed_tokens += 100_000
    scheduler.shares.came(scheduler.shares.tenant("quiet"), 100.0)
    with pytest.raises(Overloaded):
        for number in range(alone):
            _ask(scheduler, f"noisy {number}", 500, 100.0, tenant="noisy")
    _ask(scheduler, "quiet", 500, 100.0, tenant="quiet")


def test_stories_say_what_was_promised_and_what_became_of_it() -> None:
    scheduler = _taught()
    request = _ask(scheduler, "told", 100, 100.0)
    now_s = 100.0
    while scheduler.requests:
        plan = scheduler.plan(now_s)
        assert plan is not None
        now_s += 0.02 if request.sequences[0].output_length < 4 else 0.2
        scheduler.observe(plan, StepTiming(0.02), now_s)
        scheduler.apply(plan, StepResult([1] * len(plan.draw_rows)), now_s)
    words = request.story.describe()
    assert "is promised TTFT 600 ms and ITL 50 ms" in words
    assert "came later than the promised ITL" in words


class RooflineCost(LinearCost):
    """A step reads the weights or computes, whichever takes longer: short prompts cost nothing."""

    def time_of(self, plan: StepPlan, shared: Mapping[int, int]) -> StepTime:
        return StepTime(0.0, max(self.fixed_s, self.token_s * plan.tokens), 0.0)


def test_the_first_long_prompts_keep_their_promises_where_short_ones_cost_nothing() -> None:
    engine = SimulatedEngine(
        Scheduler(config(max_context=16384)), RooflineCost(0.006, 2e-5), step_by_step=True
    )
    learnt = []
    for tokens in learning_prompts(engine.scheduler.costs, SLO, 16384):
        learnt.append(tokens)
        engine.arrivals.append(Arrival(engine.clock_s, tokens, 3))
        engine.advance(float("inf"))
    assert learnt == [16, 64, 128, 256, 1024, 4096]  # half of the context, and half of the TTFT, at most
    engine.run = Run(itl_bound_s=SLO.itl_s)
    begun_s = engine.clock_s
    engine.arrivals += [Arrival(begun_s + number / 20, 3000, 20) for number in range(10)]
    engine.advance(float("inf"))
    admitted = [one for one in engine.end().served if one.refused is None]
    assert len(admitted) >= 5 and kept(engine.run) == len(admitted)


def test_a_slow_engine_learns_from_short_prompts_only() -> None:
    cost = StepCost()
    for tokens in (16, 32, 64, 64, 64, 64, 64, 64):
        cost.observe(StepMix(0, 0, tokens, tokens**2 // 2), 0.01 + 0.003 * tokens, 0.05)
    assert list(learning_prompts(cost, SLO, 8192)) == [16, 64, 128, 256]


def test_an_slo_of_another_type_is_refused_with_an_example() -> None:
    with pytest.raises(CumuloError, match=r"such as Slo\(ttft_s=0.5, itl_s=0.04\); got 'ttft=1s'"):
        EngineConfig(slo="ttft=1s")  # type: ignore[arg-type]
    with pytest.raises(CumuloError, match="remove tpot and e2e"):
        EngineConfig(slo=Slo(e2e_s=3.0))


def test_without_an_slo_nothing_is_promised_and_nothing_is_learnt() -> None:
    scheduler = Scheduler(replace(config(), slo=None))
    request = Request("a", [1] * 10, SamplingParams(max_tokens=2), seed=0)
    scheduler.add(request)
    assert scheduler.slo.promises is None and request.story.promise is None


@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.floats(0, 1e-3)] * 4), st.integers(0, 2**32))
def test_the_step_model_finds_the_costs_that_made_the_steps(costs: tuple[float, ...], seed: int) -> None:
    rng, model = random.Random(seed), StepCost()
    per_row, per_context, per_token, per_pair = costs

    def seconds(mix: StepMix) -> float:
        return (
            1e-3
            + per_row * mix.rows
            + per_context / 1e3 * mix.context
            + per_token * mix.prompt_tokens
            + per_pair / 1e4 * mix.pairs
        )

    def draw() -> StepMix:
        rows, tokens = rng.randint(0, 64), rng.randint(0, 512)
        return StepMix(rows, rows * rng.randint(1, 2000), tokens, tokens * rng.randint(1, 1000))

    for _ in range(300):
        mix = draw()
        model.observe(mix, seconds(mix), 1.0)
    for _ in range(20):
        mix = draw()
        assert model.seconds(mix) == pytest.approx(seconds(mix), rel=0.02)


@settings(max_examples=50)
@given(st.floats(1e-6, 1e-3), st.floats(0, 1e-8), st.integers(0, 10_000), st.floats(1e-4, 1.0))
def test_tokens_within_is_what_fits(per_token: float, per_pair: float, start: int, budget_s: float) -> None:
    model = StepCost()
    model.weights[3], model.weights[4] = per_token * 512, per_pair * 512 * 2048
    tokens = model.tokens_within(budget_s, start)
    assert model.prompt_s(start, tokens) <= budget_s * 1.0001
    assert model.prompt_s(start, tokens + 2) >= budget_s * 0.9999
