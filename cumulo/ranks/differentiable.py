"""Collectives with gradients: how tensors pass between ranks, and their gradients back. Called by a `Split`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cumulo.ranks.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from cumulo.ranks.groups import Group


def sum_gradients(x: Tensor, group: Group) -> Tensor:
    """The same input to all ranks' slices: its gradient is the sum of theirs (f of Shoeybi et al. 2019)."""
    return _passed(x, lambda x: x.view_as(x), lambda grad: _sum(_own_copy(grad), group))


def summed(y: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' parts, in place; each part's gradient is that of the sum (g of Shoeybi et al. 2019)."""
    return _passed(y.contiguous(), lambda y: _sum(y, group), lambda grad: grad)


def gathered(x: Tensor, group: Group) -> Tensor:
    """All ranks' rows; gradients are summed and cut."""
    return _passed(x, lambda x: _gather(x, group), lambda grad: _sum_and_cut(grad, group))


def summed_and_cut(y: Tensor, group: Group) -> Tensor:
    """A run of the rows of all ranks' sum; gradients are gathered."""
    return _passed(y, lambda y: _sum_and_cut(y, group), lambda grad: _gather(grad, group))


def exchanged(x: Tensor, sends: list[int] | None, receives: list[int] | None, group: Group) -> Tensor:
    """Runs of rows to all ranks and from all ranks, None: equal ones; gradients take the way back."""
    return _passed(
        x,
        lambda x: _all_to_all(x, sends, receives, group),
        lambda grad: _all_to_all(grad, receives, sends, group),
    )


def _passed(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """x goes `there`, and the gradient of what arrived comes `back`."""
    found: Tensor = _Passage.apply(x, there, back)  # type: ignore[no-untyped-call]
    return found


class _Passage(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        arrived = there(x)
        if arrived is x:  # in place
            ctx.mark_dirty(x)
        return arrived

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None, None]:
        return ctx.back(upstream[0]), None, None


def _own_copy(gradient: Tensor) -> Tensor:
    """Autograd may share it with others."""
    return gradient.clone(memory_format=torch.contiguous_format)


def _sum(x: Tensor, group: Group) -> Tensor:
    all_reduce(x, group)
    return x


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
