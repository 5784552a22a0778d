"""Indices, pointers and masks as a start, a stride along each dimension, and a rest that is looked up.

`base + row * stride + arange` becomes one pointer and two strides, so that the loop over lanes is a vector load;
`offset + arange < size` becomes a bound of the loop. Called by the lowering; nothing is emitted here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cumulo.compile.backend.ttir import Value

Number = int | str  # known now, or the text of a C++ expression


def plus(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0 or b == 0:
        return a if b == 0 else b
    return f"({a} + {b})"


def minus(a: Number, b: Number) -> Number:
    if isinstance(b, int):
        return plus(a, -b)
    return f"({a} - {b})" if a != 0 else f"(-{b})"


def times(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if a == 0 or b == 0:
        return 0
    if a == 1 or b == 1:
        return b if a == 1 else a
    return f"({a} * {b})"


@dataclass(frozen=True, slots=True)
class Lookup:
    """A tensor whose lanes are evaluated where they are needed; `dims`: which of our dimensions its own are."""

    value: Value
    dims: tuple[int | None, ...]
    factor: Number = 1


@dataclass(frozen=True, slots=True)
class Form:
    start: Number
    strides: tuple[Number, ...]
    rest: tuple[Lookup, ...] = ()
    root: "str | Lookup | None" = None  # of pointers: where the elements are counted from

    @property
    def uniform(self) -> bool:
        return not self.rest and all(stride == 0 for stride in self.strides)


@dataclass(frozen=True, slots=True)
class Bound:
    """Lanes from `low` up to `high` of a dimension; of no dimension: all lanes, if `low` < `high`."""

    dim: int | None
    low: Number
    high: Number


_BROADCAST = ("tt.broadcast", "tt.expand_dims", "tt.trans", "tt.splat")


class Forms:
    def __init__(self, scalar: Callable[[Value], str]) -> None:
        self.scalar = scalar
        self.known: dict[Value, Form] = {}

    def form_of(self, value: Value) -> Form:
        if value not in self.known:
            self.known[value] = self._find(value)
        return self.known[value]

    def _unknown(self, value: Value) -> Form:
        """Looked up lane by lane."""
        lookup = Lookup(value, tuple(d if extent > 1 else None for d, extent in enumerate(value.shape)))
        flat: tuple[Number, ...] = (0,) * len(value.shape)
        return Form(0, flat, (), lookup) if value.type.is_pointer else Form(0, flat, (lookup,))

    def _find(self, value: Value) -> Form:
        op, shape = value.op, value.shape
        if not shape:
            text = self.scalar(value)
            if value.type.is_pointer:
                return Form(0, (), (), text)
            number = text.removeprefix("INT64_C").strip("()")
            return Form(int(number) if number.lstrip("-").isdigit() else f"(int64_t){text}", ())
        flat: tuple[Number, ...] = (0,) * len(shape)
        if op is None or value.type.element == "i1":
            return self._unknown(value)
        if op.name == "tt.make_range":
            return Form(op.integer("start"), (1 if shape[0] > 1 else 0,))
        if op.name == "arith.constant":
            text = self.scalar(value).removeprefix("INT64_C").strip("()")
            return Form(int(text), flat) if text.lstrip("-").isdigit() else self._unknown(value)
        if op.name == "tt.splat":
            return replace(self.form_of(op.operands[0]), strides=flat)
        if op.name == "arith.extsi" and op.operands[0].type.element != "i1":
            return self.form_of(op.operands[0])
        if op.name in ("tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reshape"):
            return self._moved(value)
        if op.name in ("arith.addi", "arith.subi", "tt.addptr"):
            a, b = self.form_of(op.operands[0]), self.form_of(op.operands[1])
            return self._sum(a, b, -1 if op.name == "arith.subi" else 1)
        if op.name == "arith.muli":
            a, b = self.form_of(op.operands[0]), self.form_of(op.operands[1])
            if a.uniform or b.uniform:
                return self._sum(Form(0, flat), a if b.uniform else b, (b if b.uniform else a).start)
        return self._unknown(value)

    @staticmethod
    def _sum(a: Form, b: Form, factor: Number) -> Form:
        def added(x: Number, y: Number) -> Number:
            return minus(x, y) if factor == -1 else plus(x, times(y, factor))

        strides = tuple(added(x, y) for x, y in zip(a.strides, b.strides, strict=True))
        rest = (*a.rest, *(replace(item, factor=times(item.factor, factor)) for item in b.rest))
        return Form(added(a.start, b.start), strides, rest, a.root)

    def _moved(self, value: Value) -> Form:
        op = value.op
        assert op is not None
        inner = self.form_of(op.operands[0])
        places = moved_dims(value)
        if places is None:
            if len(inner.strides) == 1 and not inner.rest and not isinstance(inner.root, Lookup):
                strides, step = [], inner.strides[0]
                for extent in reversed(value.shape):  # a row of numbers, folded
                    strides.append(step if extent > 1 else 0)
                    step = times(step, extent)
                return replace(inner, strides=tuple(reversed(strides)))
            return self._unknown(value)
        strides_: list[Number] = [0] * len(value.shape)
        for source, place in enumerate(places):
            if place is not None:
                strides_[place] = inner.strides[source]

        def moved(item: Lookup) -> Lookup:
            return replace(item, dims=tuple(None if d is None else places[d] for d in item.dims))

        root = moved(inner.root) if isinstance(inner.root, Lookup) else inner.root
        return Form(inner.start, tuple(strides_), tuple(moved(item) for item in inner.rest), root)

    # -- masks --------------------------------------------------------------------------------------------------
    def mask(
        self, value: Value, dims: tuple[int | None, ...] | None = None
    ) -> tuple[list[Bound], list[Lookup]]:
        """The bounds that a mask puts on its dimensions, and what of it must be asked lane by lane."""
        if dims is None:
            dims = tuple(d if extent > 1 else None for d, extent in enumerate(value.shape))
        op = value.op
        if op is not None:
            if op.name == "arith.constant" and "true" in op.text:
                return [], []
            if op.name == "arith.andi":
                first, second = (self.mask(operand, dims) for operand in op.operands)
                return first[0] + second[0], first[1] + second[1]
            if op.name == "tt.splat":
                return [Bound(None, 0, f"(int64_t){self.scalar(op.operands[0])}")], []
            places = moved_dims(value) if op.name in _BROADCAST else None
            if places is not None:
                return self.mask(op.operands[0], tuple(None if p is None else dims[p] for p in places))
            if op.name == "arith.cmpi" and (bound := self._compared(value, dims)):
                return [bound], []
        return [], [Lookup(value, dims)]

    def _compared(self, value: Value, dims: tuple[int | None, ...]) -> Bound | None:
        op = value.op
        assert op is not None
        predicate = op.text.split(",")[0].split()[-1]
        if predicate not in ("slt", "sle", "sgt", "sge") or op.operands[0].type.element == "i1":
            return None
        left, right = (self.form_of(operand) for operand in op.operands)
        if predicate in ("sgt", "sge"):
            left, right = right, left
        form = self._sum(right, left, -1)  # a lane is wanted where this is above zero
        if predicate in ("sle", "sge"):
            form = replace(form, start=plus(form.start, 1))
        moving = [d for d, stride in enumerate(form.strides) if stride != 0 and dims[d] is not None]
        if form.rest or len(moving) > 1:
            return None
        if not moving:
            return Bound(None, 0, form.start)
        dim, stride = dims[moving[0]], form.strides[moving[0]]
        if not isinstance(stride, int) or dim is None:
            return None
        if stride < 0:
            return Bound(dim, 0, form.start if stride == -1 else f"ceil_div({form.start}, {-stride})")
        return Bound(dim, f"(floor_div({minus(0, form.start)}, {stride}) + 1)", 1 << 40)


def moved_dims(value: Value) -> list[int | None] | None:
    """Where each dimension of a view's operand lies in the view; None for one of which a single lane is read, and
    instead of the list if the view folds dimensions."""
    op = value.op
    assert op is not None
    if op.name == "tt.splat":
        return []
    source = op.operands[0].shape
    if op.name == "tt.expand_dims":
        axis = op.integer("axis")
        return [d + (d >= axis) if extent > 1 else None for d, extent in enumerate(source)]
    if op.name == "tt.broadcast":
        return [d if extent > 1 else None for d, extent in enumerate(source)]
    if op.name == "tt.trans":
        order = op.integers("order")
        return [order.index(d) if extent > 1 else None for d, extent in enumerate(source)]
    if [e for e in source if e > 1] != [e for e in value.shape if e > 1]:
        return None
    places = iter(d for d, extent in enumerate(value.shape) if extent > 1)
    return [next(places) if extent > 1 else None for extent in source]
