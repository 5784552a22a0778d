"""The scheduler's contract, played on memory that notices every mistake (cell_runner)."""

import random
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request, State
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.errors import CumuloError, InvalidRequest
from tests import thorough
from tests.engine.cell_runner import CellRunner, next_token
from tests.engine.invariants import problems

VOCAB = 50
EOS = 3


def make(**options) -> tuple[Scheduler, CellRunner]:
    defaults = dict(blocks=64, block_size=4, max_context=200, max_running=8, max_tokens_per_step=16)
    config = SchedulerConfig(**{**defaults, **options})
    return Scheduler(config), CellRunner(config.blocks, config.block_size, config.tier_blocks, VOCAB)


def request(name: str, prompt: list[int], seed: int = 0, arrived_s: float = 0.0, **params) -> Request:
    priority = params.pop("priority", 0)
    salt, tenant = params.pop("cache_salt", ""), params.pop("tenant", "")
    return Request(
        name, prompt, SamplingParams(**params), seed=seed, eos_ids=(EOS,), priority=priority,
        cache_salt=salt, tenant=tenant, arrived_s=arrived_s,
    )  # fmt: skip


def expected_outputs(made: Request) -> list[list[int]]:
    """What the request's samples must be, from its definition alone."""
    outputs = []
    for sample in range(made.params.samples):
        context = made.prompt.tolist()
        while len(context) - len(made.prompt) < made.output_limit:
            context.append(next_token(context, made.seed, sample, VOCAB))
            if context[-1] in made.stop_ids:
                break
        outputs.append(context[len(made.prompt) :])
    return outputs


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """No shared or cached block is written; the budget holds; no slot has two rows."""
    assert plan.tokens <= scheduler.config.max_tokens_per_step
    assert len(set(plan.slots)) == len(plan.slots)
    by_slot = {s.slot: s for s in scheduler.running if s.state == State.RUNNING}
    size, pool = scheduler.pool.block_size, scheduler.pool
    for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
        assert count > 0
        sequence = by_slot[slot]
        for index in range(start // size, (start + count - 1) // size + 1):
            block = sequence.blocks[index]
            assert pool.hash_of[block] is None, "a cached block is written"
            # Samples that fork in this very step share the block; only their leader writes it.
            owners = {s.request.id for s in by_slot.values() if block in s.blocks}
            assert pool.references[block] == 1 or (
                owners == {sequence.request.id} and start < sequence.prompt_length
            )
    assert problems(scheduler) == []


def run(
    scheduler: Scheduler, runner: CellRunner, *, overlap: bool = False, between=None, limit: int = 20_000
) -> int:
    """Drive to the end; with overlap, step N+1 is planned before the result of N is applied."""
    now_s, steps, flight = 0.0, 0, None
    while scheduler.has_work or flight:
        now_s += 1.0
        steps += 1
        assert steps < limit, "the scheduler does not come to an end"
        plan = scheduler.plan(now_s)
        if plan is not None:
            check_plan(scheduler, plan)
        submitted = None if plan is None else (plan, runner.submit(plan))
        if overlap:
            ready, flight = flight, submitted
        else:
            ready = submitted
        assert plan is not None or ready is not None or not scheduler.has_work, (
            "work but nothing to do: deadlock"
        )
        if ready is not None:
            if scheduler.tiers is not None:
                scheduler.tiers.played(ready[0].index)
            scheduler.apply(ready[0], ready[1].result(), now_s)
            assert problems(scheduler) == []
        if between is not None:
            between(steps, now_s)
    assert scheduler.pool.used_count == 0
    return steps


def outputs_of(made: Request) -> list[list[int]]:
    return [s.output_tokens for s in sorted(made.sequences, key=lambda s: s.sample_index)]


workload = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "block_size": st.sampled_from([1, 2, 4, 7, 16]),
        "room": st.integers(0, 30),
        "max_running": st.integers(1, 6),
        "budget": st.integers(0, 20),
        "prefix_cache": st.booleans(),
        "overlap": st.booleans(),
        "tier_blocks": st.sampled_from([0, 3, 40]),
        "count": st.integers(1, 9),
        "dp": st.sampled_from([1, 1, 2, 3]),
        "stages": st.sampled_from([1, 1, 2, 4]),
    }
)


