"""torch.distributed.pipelining as oracle: the same schedules in the same order, and its checks accept ours."""

from itertools import pairwise
from typing import Any

import pytest

from cumulo.pipeline.decide.actions import Action, PipelineSchedule
from cumulo.pipeline.decide.catalog import build


def torch_schedules() -> Any:
    """Imported when it is wanted: that takes a second."""
    return pytest.importorskip("torch.distributed.pipelining", reason="this torch has none").schedules


Step = tuple[str, int, int]  # (kind, micro-batch, chunk)
SIZES = [(2, 4), (3, 9), (4, 8), (4, 10), (5, 20), (8, 16), (8, 20), (16, 32)]


def ours(order: tuple[Action, ...]) -> list[Step]:
    return [(action.kind.value, action.micro_batch, action.chunk) for action in order]


def theirs(actions: list[Any]) -> list[Step]:
    steps = []
    for action in actions:
        for part in () if action is None else (action.sub_actions or (action,)):
            if part.computation_type.value in ("F", "I", "W", "B"):
                steps.append((part.computation_type.value, part.microbatch_index, part.stage_index))
    return steps


def torch_orders(kind: type, stages: int, micro_batches: int, chunks: int) -> list[list[Any]]:
    """Their order of every rank, from the functions that only compute it: no process group is needed."""
    schedule = object.__new__(kind)
    schedule._n_microbatches = micro_batches
    if chunks == 1 and hasattr(schedule, "_get_pipeline_order"):
        schedule._num_stages = stages
        orders = schedule._get_pipeline_order()
        return [orders[rank] for rank in range(stages)]
    schedule.pp_group_size = stages
    schedule.num_stages = schedule._num_stages = stages * chunks
    schedule.n_local_stages = chunks
    schedule.number_of_rounds = max(1, micro_batches // stages)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    return [schedule._calculate_single_rank_operations(rank) for rank in range(stages)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "Schedule1F1B", 1),
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", 2),
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", 3),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
        ("dualpipe-v", "ScheduleDualPipeV", 2),
    ],
)
def test_every_stage_has_the_order_of_torch(
    name: str, kind: str, chunks: int, stages: int, micro_batches: int
) -> None:
    schedule = build(name, stages, micro_batches, chunks)
    expected = torch_orders(getattr(torch_schedules(), kind), stages, micro_batches, chunks)
    for stage in range(stages):
        steps = theirs(expected[stage])
        if name == "1f1b" and stage == stages - 1:
            # torch 2.13's written order counts the last stage's forwards from 1; what it runs counts from 0.
            first = min(batch for kind, batch, _ in steps if kind == "F")
            steps = [(kind, batch - first if kind == "F" else batch, chunk) for kind, batch, chunk in steps]
        assert ours(schedule.orders[stage]) == steps


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 3), (5, 6), (8, 9)])
def test_few_micro_batches_give_the_v_order_of_torch(stages: int, micro_batches: int) -> None:
    schedule = build("zb-v", stages, micro_batches)
    expected = torch_orders(torch_schedules().ScheduleZBVZeroBubble, stages, micro_batches, 2)
    assert [ours(order) for order in schedule.orders] == [theirs(order) for order in expected]


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (8, 20)])
def test_dualpipe_v_overlaps_the_pairs_that_torch_overlaps(stages: int, micro_batches: int) -> None:
    expected = torch_orders(torch_schedules().ScheduleDualPipeV, stages, micro_batches, 2)
    for stage, order in enumerate(build("dualpipe-v", stages, micro_batches).orders):
        pairs = [ours((first, second)) for first, second in pairwise(order) if first.overlaps_next]
        assert pairs == [theirs([action]) for action in expected[stage] if action.sub_actions]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 20), (16, 40)])
def test_each_half_of_dualpipe_does_what_a_v_of_half_the_stages_does(stages: int, micro_batches: int) -> None:
    """DualPipeV is DualPipe cut in half: stage s of either half, with the directions as the legs of the V."""
    half = stages // 2
    expected = torch_orders(torch_schedules().ScheduleDualPipeV, half, micro_batches // 2, 2)
    for stage, order in enumerate(build("dualpipe", stages, micro_batches).orders):
        position, entering = (stage, 0) if stage < half else (stages - 1 - stage, 1)
        as_v = [
            (action.kind.value, action.micro_batch % (micro_batches // 2), action.direction == entering)
            for action in order
        ]
        assert as_v == [(kind, batch, chunk < half) for kind, batch, chunk in theirs(expected[position])]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(3, 7), (4, 9), (8, 19)])
def test_torch_finds_our_orders_valid_and_plays_them_to_the_end(
    name: str, stages: int, micro_batches: int
) -> None:
    """Sizes that its own generators refuse in part; its validator and its communication pass take any order."""
    schedule = build(name, stages, micro_batches)
    actions = {stage: [as_torch(action) for action in order] for stage, order in enumerate(schedule.orders)}
    chunk_to_stage = torch_schedules()._validate_schedule(actions, stages, schedule.chunks, micro_batches)
    assert chunk_to_stage == {chunk: schedule.stage_of(chunk) for chunk in range(schedule.chunks)}
    with_messages = torch_schedules()._add_send_recv(actions, schedule.stage_of, schedule.chunks)
    played = torch_schedules()._simulate_comms_compute(with_messages, schedule.stage_of, schedule.chunks)
    assert sum(len(theirs(order)) for order in played.values()) == _compute_count(schedule)


def as_torch(action: Action) -> Any:
    kind = torch_schedules()._ComputationType.from_str(action.kind.value)
    return torch_schedules()._Action(action.chunk, kind, action.micro_batch)


def _compute_count(schedule: PipelineSchedule) -> int:
    return sum(len(order) for order in schedule.orders)
