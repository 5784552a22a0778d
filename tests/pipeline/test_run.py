"""The executor over gloo processes, against plain autograd and against torch.distributed.pipelining."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from cumulo.pipeline.decide.actions import Sends
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.communication import with_communication
from cumulo.pipeline.play.deferred import DeferredWeights
from cumulo.pipeline.play.run import Wire, play
from cumulo.ranks.collectives import Peers
from cumulo.ranks.groups import world_group
from tests.thorough import rare
from tests.train.pool import run_ranks

pytestmark = pytest.mark.long

ROWS, WIDTH = 3, 8
WIRE = Wire((ROWS, WIDTH), torch.float64, torch.device("cpu"))


class ToyChunk(nn.Module):
    """Two layers with a norm between; some have an objective of their own, as experts have."""

    def __init__(self, index: int, chunks: int, recompute: bool = False) -> None:
        super().__init__()
        self.index, self.last, self.recompute = index, index == chunks - 1, recompute
        torch.manual_seed(index)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.LayerNorm(2 * WIDTH),
            nn.Tanh(),
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
        ).double()

    def forward(self, x: Tensor | None, batch: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inside = batch if x is None else x
        y = checkpoint(self.body, inside, use_reentrant=False) if self.recompute else self.body(inside)
        if self.last:
            return None, (y * batch).sin().sum()
        return y, 0.1 * y.square().sum() if self.index % 2 else None


class Order:
    """A sink that only remembers."""

    def __init__(self) -> None:
        self.called: list[int] = []

    def last(self, chunk: int) -> None:
        self.called.append(chunk)

    def added(self, chunk: int) -> None: ...


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(count)]


def expected_gradients(chunks: int, micro_batches: int) -> dict[int, list[Tensor]]:
    model = [ToyChunk(index, chunks) for index in range(chunks)]
    for batch in batches(micro_batches):
        x: Tensor | None = None
        total = torch.zeros((), dtype=torch.float64)
        for chunk in model:
            x, objective = chunk(x, batch)
            total = total if objective is None else total + objective
        total.backward()
    return {chunk.index: gradients_of(chunk) for chunk in model}


def gradients_of(chunk: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in chunk.parameters() if parameter.grad is not None]


def play_stage(
    rank: int, name: str, micro_batches: int, recompute: bool, sends: Sends
) -> tuple[dict[tuple[int, int], list[Tensor]], list[int]]:
    schedule = with_communication(build(name, world_group().size(), micro_batches), sends)
    held = [
        (chunk, direction)
        for direction in range(schedule.directions)
        for chunk in range(schedule.chunks)
        if schedule.stage_of(chunk, direction) == rank
    ]
    chunks = {chunk: ToyChunk(chunk, schedule.chunks, recompute) for chunk, _ in held}
    sink = Order()
    play(schedule, rank, chunks, batches(micro_batches), WIRE, Peers(world_group()), sink)
    return {key: gradients_of(chunks[key[0]]) for key in held}, sink.called


SIZES = [("gpipe", 3, 4), ("1f1b", 4, 6), ("interleaved-1f1b", 2, 4), ("zb-h1", 3, 5), ("zb-v", 3, 6),
         ("dualpipe", 4, 8), ("dualpipe-v", 2, 5)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "recompute"),
    [
        *((*size, False) for size in SIZES),
        *((*SIZES[index], True) for index in (1, 4)),
        *rare(*((*SIZES[index], True) for index in (0, 2, 3, 5, 6))),
    ],
)
def test_every_schedule_gives_the_gradients_of_plain_autograd(
    name: str, stages: int, micro_batches: int, recompute: bool
) -> None:
    ranks = run_ranks(play_stage, stages, name, micro_batches, recompute, Sends.BUFFERED)
    check_against_autograd(ranks, micro_batches)
    for found, last_calls in ranks:
        assert sorted(last_calls) == sorted(chunk for chunk, _ in found)  # once for each chunk


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"), [("1f1b", 3, 5), ("dualpipe", 2, 4), *rare(("zb-v", 2, 4))]
)
def test_orders_for_sends_that_wait_give_the_same(name: str, stages: int, micro_batches: int) -> None:
    ranks = run_ranks(play_stage, stages, name, micro_batches, False, Sends.RENDEZVOUS)
    check_against_autograd(ranks, micro_batches)


def check_against_autograd(ranks: list[Any], micro_batches: int) -> None:
    summed: dict[int, list[Tensor]] = {}  # over the two directions of a bidirectional pipeline
    for found, _ in ranks:
        for (chunk, _), gradients in found.items():
            before = summed.get(chunk)
            summed[chunk] = [a + b for a, b in zip(before, gradients, strict=True)] if before else gradients
    expected = expected_gradients(len(summed), micro_batches)
    for chunk, gradients in expected.items():
        torch.testing.assert_close(summed[chunk], gradients, rtol=1e-12, atol=1e-13)


def play_stage_with_torch(rank: int, name: str, kind: str, micro_batches: int) -> dict[int, list[Tensor]]:
    from torch.distributed.pipelining import PipelineStage, schedules

    ours = build(name, world_group().size(), micro_batches)
    held = [chunk for chunk in range(ours.chunks) if ours.stage_of(chunk) == rank]
    modules = {chunk: TorchChunk(chunk, ours.chunks) for chunk in held}
    stages = [PipelineStage(modules[chunk], chunk, ours.chunks, torch.device("cpu")) for chunk in held]
    targets = torch.cat(batches(micro_batches))
    schedule_class = getattr(schedules, kind)
    schedule = schedule_class(
        stages if issubclass(schedule_class, schedules.PipelineScheduleMulti) else stages[0],
        micro_batches,
        loss_fn=lambda y, batch: (y * batch).sin().sum(),
        scale_grads=False,
    )
    arguments = (targets,) if 0 in held else ()
    schedule.step(*arguments, target=targets if ours.chunks - 1 in held else None)
    return {chunk: gradients_of(module) for chunk, module in modules.items()}


class TorchChunk(nn.Module):
    """Only what torch's stages can do: no objective in the middle."""

    def __init__(self, index: int, chunks: int) -> None:
        super().__init__()
        self.toy = ToyChunk(index, chunks)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.toy.body(x)
        return y


