"""Collectives with gradients: how tensors pass between ranks, and their gradients back. Called by a `Split`."""

from typing import Any

import torch
from torch import Tensor

from cumulo.ranks.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from cumulo.ranks.groups import Group


def sum_gradients(x: Tensor, group: Group) -> Tensor:
    """The same input to all ranks' slices: its gradient is the sum of theirs (f of Shoeybi et al. 2019)."""
    same: Tensor = _SumGradients.apply(x, group)  # type: ignore[no-untyped-call]
    return same


def summed(y: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' parts, in place; each part's gradient is that of the sum (g of Shoeybi et al. 2019)."""
    total: Tensor = _Sum.apply(y.contiguous(), group)  # type: ignore[no-untyped-call]
    return total


def gathered(x: Tensor, group: Group) -> Tensor:
    """All ranks' rows; gradients are summed and cut."""
    whole: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return whole


def summed_and_cut(y: Tensor, group: Group) -> Tensor:
    """A run of the rows of all ranks' sum; gradients are gathered."""
    own: Tensor = _SumAndCut.apply(y, group)  # type: ignore[no-untyped-call]
    return own


def exchanged(x: Tensor, sends: list[int] | None, receives: list[int] | None, group: Group) -> Tensor:
    """Runs of rows to all ranks and from all ranks, None: equal ones; gradients take the way back."""
    arrived: Tensor = _Exchange.apply(x, sends, receives, group)  # type: ignore[no-untyped-call]
    return arrived


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None]:
        gradient = upstream[0].clone(
            memory_format=torch.contiguous_format
        )  # autograd may share it with others
        all_reduce(gradient, ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(y)
        all_reduce(y, group)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None]:
        return upstream[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None]:
        return _sum_and_cut(upstream[0], ctx.group), None


class _SumAndCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum_and_cut(y, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None]:
        return _gather(upstream[0], ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sends: list[int] | None, receives: list[int] | None, group: Group
    ) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _all_to_all(x, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None, None, None]:
        return _all_to_all(upstream[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _gather(x: Tensor, group: Group) -> Tensor:
    whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
    all_gather(whole, x.contiguous(), group)
    return whole


def _sum_and_cut(x: Tensor, group: Group) -> Tensor:
    own = x.new_empty(len(x) // group.size(), *x.shape[1:])
    reduce_scatter(own, x.contiguous(), group)
    return own


def _all_to_all(x: Tensor, sends: list[int] | None, receives: list[int] | None, group: Group) -> Tensor:
    arrived = x.new_empty(len(x) if receives is None else sum(receives), *x.shape[1:])
    all_to_all(arrived, x.contiguous(), group, receives, sends)
    return arrived
