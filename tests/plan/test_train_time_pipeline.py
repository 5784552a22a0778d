"""The pipeline's time: the makespan that the planner asks for against the full timeline."""

import random

import pytest

from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.costs import ChunkCost, Costs, Link
from cumulo.pipeline.simulate.timeline import simulate
from cumulo.plan.time.pipeline_bounds import bound_s, played_s

SCHEDULES = [
    ("gpipe", 4, 1),
    ("1f1b", 6, 1),
    ("interleaved-1f1b", 4, 3),
    ("zb-h1", 4, 1),
    ("zb-v", 4, 2),
    ("dualpipe", 4, 2),
    ("dualpipe-v", 4, 2),
]


def uneven_costs(chunks: int, seed: int) -> tuple[ChunkCost, ...]:
    dice = random.Random(seed)
    cost = [ChunkCost(*(dice.uniform(0.5, 1.5) for _ in range(3))) for _ in range(chunks)]
    return tuple(cost)


@pytest.mark.parametrize(("name", "stages", "chunks_per_stage"), SCHEDULES)
@pytest.mark.parametrize("rounds", [2, 5])
def test_the_planners_makespan_is_the_timelines(
    name: str, stages: int, chunks_per_stage: int, rounds: int
) -> None:
    micro_batches = rounds * stages
    schedule = build(name, stages, micro_batches, chunks_per_stage)
    for seed in range(3):
        costs = uneven_costs(schedule.chunks, seed)
        link = Link(latency_s=0.03 * seed, bytes_per_s=100.0)
        expected = simulate(schedule, Costs(costs, link=link, message_bytes=10.0 * seed)).makespan_s
        found = played_s(name, stages, micro_batches, chunks_per_stage, costs, link.latency_s, 0.1 * seed)
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("name", "stages", "chunks_per_stage"), SCHEDULES)
def test_a_long_step_is_continued_from_a_full_pipeline(name: str, stages: int, chunks_per_stage: int) -> None:
    micro_batches = 14 * stages
    schedule = build(name, stages, micro_batches, chunks_per_stage)
    middle, end = ChunkCost(1.0, 1.1, 0.9), ChunkCost(1.4, 1.5, 1.2)
    model = (*(middle for _ in range(schedule.chunks - 1)), end)
    for costs, tolerance in ((model, 1e-9), (uneven_costs(schedule.chunks, 7), 0.01)):
        expected = simulate(schedule, Costs(costs, link=Link(0.01, 100.0), message_bytes=2.0)).makespan_s
        found = played_s(name, stages, micro_batches, chunks_per_stage, costs, 0.01, 0.02)
        assert found == pytest.approx(expected, rel=tolerance)


def test_micro_batches_that_the_stages_do_not_divide_are_played_alike() -> None:
    for name, chunks_per_stage in (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1)):
        schedule = build(name, 4, 26, chunks_per_stage)
        costs = uneven_costs(schedule.chunks, 5)
        expected = simulate(schedule, Costs(costs)).makespan_s
        assert played_s(name, 4, 26, chunks_per_stage, costs, 0.0, 0.0) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("name", "stages", "chunks_per_stage"), SCHEDULES)
def test_no_schedule_is_faster_than_its_bound(name: str, stages: int, chunks_per_stage: int) -> None:
    micro_batches = 3 * stages
    for seed in range(5):
        costs = uneven_costs(build(name, stages, micro_batches, chunks_per_stage).chunks, seed)
        bound = bound_s(name, stages, micro_batches, chunks_per_stage, costs)
        assert bound <= played_s(name, stages, micro_batches, chunks_per_stage, costs, 0.0, 0.0) * (1 + 1e-12)


@pytest.mark.parametrize(("name", "chunks_per_stage"), [("1f1b", 1), ("interleaved-1f1b", 4)])
def test_the_bound_is_exact_for_even_stages_without_communication(name: str, chunks_per_stage: int) -> None:
    costs = (ChunkCost(1.0, 1.0, 1.0),) * (8 * chunks_per_stage)
    bound = bound_s(name, 8, 32, chunks_per_stage, costs)
    # Narayanan et al. 2021: the step is m·v·(f+b) and a bubble of (p−1)(f+b).
    assert bound == pytest.approx(32 * chunks_per_stage * 3 + 7 * 3)
    assert played_s(name, 8, 32, chunks_per_stage, costs, 0.0, 0.0) == pytest.approx(bound)
