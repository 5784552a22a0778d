"""Which element of its source a view shows. The writer of kernels looks through views, so that they cost
nothing."""

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from cumulo.compile.passes.facts import argument_of, aten_name, fake, is_static, is_view, tensor
from cumulo.compile.passes.index import IndexForm, number, split
from cumulo.compile.passes.operations import CannotWrite


def within(form: IndexForm, start: int, end: int, size: int) -> list[str] | None:
    """The conditions under which start <= form < end; none where it always is, None where it never is."""
    if not form.terms:
        return [] if start <= form.constant < end else None
    return [f"({form} >= {start})"] * (start > 0) + [f"({form} < {end})"] * (end < size)


def broadcast(index: tuple[IndexForm, ...], shape: Sequence[int]) -> tuple[IndexForm, ...]:
    """The index in an argument of this shape."""
    kept = index[len(index) - len(shape) :]
    return tuple(number(0) if size == 1 else form for form, size in zip(kept, shape, strict=True))


def moved(index: tuple[IndexForm, ...], dim: int, by: int, step: int = 1) -> tuple[IndexForm, ...]:
    return (*index[:dim], index[dim] * step + number(by), *index[dim + 1 :])


def seen_through(
    view: Node, index: tuple[IndexForm, ...], limits: dict[str, int]
) -> tuple[Node, tuple[IndexForm, ...]]:
    """The source of a view, and where in it the element at this index is."""
    name, args = aten_name(view), tuple[Any, ...](view.args)
    source: Node = args[0]
    if not name:
        return _piece(view, source, args[1], index)
    value, before = tensor(view), tensor(source)
    if value is None or before is None or not is_static(before):
        raise CannotWrite("it reads a view of unknown sizes")
    dims = before.dim()
    if name in ("detach", "alias"):
        return source, index
    if name in ("view", "_unsafe_view"):
        if value.dtype != before.dtype:
            raise CannotWrite("it reads bits as another type")
        total, step = IndexForm(), 1
        for form, size in zip(reversed(index), reversed(value.shape), strict=True):
            total, step = total + form * step, step * size
        return source, split(total, tuple(before.shape), limits)
    if name in ("permute", "transpose", "t"):
        order = list(range(dims))
        if name == "permute":
            order = [dim % dims for dim in args[1]]
        elif dims > 1:
            one, two = (args[1] % dims, args[2] % dims) if name == "transpose" else (0, 1)
            order[one], order[two] = order[two], order[one]
        places = dict(zip(order, index, strict=True))
        return source, tuple(places[dim] for dim in range(dims))
    if name == "expand":
        return source, broadcast(index, before.shape)
    if name in ("unsqueeze", "squeeze"):
        forms = iter([form for form, size in zip(index, value.shape, strict=True) if size != 1])
        return source, tuple(number(0) if size == 1 else next(forms) for size in before.shape)
    if name in ("slice", "select"):
        dim = (args[1] if len(args) > 1 else 0) % dims
        size, start = before.shape[dim], args[2] if len(args) > 2 and args[2] is not None else 0
        if not isinstance(start, int):
            raise CannotWrite("it reads a part that is known only at run time")
        start = min(max(start + size if start < 0 else start, 0), size)
        if name == "select":
            return source, (*index[:dim], number(start), *index[dim:])
        return source, moved(index, dim, start, args[4] if len(args) > 4 else 1)
    raise CannotWrite(f"it reads through {name}")


def _piece(
    view: Node, source: Node, place: int, index: tuple[IndexForm, ...]
) -> tuple[Node, tuple[IndexForm, ...]]:
    """The piece of a tensor that was split or unbound."""
    kind, args = aten_name(source), tuple[Any, ...](source.args)
    if not is_view(source) or kind not in ("unbind", "split", "split_with_sizes"):
        raise CannotWrite("it reads one of several results")
    dim = argument_of(source, 1 if kind == "unbind" else 2, "dim", 0) % fake(args[0]).dim()
    if kind == "unbind":
        return args[0], (*index[:dim], number(place), *index[dim:])
    start = sum(piece.shape[dim] for piece in source.meta["val"][:place])
    return args[0], moved(index, dim, start)
