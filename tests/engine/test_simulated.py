"""The simulated player: the same scheduler, the same loop, in virtual time."""

import random
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from cumulo.engine import engine as engine_module
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import State
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.engine import Engine
from cumulo.engine.simulate.engine import simulate
from cumulo.engine.simulate.run import Arrival, DecodeTime, Run, StepTime
from cumulo.errors import InvalidRequest
from tests.engine.invariants import problems


@dataclass(frozen=True)
class LinearCost:
    """Seconds that depend on everything a cost model may look at."""

    fixed_s: float = 0.01
    token_s: float = 1e-4
    context_s: float = 1e-7
    submit_s: float = 0.0
    apply_s: float = 0.0

    def time_of(self, plan: StepPlan, shared: Any) -> StepTime:
        tokens = sum(plan.counts)
        return self.decode(tokens).time_with(
            sum(plan.starts) + tokens, sum(shared.get(slot, 0) for slot in plan.slots)
        )

    def decode(self, rows: int) -> DecodeTime:
        device_s = self.fixed_s + rows * self.token_s
        return DecodeTime(rows * self.submit_s, device_s, self.context_s, 0.5, rows * self.apply_s)

    def arrival_s(self, prompt_tokens: int) -> float:
        return 1e-5


def config(**chosen: Any) -> SchedulerConfig:
    usual = dict(blocks=512, block_size=16, max_context=1024, max_running=32, max_tokens_per_step=128)
    return SchedulerConfig(**(usual | chosen))


def traffic(seed: int, count: int = 60, rate: float = 20.0, longest: int = 200) -> list[Arrival]:
    rng, now_s, made = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate) if rng.random() < 0.8 else 0.0
        shared = ((rng.randrange(3), rng.randrange(1, 80)),) if rng.random() < 0.5 else ()
        made.append(Arrival(now_s, rng.randint(1, longest), rng.randint(1, 60), shared))
    return made


def seconds(
    acceptance: float | None, rows: int = 1, cost_s: tuple[float, float] = (0.01, 0.002), tokens: int = 200,
    speculate: str = "model",
) -> float:  # fmt: skip
    """Of so many answers at once; None: without drafts. `cost_s`: a step's fixed part, and of each token."""
    chosen = config(speculate="" if acceptance is None else speculate)
    arrivals = [Arrival(0.0, 64, tokens) for _ in range(rows)]
    cost = LinearCost(fixed_s=cost_s[0], token_s=cost_s[1])
    run = simulate(arrivals, Scheduler(chosen), cost, step_by_step=True, acceptance=acceptance or 0.0)
    assert run.all_finished and sum(run.itl_counts) == rows * (tokens - 1)
    return run.ended_s


def test_drafts_that_are_right_shorten_a_simulated_answer_and_useless_ones_hardly_lengthen_it() -> None:
    assert seconds(0.9) < 0.6 * seconds(None)
    assert seconds(0.0) < 1.05 * seconds(None)
    assert seconds(0.5, rows=24) < 1.03 * seconds(None, rows=24)
    assert seconds(0.9) == seconds(0.9)


@pytest.mark.parametrize("cost_s", [(0.0, 0.01), (0.0054, 0.0046), (0.01, 0.001), (0.004, 0.00002)])
def test_drafts_never_cost_a_batch_of_sixteen_more_than_three_percent(cost_s: tuple[float, float]) -> None:
    """From a step that is all computing, over the CPU engine's, to a GPU's that is all reading of weights."""
    without_s = seconds(None, 16, cost_s, tokens=120)
    for acceptance in (0.0, 0.25, 0.5, 0.75):
        assert without_s / seconds(acceptance, 16, cost_s, tokens=120) >= 0.97, acceptance


def test_rounds_of_a_device_shorten_a_simulated_answer_and_are_given_up_where_they_do_not_pay() -> None:
    gpu = (0.0005, 0.00002)
    without_s = seconds(None, cost_s=gpu)
    assert seconds(0.8, cost_s=gpu, speculate="rounds") < 0.6 * without_s
    assert seconds(0.0, cost_s=gpu, speculate="rounds", tokens=900) < 1.05 * seconds(
        None, cost_s=gpu, tokens=900
    )
    assert seconds(0.3, 16, (0.0, 0.01), speculate="rounds") < 1.03 * seconds(None, 16, (0.0, 0.01))


def test_of_the_tokens_of_rounds_only_drafts_count_as_accepted() -> None:
    cost = LinearCost(fixed_s=0.0005, token_s=0.00002)
    scheduler = Scheduler(config(speculate="rounds"))
    run = simulate([Arrival(0.0, 64, 200)], scheduler, cost, step_by_step=True, acceptance=1.0)
    assert (
        0.8 * run.drafted_tokens < run.accepted_tokens <= run.drafted_tokens
    )  # the answer ends within a round