class PlainChunk(ToyChunk):
    def forward(self, x: Tensor | None, batch: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y = self.body(batch if x is None else x)
        return (None, (y * batch).sin().sum()) if self.last else (y, None)


def play_plain_stage(rank: int, name: str, micro_batches: int) -> dict[int, list[Tensor]]:
    schedule = with_communication(build(name, world_group().size(), micro_batches))
    chunks = {
        chunk: PlainChunk(chunk, schedule.chunks)
        for chunk in range(schedule.chunks)
        if schedule.stage_of(chunk) == rank
    }
    play(schedule, rank, chunks, batches(micro_batches), WIRE, Peers(world_group()), Order())
    return {number: gradients_of(chunk) for number, chunk in chunks.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("interleaved-1f1b", "ScheduleInterleaved1F1B"),
        ("zb-v", "ScheduleZBVZeroBubble"),
        *rare(("1f1b", "Schedule1F1B"), ("dualpipe-v", "ScheduleDualPipeV")),
    ],
)
def test_gradients_are_those_of_torchs_own_pipeline(name: str, kind: str) -> None:
    theirs = run_ranks(play_stage_with_torch, 2, name, kind, 4)
    ours = run_ranks(play_plain_stage, 2, name, 4)
    for own, expected in zip(ours, theirs, strict=True):
        assert own.keys() == expected.keys()
        for chunk in own:
            torch.testing.assert_close(own[chunk], expected[chunk], rtol=1e-12, atol=1e-13)


def test_weight_products_wait_until_they_are_asked_for_and_hooks_run_once() -> None:
    chunk = ToyChunk(0, 2)
    events: list[nn.Parameter] = []
    for parameter in chunk.parameters():
        parameter.register_post_accumulate_grad_hook(events.append)
    x = batches(1)[0].requires_grad_()
    later = DeferredWeights()
    with later:
        y = chunk.body(x)
    weight = torch.randn_like(y)
    gradient = later.input_gradient([y], [weight], x, chunk.parameters())
    assert len(later.products) == 2  # one for each matrix
    assert events == [] and gradients_of(chunk) == []
    later.accumulate()
    assert len(events) == len(list(chunk.parameters())) == len(set(events))
    halves = gradients_of(chunk)
    chunk.zero_grad()
    (chunk.body(x) * weight).sum().backward()
    torch.testing.assert_close([gradient, *halves], [x.grad, *gradients_of(chunk)], rtol=1e-12, atol=1e-14)


def test_products_of_experts_wait_too() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 8, generator=generator).requires_grad_()
    experts = nn.Parameter(torch.randn(3, 16, 8, generator=generator))
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)  # the second expert has no tokens
    later = DeferredWeights()
    with later:
        y = F.grouped_mm(x, experts.transpose(1, 2), offs=ends)
    weight = torch.randn(10, 16, generator=generator)
    gradient = later.input_gradient([y], [weight], x, [experts])
    assert experts.grad is None and len(later.products) == 1
    later.accumulate()
    halves = [gradient, experts.grad]
    experts.grad = None
    parts = zip(x.split([4, 0, 6]), experts, strict=True)
    (torch.cat([part @ expert.T for part, expert in parts]) * weight).sum().backward()
    torch.testing.assert_close(halves, [x.grad, experts.grad])


def test_a_recomputed_layer_is_computed_again_once_for_both_halves() -> None:
    calls: list[int] = []
    layer = nn.Linear(WIDTH, WIDTH).double()

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        y: Tensor = layer(layer(x).tanh())
        return y

    x = batches(1)[0].requires_grad_()
    later = DeferredWeights()
    with later:
        y = checkpoint(counted, x, use_reentrant=False)
    later.input_gradient([y], [torch.ones_like(y)], x, layer.parameters())
    later.accumulate()
    assert len(calls) == 2
    found = gradients_of(layer)
    layer.zero_grad()
    counted(x).sum().backward()
    torch.testing.assert_close(found, gradients_of(layer), rtol=1e-12, atol=1e-14)
