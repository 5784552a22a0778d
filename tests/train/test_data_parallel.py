"""The bucketed reducer: what torch's DistributedDataParallel gives, in its order, while backward runs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import pieces
from cumulo.ranks.groups import Groups
from cumulo.train.optimizer import data_parallel
from cumulo.train.optimizer.data_parallel import DataParallel
from tests.train.data_case import DENSE, ROWS, Case
from tests.train.pool import run_ranks

pytestmark = pytest.mark.long

RANKS = 2


def against_torch(rank: int) -> float:
    """The largest relative difference of any gradient."""
    case, layout = Case(), Layout(dp=RANKS)
    own, other = case.model(), case.model()
    sink = DataParallel(
        {0: dict(own.named_parameters())}, pieces(DENSE, layout, rank), Groups(layout, rank), True
    )
    part = ROWS // RANKS
    first = rank * part
    sink.begin()
    sink.last(0)
    case.objective(own, 0, first, first + part).backward()
    found = sink.finish()
    wrapped: Any = nn.parallel.DistributedDataParallel(other)
    (RANKS * case.objective(wrapped, 0, first, first + part)).backward()  # it takes the mean
    return max(
        float((found[name] - p.grad).abs().max() / p.grad.abs().max())
        for name, p in other.named_parameters()
        if p.grad is not None
    )


def test_gradients_are_those_of_torchs_distributed_data_parallel() -> None:
    assert max(run_ranks(against_torch, RANKS)) < 1e-13


def order_of_sending(rank: int, bucket_bytes: int) -> tuple[list[tuple[int, bool]], int]:
    """(numbers sent, whether backward was still running) of each message, and how many buckets there are."""
    data_parallel.BUCKET_BYTES = data_parallel.FIRST_BUCKET_BYTES = bucket_bytes
    case, layout = Case(), Layout(dp=RANKS)
    model = case.model()
    sink = DataParallel(
        {0: dict(model.named_parameters())}, pieces(DENSE, layout, rank), Groups(layout, rank), True
    )
    sent: list[tuple[int, bool]] = []
    running, all_reduce = True, dist.all_reduce

    def watched(tensor: torch.Tensor, **options: Any) -> Any:
        sent.append((tensor.numel(), running))
        return all_reduce(tensor, **options)

    dist.all_reduce = watched  # type: ignore[assignment]
    try:
        sink.begin()
        case.objective(model, 0, rank, rank + 1).backward()
        assert not sent, "a micro-batch that is not the last sends nothing"
        sink.last(0)
        case.objective(model, 0, rank + 2, rank + 3).backward()
        running = False
        sink.finish()
    finally:
        dist.all_reduce = all_reduce  # type: ignore[assignment]
    return sent, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 1 << 20])
def test_every_gradient_is_sent_once_while_the_last_backward_runs(bucket_bytes: int) -> None:
    for sent, numbers in run_ranks(order_of_sending, RANKS, bucket_bytes):
        assert sum(size for size, _ in sent) == numbers
        assert all(running for _, running in sent)
        assert len(sent) == {1: 15, 4096: 6, 1 << 20: 1}[bucket_bytes], sent


def late_gradients(rank: int) -> bool:
    """Gradients that no hook saw are sent all the same."""
    case, layout = Case(), Layout(dp=RANKS)
    model = case.model()
    named = dict(model.named_parameters())
    sink = DataParallel({0: named}, pieces(DENSE, layout, rank), Groups(layout, rank), True)
    sink.begin()
    sink.last(0)
    for parameter in named.values():
        assert parameter.grad is not None
        parameter.grad += rank + 1.0
    return all(bool((gradient == 3.0).all()) for gradient in sink.finish().values())


def test_gradients_added_by_hand_are_summed_too() -> None:
    assert all(run_ranks(late_gradients, RANKS))