def outcome(run: Run) -> tuple[Any, ...]:
    served = [
        (
            one.first_token_s,
            one.last_token_s,
            one.finished,
            one.cached_tokens,
            one.preemptions,
            one.recomputed_tokens,
        )
        for one in run.served
    ]
    gaps = sorted(gap for gap, count in zip(run.itl_s, run.itl_counts, strict=True) for _ in range(count))
    return served, gaps, run.steps, run.computed_tokens, run.ended_s, run.most_running, run.most_blocks


def state(scheduler: Scheduler) -> tuple[Any, ...]:
    """Everything later decisions depend on."""
    pool, kv = scheduler.pool, scheduler.kv
    running = [
        (one.slot, one.computed, one.pending, one.tokens, one.blocks, one.request.tag.last_token_s)
        for one in scheduler.running
        if one.state == State.RUNNING
    ]
    served = [(one.prompt_tokens, one.output_tokens) for one in scheduler.shares.tenants.values()]
    cached, free = pool.block_of, list(pool._free[0])  # the order says who is evicted next
    return (
        running,
        served,
        cached,
        free,
        kv.free_slots,
        scheduler.batch.next_plan.index,
        pool.evictions,
    )


# 52: a sequence ends in the very step in which the blocks run out. 224: it gives way while its last token is drawn.
@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(12), 52, 224])
def test_a_stretch_played_at_once_ends_as_if_the_scheduler_had_been_asked_at_every_step(seed: int) -> None:
    rng = random.Random(seed)
    settings = config(
        blocks=rng.choice((20, 40, 512)), block_size=rng.choice((4, 16)), max_running=rng.choice((4, 32)),
        prefix_cache=rng.random() < 0.8,
    )  # fmt: skip
    cost = LinearCost(submit_s=rng.choice((0.0, 1e-4, 2e-3)), apply_s=rng.choice((0.0, 3e-4)))
    longest = min(200, settings.blocks * settings.block_size - 60)
    arrivals = traffic(seed, rate=rng.choice((1.0, 20.0, 200.0)), longest=max(2, longest))
    schedulers = [Scheduler(settings), Scheduler(settings)]
    slow = simulate(arrivals, schedulers[0], cost, step_by_step=True)
    fast = simulate(arrivals, schedulers[1], cost)
    assert outcome(fast) == outcome(slow)
    assert fast.device_busy_s == pytest.approx(slow.device_busy_s, rel=1e-12)
    assert all(one.finished for one in fast.served)
    assert problems(schedulers[1]) == []
    assert state(schedulers[0]) == state(schedulers[1])


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_is_stopped_in_a_stretch_leaves_the_scheduler_as_step_by_step_does(seed: int) -> None:
    settings, cost = config(blocks=(40, 512)[seed % 2]), LinearCost(submit_s=1e-4)
    schedulers = [Scheduler(settings), Scheduler(settings)]
    for scheduler, step_by_step in zip(schedulers, (True, False), strict=True):
        simulate(traffic(seed), scheduler, cost, stop_s=1.0 + seed / 3, step_by_step=step_by_step)
    assert schedulers[0].running and state(schedulers[0]) == state(schedulers[1])


def test_small_pools_preempt_in_the_simulation_too() -> None:
    run = simulate(traffic(3, longest=100), Scheduler(config(blocks=24)), LinearCost())
    assert sum(one.preemptions for one in run.served) > 0
    assert sum(one.recomputed_tokens for one in run.served) > 0
    assert all(one.finished for one in run.served)


@dataclass
class VirtualRunner:
    """A Runner that takes virtual time, and the clock that the engine looks at."""

    cost: LinearCost
    stages: int = 1
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.free_s = [0.0] * self.stages

    def perf_counter(self) -> float:
        return self.now_s

    def submit(self, plan: StepPlan) -> "VirtualStep":
        time = self.cost.time_of(plan, {})
        self.now_s += time.submit_s
        arrived_s = self.now_s
        for stage in range(self.stages):
            arrived_s = self.free_s[stage] = max(arrived_s, self.free_s[stage]) + time.device_s / self.stages
        return VirtualStep(self, arrived_s, len(plan.draw_rows))

    def close(self) -> None: ...


@dataclass
class VirtualStep:
    runner: VirtualRunner
    done_s: float
    draws: int

    def result(self) -> StepResult:
        self.runner.now_s = max(self.runner.now_s, self.done_s)
        return StepResult([0] * self.draws)


