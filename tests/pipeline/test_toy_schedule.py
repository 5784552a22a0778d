"""A schedule that is added to `FAMILIES`, and nowhere else, is planned, simulated, drawn, checked and executed."""

from collections.abc import Iterator
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from torch import Tensor

from cumulo.layout.layout import Layout, held_chunks, pipeline_chunks, splits_backward
from cumulo.pipeline.decide.actions import Sends, StagePlacement
from cumulo.pipeline.decide.catalog import FAMILIES, Family, build
from cumulo.pipeline.decide.check import check
from cumulo.pipeline.decide.costs import ChunkCost, Costs
from cumulo.pipeline.decide.formulas import Formula
from cumulo.pipeline.decide.order import StageOrder
from cumulo.pipeline.draw import columns_to_read, text_rows, to_svg
from cumulo.pipeline.simulate.timeline import simulate
from cumulo.plan.memory.peak import least_memory_bytes, peak_memory
from cumulo.plan.search.fixed import fixed_job
from cumulo.plan.search.search import search, timed
from cumulo.plan.search.space import Choices, TrainGoal
from cumulo.plan.time.compute_profile import shipped_for
from cumulo.plan.time.step import step_time, timeline
from cumulo.spec.catalog import cluster, model
from tests.pipeline.test_run import check_against_autograd, play_stage
from tests.train.pool import run_ranks

NAME = "one-at-a-time"


def one_at_a_time(stage: int, stages: int, micro_batches: int, chunks_per_stage: int) -> StageOrder:
    """A micro-batch goes down and up a V and all the way back before the next one starts."""
    order = StageOrder([(stage, 0, range(micro_batches)), (2 * stages - 1 - stage, 0, range(micro_batches))])
    for _ in range(micro_batches):
        order.forward(0)
        order.forward(1)
        order.backward_input(1)
        order.backward_input(0)
        order.weight(1)
        order.weight(0)
    return order


TOY = Family(
    NAME,
    "one micro-batch after another",
    "no paper",
    one_at_a_time,
    Formula("what is left", lambda stages, costs: 0.0, "2", lambda p, m, v: 2, holds_for=lambda costs: False),
    StagePlacement.V,
    chunks_per_stage=2,
    splits_backward=True,
)


@contextmanager
def registered() -> Iterator[None]:
    FAMILIES[NAME] = TOY
    try:
        yield
    finally:
        del FAMILIES[NAME]


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with registered():
        yield


def test_it_is_checked() -> None:
    for sends in Sends:
        report = check(build(NAME, 3, 5), sends)
        assert report.peak_live_activations == (2, 2, 2)


def test_it_is_simulated() -> None:
    # Down and up: 3 + 3 chunks of 1 s. Back: 6 input gradients of 2 s, and the first stage's two weight gradients.
    played = simulate(build(NAME, 3, 4), Costs((ChunkCost(1, 2, 0.5),)))
    assert played.makespan_s == 4 * (6 * 1 + 6 * 2 + 2 * 0.5)


def test_it_is_drawn() -> None:
    played = simulate(build(NAME, 2, 3))
    svg = ElementTree.fromstring(to_svg(played, NAME))
    actions = sum(len(spans) for spans in played.compute_spans)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}g"))) == actions
    rows = text_rows(played, columns_to_read(played))
    assert [cell.text[:2] for cell in rows[0] if cell.kind][:3] == ["F0", "F0", "I0"]


def test_its_layout_is_that_of_its_family() -> None:
    layout = Layout(pp=3, schedule=NAME)
    assert pipeline_chunks(layout) == 6
    assert [held_chunks(layout, stage) for stage in range(3)] == [
        ((0, 0), (5, 0)), ((1, 0), (4, 0)), ((2, 0), (3, 0))
    ]  # fmt: skip
    assert splits_backward(layout)


def test_it_is_planned() -> None:
    goal = TrainGoal(model("qwen3-0.6b"), cluster(8, "h100-sxm"), 16, 2048)
    job = fixed_job(f"pp=4,dp=2,schedule={NAME}", goal)
    plan = timed(job, goal)
    assert plan.estimate.step_s > timed(fixed_job("pp=4,dp=2,schedule=zb-v", goal), goal).estimate.step_s
    profile, _ = shipped_for(goal.cluster.device, job.dtype, job.software)
    assert step_time(job, goal.cluster, profile, play=False).step_s <= plan.estimate.step_s
    assert least_memory_bytes(job) <= peak_memory(job).total
    assert timeline(job, goal.cluster).makespan_s <= plan.estimate.step_s
    assert NAME in Choices().schedules
    found = search(goal, Choices(schedules=(NAME,), micro_batches=(1,)))
    assert {plan.job.layout.schedule for plan in found.plans if plan.job.layout.pp > 1} == {NAME}


def test_it_is_executed_with_the_gradients_of_the_whole_model() -> None:
    check_against_autograd(run_ranks(play_toy, 2, 3), 3)


def play_toy(rank: int, micro_batches: int) -> tuple[dict[tuple[int, int], list[Tensor]], list[int]]:
    with registered():
        return play_stage(rank, NAME, micro_batches, False, Sends.RENDEZVOUS)
