"""Pairs that a schedule overlaps are computed at the same time, with the gradients of one after the other, and the
step gets shorter by what the simulator says."""

import statistics
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cumulo.layout.layout import Layout
from cumulo.pipeline.decide.actions import PipelineSchedule
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.communication import with_communication
from cumulo.pipeline.decide.costs import ChunkCost, Costs
from cumulo.pipeline.play.run import Wire, play
from cumulo.pipeline.simulate.timeline import simulate
from cumulo.ranks.collectives import Peers, barrier
from cumulo.ranks.differentiable import exchanged
from cumulo.ranks.groups import Group, Groups, SecondLane, world_group
from cumulo.ranks.start import run_ranks

pytestmark = pytest.mark.long

ROWS, WIDTH = 8, 16
WIRE = Wire((ROWS, WIDTH), torch.float64, torch.device("cpu"))


class _Network(torch.autograd.Function):
    """An exchange of rows over a network of this time each way: this host's own is too fast to wait for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        time.sleep(wait_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None]:
        time.sleep(ctx.wait_s)
        return upstream[0], None


class ExpertChunk(nn.Module):
    """Rows travel to the other ranks of the group and back, as tokens do to their experts."""

    def __init__(self, index: int, chunks: int, group: Group, wait_s: float) -> None:
        super().__init__()
        self.last, self.group, self.wait_s = index == chunks - 1, group, wait_s
        torch.manual_seed(index)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()

    def forward(self, x: Tensor | None, batch: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inside = batch if x is None else x
        away = _Network.apply(exchanged(inside, None, None, self.group), self.wait_s)
        y = inside + exchanged(_Network.apply(self.body(away), self.wait_s), None, None, self.group)
        return (None, (y * batch).sin().sum()) if self.last else (y, None)


class Nobody:
    def last(self, chunk: int) -> None: ...

    def added(self, chunk: int) -> None: ...


def _schedule(stages: int, micro_batches: int) -> PipelineSchedule:
    return with_communication(build("dualpipe-v", stages, micro_batches))


def _stage(
    rank: int, stages: int, micro_batches: int, wait_s: float, rounds: int
) -> tuple[bool, dict[bool, list[float]]]:
    """Two data-parallel copies of a pipeline; the ranks of one stage exchange rows."""
    groups = Groups(Layout(pp=stages, dp=2, ep=2), rank)
    schedule, stage = _schedule(stages, micro_batches), groups.place.pp
    lane, group = SecondLane(groups), groups.group("ep")
    generator = torch.Generator().manual_seed(groups.place.dp)
    batches = [
        torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(micro_batches)
    ]
    found: dict[bool, list[Tensor]] = {}
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for beside in (False, True):
            chunks = {
                chunk: ExpertChunk(chunk, schedule.chunks, group, wait_s)
                for chunk in range(schedule.chunks)
                if schedule.stage_of(chunk, 0) == stage
            }
            barrier(world_group())
            began = time.perf_counter()
            play(
                schedule,
                stage,
                chunks,
                batches,
                WIRE,
                Peers(groups.group("pp")),
                Nobody(),
                lane if beside else None,
            )
            barrier(world_group())
            times[beside].append(time.perf_counter() - began)
            found[beside] = [
                p.grad for chunk in chunks.values() for p in chunk.parameters() if p.grad is not None
            ]
    same = all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))
    return same and len(found[True]) > 0, times


def _predicted_saving(stages: int, micro_batches: int, wait_s: float) -> float:
    """Forward and backward wait twice each; a pair takes as long as one of them."""
    schedule = build("dualpipe-v", stages, micro_batches)
    chunk = ChunkCost(2 * wait_s, 2 * wait_s, 0.0)
    apart = simulate(schedule, Costs((chunk,))).makespan_s
    return 1 - simulate(schedule, replace(Costs((chunk,)), overlap_saving=0.5)).makespan_s / apart


def test_overlapped_passes_give_the_same_gradients_bit_by_bit() -> None:
    assert any(action.overlaps_next for action in _schedule(2, 6).orders[0])
    assert all(same for same, _ in run_ranks(_stage, 4, 2, 6, 0.0, 1, timeout_s=120))


@pytest.mark.thorough
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 12)])
def test_a_step_gets_shorter_by_what_the_simulator_predicts(stages: int, micro_batches: int) -> None:
    """On 4 and on 8 processes. Long waits: this host's other work must not decide."""
    found = run_ranks(_stage, 2 * stages, stages, micro_batches, 0.05, 3, timeout_s=300)
    apart, together = (
        statistics.median(max(times) for times in zip(*(one[1][way] for one in found), strict=True))
        for way in (False, True)
    )
    predicted = _predicted_saving(stages, micro_batches, 0.05)
    print(
        f"{2 * stages} processes: {apart:.2f} s apart, {together:.2f} s together, predicted saving {predicted:.1%}"
    )
    assert all(same for same, _ in found)
    assert 1 - together / apart == pytest.approx(predicted, rel=0.2)