@pytest.mark.parametrize(("overlap", "stages"), [(True, 1), (False, 1), (True, 3)])
def test_its_times_are_those_of_the_engines_own_loop(
    overlap: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine itself, with a clock and a runner that take virtual time, is the oracle."""
    cost = LinearCost(submit_s=1e-3)
    runner = VirtualRunner(cost, stages)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=runner.perf_counter))
    scheduler = Scheduler(config(pp=stages))
    engine = Engine(scheduler, runner, None, vocab_size=1 << 20, overlap=overlap, depth=stages)
    arrivals = [Arrival(one.arrived_s, one.prompt_tokens, one.output_tokens) for one in traffic(5)]
    coming, names, seen = 0, {}, {index: [] for index in range(len(arrivals))}
    while coming < len(arrivals) or engine.has_work:
        while coming < len(arrivals) and arrivals[coming].arrived_s <= runner.now_s:
            one = arrivals[coming]
            params = SamplingParams(max_tokens=one.output_tokens, ignore_eos=True)
            names[engine.add([coming] * one.prompt_tokens, params, stream=True).id] = coming
            runner.now_s += cost.arrival_s(one.prompt_tokens)
            coming += 1
        if not engine.has_work:
            runner.now_s = arrivals[coming].arrived_s
            continue
        for delta in engine.step().deltas:
            seen[names[delta.request_id]] += [runner.now_s] * len(delta.token_ids)

    run = simulate(arrivals, Scheduler(config(pp=stages)), cost, overlap=overlap)
    for index, one in enumerate(run.served):
        assert len(seen[index]) == one.arrival.output_tokens
        assert one.first_token_s == pytest.approx(seen[index][0], rel=1e-12)
        assert one.last_token_s == pytest.approx(seen[index][-1], rel=1e-12)
    gaps = sorted(later - earlier for times in seen.values() for earlier, later in pairwise(times))
    assert outcome(run)[1] == pytest.approx(gaps, abs=1e-9)


def test_a_newcomer_waits_for_the_step_that_runs_and_the_one_behind_it() -> None:
    cost = LinearCost(fixed_s=1.0, token_s=0.0, context_s=0.0)
    # Step 0 runs to 1 s, and step 1 to 2 s was planned at once; who comes at 0.5 s is in step 2, which ends at 3 s.
    run = simulate([Arrival(0.0, 8, 9), Arrival(0.5, 8, 1)], Scheduler(config()), cost)
    assert run.served[1].first_token_s == pytest.approx(3.0, abs=1e-3)
    alone = simulate([Arrival(0.0, 8, 9), Arrival(0.5, 8, 1)], Scheduler(config()), cost, overlap=False)
    assert alone.served[1].first_token_s == pytest.approx(2.0, abs=1e-3)


def test_prompts_that_begin_alike_are_computed_once() -> None:
    arrivals = [Arrival(float(index), 100, 4, ((7, 96),)) for index in range(4)]
    run = simulate(arrivals, Scheduler(config()), LinearCost())
    assert [one.cached_tokens for one in run.served] == [0, 96, 96, 96]
    other = [Arrival(float(index), 100, 4, ((index, 96),)) for index in range(4)]
    assert sum(one.cached_tokens for one in simulate(other, Scheduler(config()), LinearCost()).served) == 0


def test_a_request_prefilled_elsewhere_computes_no_prompt() -> None:
    arrival = Arrival(1.0, 100, 10, first_token_s=0.5)
    run = simulate([arrival], Scheduler(config()), LinearCost(fixed_s=1.0))
    assert run.computed_tokens == 9  # the first token came with it, and the last drawn one is never computed
    assert run.served[0].first_token_s == 0.5 and run.served[0].finished
    assert max(run.itl_s) > 1.0  # from the first token, drawn elsewhere, to the second


def test_the_same_traffic_gives_the_same_times_to_the_last_bit() -> None:
    runs = [simulate(traffic(9), Scheduler(config()), LinearCost()) for _ in range(2)]
    assert outcome(runs[0]) == outcome(runs[1])


def test_a_request_that_can_never_run_is_refused_and_the_others_go_on() -> None:
    run = simulate([Arrival(0.0, 5000, 1), Arrival(0.0, 10, 2)], Scheduler(config()), LinearCost())
    assert run.served[0].refused is not None and "1024" in run.served[0].refused
    assert run.served[1].finished and run.all_finished


def test_a_run_can_be_stopped_before_all_is_answered() -> None:
    run = simulate([Arrival(0.0, 10, 50)], Scheduler(config()), LinearCost(fixed_s=1.0), stop_s=5.0)
    assert not run.all_finished and not run.served[0].finished and 5.0 <= run.ended_s < 7.0


@pytest.mark.parametrize(
    "fields", [(0.0, 0, 1), (0.0, 1, 0), (-1.0, 1, 1), (float("nan"), 1, 1), (0.0, 1, -3)]
)
def test_nonsense_is_no_arrival(fields: tuple[float, int, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"tokens? or more|0 s or later"):
        Arrival(*fields)