@settings(max_examples=thorough.examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=workload)
def test_tokens_do_not_depend_on_how_the_work_was_cut_shared_or_preempted(case):
    rng = random.Random(case["seed"])
    size = case["block_size"]
    prefix = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
    made = []
    for index in range(case["count"]):
        prompt = (prefix if rng.random() < 0.6 else []) + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(1, 15))
        ]
        made.append(
            request(
                f"r{index}", prompt, seed=rng.randrange(5), arrived_s=float(rng.randrange(3)),
                max_tokens=rng.randrange(1, 25), n=rng.choice([1, 1, 1, 2, 3]) if case["max_running"] >= 3 else 1,
                priority=rng.choice([0, 0, 1, 2]), ignore_eos=rng.random() < 0.5,
                prompt_logprobs=0 if rng.random() < 0.2 else None,
                cache_salt=rng.choice(["", "", "tenant"]),
                tenant=rng.choice(["ann", "ann", "bob", "cat"]),
            )
        )  # fmt: skip
    longest = max(len(r.prompt) + r.params.max_tokens for r in made)
    scheduler, runner = make(
        blocks=case["dp"] * (-(-longest // size) + case["room"]), block_size=size,
        max_running=case["max_running"], max_tokens_per_step=case["max_running"] + case["budget"],
        prefix_cache=case["prefix_cache"], priority_step_s=5.0,
        tier_blocks=case["tier_blocks"] if case["dp"] == 1 else 0, dp=case["dp"], pp=case["stages"],
    )  # fmt: skip
    late = made[len(made) // 2 :]
    aborted = {r.id for r in made if rng.random() < 0.15}
    for one in made[: len(made) // 2]:
        scheduler.add(one)

    def between(step: int, now_s: float) -> None:
        if late and rng.random() < 0.5:
            scheduler.add(late.pop(0))
        if rng.random() < 0.1 and aborted:
            scheduler.abort(rng.choice(sorted(aborted)), now_s)
            assert problems(scheduler) == []

    run(scheduler, runner, overlap=case["overlap"], between=between)
    while late:
        scheduler.add(late.pop(0))
        run(scheduler, runner, overlap=case["overlap"])
    for one in made:
        expected = expected_outputs(one)
        if one.id in aborted and any(s.finish_reason == "abort" for s in one.sequences):
            for got, want in zip(outputs_of(one), expected, strict=False):
                assert got == want[: len(got)]
            continue
        assert outputs_of(one) == expected
        assert one.story.finished_s is not None
        if one.prompt_logprobs is not None:
            assert [p.token for p in one.prompt_logprobs] == one.prompt.tolist()[1:]


def test_a_long_prompt_does_not_hold_up_those_who_are_being_answered():
    scheduler, runner = make(max_tokens_per_step=10, blocks=200)
    scheduler.add(request("short", [1, 2], max_tokens=40, ignore_eos=True))
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, runner.submit(plan).result(), 0.0)
    scheduler.add(request("long", list(range(45)), max_tokens=2))
    rows = []
    for step in range(6):
        plan = scheduler.plan(float(step))
        rows.append(list(zip(plan.slots, plan.counts, strict=True)))
        scheduler.apply(plan, runner.submit(plan).result(), float(step))
    assert all(any(count == 1 for _, count in step) for step in rows)
    assert [max(count for _, count in step) for step in rows[:5]] == [9, 9, 9, 9, 9]


def test_a_second_request_with_the_same_prompt_computes_only_what_is_not_cached():
    scheduler, runner = make(block_size=4)
    prompt = list(range(18))
    scheduler.add(request("first", prompt, max_tokens=3))
    run(scheduler, runner)
    before = runner.computed_tokens
    again = request("again", prompt, max_tokens=1)
    scheduler.add(again)
    run(scheduler, runner)
    assert again.story.cached_tokens == 16
    assert runner.computed_tokens - before == 2


def test_a_fully_cached_prompt_still_computes_its_last_token():
    scheduler, runner = make(block_size=4)
    for name in ("a", "b"):
        scheduler.add(request(name, list(range(16)), max_tokens=5))
        run(scheduler, runner)
    assert runner.computed_tokens < 2 * (16 + 4)


def test_another_tenants_salt_shares_nothing():
    scheduler, runner = make(block_size=4)
    scheduler.add(request("a", list(range(16)), max_tokens=1, cache_salt="alice"))
    run(scheduler, runner)
    other = request("b", list(range(16)), max_tokens=1, cache_salt="bob")
    scheduler.add(other)
    run(scheduler, runner)
    assert other.story.cached_tokens == 0


def test_the_cache_evicts_the_least_recently_used_prefix():
    scheduler, runner = make(blocks=8, block_size=4)
    first, second = list(range(12)), list(range(20, 32))
    for name, prompt in (("a", first), ("b", second), ("a2", first)):
        scheduler.add(request(name, prompt, max_tokens=1))
        run(scheduler, runner)
    scheduler.add(request("c", list(range(33, 49)), max_tokens=1))  # needs blocks: the second prefix must go
    run(scheduler, runner)
    keeps = request("a3", first, max_tokens=1)
    scheduler.add(keeps)
    run(scheduler, runner)
    assert keeps.story.cached_tokens == 8


def test_a_more_important_request_takes_the_place_of_a_less_important_one():
    scheduler, runner = make(blocks=6, block_size=4, max_running=2, priority_step_s=100.0)
    humble = request("humble", list(range(12)), max_tokens=10, priority=5, ignore_eos=True)
    scheduler.add(humble)
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, runner.submit(plan).result(), 0.0)
    urgent = request("urgent", list(range(30, 42)), max_tokens=2, priority=0, arrived_s=1.0, ignore_eos=True)
    scheduler.add(urgent)
    run(scheduler, runner)
    assert urgent.story.finished_s < humble.story.finished_s
    assert humble.story.preemptions == 1
    preempted = next(e for e in humble.story.events if e.kind == "preempted")
    assert preempted.detail["by"] == "urgent" and preempted.detail["cause"] == "priority"
    assert humble.story.waits_s["preempted"] > 0
    assert outputs_of(humble) == expected_outputs(humble)


def test_waiting_long_enough_beats_importance_so_nobody_starves():
    scheduler, runner = make(max_running=1, priority_step_s=10.0, max_tokens_per_step=4)
    humble = request("humble", [1, 2, 3], max_tokens=1, priority=1)
    scheduler.add(humble)
    served = []

    def endless_important_traffic(step: int, now_s: float) -> None:
        if step < 60:
            scheduler.add(request(f"vip{step}", [4, 5], max_tokens=1, priority=0, arrived_s=now_s))
        served.append(step)
        if humble.story.finished_s is not None and not hasattr(endless_important_traffic, "at"):
            endless_important_traffic.at = step

    scheduler.add(request("vip", [4, 5], max_tokens=1, priority=0))
    run(scheduler, runner, between=endless_important_traffic)
    assert endless_important_traffic.at < 40


def test_what_was_preempted_comes_back_from_host_memory_where_that_is_predicted_cheaper():
    for swap_s, few in ((1e-9, True), (10.0, False)):
        scheduler, runner = make(
            blocks=12, block_size=4, tier_blocks=30, max_running=4, max_tokens_per_step=64
        )
        scheduler.costs.swap_s_per_block = swap_s
        made = [request(f"r{i}", [i] * 8, seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
        for one in made:
            scheduler.add(one)
        run(scheduler, runner)
        preemptions = sum(r.story.preemptions for r in made)
        recomputed = sum(r.story.recomputed_tokens for r in made)
        assert preemptions > 0 and (recomputed < 4 * preemptions) == few  # what fills no block is in no cache
        assert [outputs_of(r) for r in made] == [expected_outputs(r) for r in made]


def test_a_request_that_could_never_run_is_refused_with_the_reason():
    scheduler, _ = make(blocks=4, block_size=4, max_context=100, max_running=2)
    with pytest.raises(InvalidRequest, match="KV cache holds 16"):
        scheduler.add(request("big", list(range(17)), max_tokens=1))
    with pytest.raises(InvalidRequest, match="the context holds 100"):
        scheduler.add(request("long", [1] * 100, max_tokens=1))
    with pytest.raises(InvalidRequest, match="only 2 sequences run"):
        scheduler.add(request("many", [1], n=3))
    scheduler.add(request("twice", [1]))
    with pytest.raises(InvalidRequest, match="already in use"):
        scheduler.add(request("twice", [1]))
    with pytest.raises(InvalidRequest, match="empty"):
        request("empty", [])
    with pytest.raises(CumuloError, match="max_tokens_per_step"):
        SchedulerConfig(blocks=4, max_context=10, max_running=8, max_tokens_per_step=4)


def test_an_answer_that_would_outgrow_the_context_ends_there_and_says_so():
    scheduler, runner = make(max_context=20)
    made = request("r", list(range(15)), max_tokens=50, ignore_eos=True)
    scheduler.add(made)
    run(scheduler, runner)
    assert len(outputs_of(made)[0]) == 5
    assert made.sequences[0].finish_reason == "length"
    assert "the context ends there" in made.story.describe()


@pytest.mark.long
def test_any_number_of_queued_requests_costs_a_step_nothing():
    """Counted in work, not time: a step looks at the head of the queue only."""
    queued = 100_000 if thorough.chosen else 10_000
    scheduler, runner = make(blocks=8, max_running=2, max_tokens_per_step=8)
    looked = 0
    original = scheduler.kv.blocks_wanted

    def counting(sequence):
        nonlocal looked
        looked += 1
        return original(sequence)

    scheduler.kv.blocks_wanted = counting
    for index in range(queued):
        scheduler.add(request(f"r{index}", [1, 2], max_tokens=8, ignore_eos=True))
    for step in range(8):
        plan = scheduler.plan(float(step))
        scheduler.apply(plan, runner.submit(plan).result(), float(step))
    assert looked < 100
    for index in range(queued):
        scheduler.abort(f"r{index}", 9.0)
    assert scheduler.plan(10.0) is None
    assert scheduler.pool.used_count == 0
    assert problems(scheduler) == []


def test_the_memory_of_a_queued_request_is_its_tokens_and_a_small_constant():
    import tracemalloc

    scheduler, _ = make(blocks=100_000, max_context=100_000)
    tracemalloc.start()
    try:
        for index in range(500):
            scheduler.add(request(f"r{index}", array("i", range(1_000)), max_tokens=8))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / 500 < 1_000 * 4 + 4_000
