"""A loop nest over the lanes of a block tensor. Called by the lowering for everything that computes or moves lanes.

Elementwise operations are never arrays: `lane` gives a value of one lane as C++, and what it needs is computed in
the same nest, each statement in the outermost loop whose index it reads. The innermost loop is free of dependences,
so the C++ compiler turns it into vector instructions.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from cumulo.compile.backend.forms import Bound, Form, Forms, Lookup, moved_dims, times
from cumulo.compile.backend.operations import ELEMENTWISE, expression, lane_type, memory_type
from cumulo.compile.backend.ttir import TtirBlock, Value

Index = tuple[str, int]  # its text, and the depth of the innermost loop it reads


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array in scratch memory that holds a block tensor; strides are in lanes."""

    name: str
    lane: str
    strides: tuple[int, ...]

    def lane_at(self, index: tuple[Index, ...]) -> str:
        terms = [text if stride == 1 else f"{text} * {stride}"
                 for (text, _), stride in zip(index, self.strides, strict=True) if text != "0"]  # fmt: skip
        return f"{self.name}[{' + '.join(terms) or '0'}]"


class Tensors:
    """What the lowering knows of the values so far: arrays, and the C++ names of scalars."""

    def __init__(self) -> None:
        self.buffers: dict[Value, Buffer] = {}
        self.scalars: dict[Value, str] = {}
        self.forms = Forms(self.scalar)
        self.inlined: set[Value] = set()  # loaded where a lane of them is read
        self._counter = 0

    def fresh(self, prefix: str) -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    def scalar(self, value: Value) -> str:
        return self.scalars.get(value) or f"v{value.id}"


class Nest:
    def __init__(
        self,
        tensors: Tensors,
        shape: tuple[int, ...],
        order: tuple[int, ...] | None = None,
        bounds: list[Bound] | None = None,
    ) -> None:
        """`order`: dimensions from the outermost loop to the innermost."""
        self.tensors, self.shape = tensors, shape
        self.loops = [d for d in order or range(len(shape)) if shape[d] > 1]
        self.ranges = {d: ("0", str(shape[d])) for d in self.loops}
        self.conditions: list[str] = []
        for bound in bounds or []:
            if bound.dim is None:
                self.conditions.append(f"{bound.low} < {bound.high}")
            else:
                self.ranges[bound.dim] = (str(bound.low), str(bound.high))
        depth = {d: place + 1 for place, d in enumerate(self.loops)}
        self.index: tuple[Index, ...] = tuple(
            (f"i{d}", depth[d]) if d in depth else ("0", 0) for d in range(len(shape))
        )
        self.levels: list[list[str]] = [[] for _ in range(len(self.loops) + 1)]
        self.known: dict[object, Index] = {}

    def put(self, statement: str, level: int | None = None) -> None:
        self.levels[-1 if level is None else level].append(statement)

    def _name(self, lane: str, text: str, level: int) -> Index:
        name = self.tensors.fresh("t")
        self.put(f"{lane} const {name} = {text};", level)
        return name, level

    def render(self, vectors: bool = True) -> str:
        lines = [f"if ({' && '.join(self.conditions)})"] if self.conditions else []
        for level, statements in enumerate(self.levels):
            lines += ["{", *statements]
            if level < len(self.loops):
                dim = self.loops[level]
                low, high = self.ranges[dim]
                if vectors and level == len(self.loops) - 1:
                    lines.append("LANES")
                lines.append(f"for (int i{dim} = {low}; i{dim} < {high}; ++i{dim})")
        return "\n".join(lines) + "\n" + "}" * len(self.levels)

    # -- values of a lane -----------------------------------------------------------------------------------------
    def lane(self, value: Value, index: tuple[Index, ...] | None = None) -> Index:
        """The value's lane at `index`, this nest's own by default."""
        index = self.index if index is None else index
        if not value.shape and value not in self.tensors.buffers:
            return self.tensors.scalar(value), 0
        key = (value, tuple(text for text, _ in index))
        if key not in self.known:
            self.known[key] = self._compute(value, index)
        return self.known[key]

    def _compute(self, value: Value, index: tuple[Index, ...]) -> Index:
        level = max((level for _, level in index), default=0)
        lane, op = lane_type(value.type), value.op
        if value in self.tensors.buffers:
            return self._name(lane, self.tensors.buffers[value].lane_at(index), level)
        if op is not None and value in self.tensors.inlined:
            text = self.address(self.tensors.forms.form_of(op.operands[0]), op.operands[0])
            return self._name(lane, f"get({text})", level)
        if (op is None or op.regions) and value in self.tensors.forms.known:
            return self._name(lane, self._from_form(self.tensors.forms.known[value], index), level)
        if op is None:
            raise ValueError("an argument of a block has neither an array nor a form")
        if op.name == "arith.constant":
            return self.tensors.scalar(value), 0
        if op.name == "tt.make_range":
            start = op.integer("start")
            return (f"({index[0][0]} + {start})" if start else index[0][0]), index[0][1]
        if op.name == "tt.splat":
            return self.lane(op.operands[0], ())
        if op.name in ("tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reshape"):
            return self.lane(op.operands[0], self._viewed(value, index))
        if op.name in ("tt.join", "tt.cat"):
            along = index[-1 if op.name == "tt.join" else 0]
            first, second, test = op.operands[0], op.operands[1], f"{along[0]} == 0"
            inner = (index[:-1], index[:-1])
            if op.name == "tt.cat":
                extent, test = first.shape[0], f"{along[0]} < {first.shape[0]}"
                rest = (f"({along[0]} - {extent})", along[1])
                inner = ((along, *index[1:]), (rest, *index[1:]))
                if first not in self.tensors.buffers or second not in self.tensors.buffers:
                    raise op.refused("its parts are not arrays")
                texts = [
                    self.tensors.buffers[part].lane_at(place)
                    for part, place in zip(op.operands, inner, strict=True)
                ]
                return self._name(lane, f"{test} ? {texts[0]} : {texts[1]}", level)
            (a, _), (b, _) = self.lane(first, inner[0]), self.lane(second, inner[1])
            return self._name(lane, f"{test} ? {a} : {b}", level)
        if op.name == "tt.split":
            return self.lane(op.operands[0], (*index, (str(op.results.index(value)), 0)))
        if op.name == "tt.gather":
            axis = op.integer("axis")
            at = self.lane(op.operands[1], index)
            return self.lane(op.operands[0], (*index[:axis], at, *index[axis + 1 :]))
        if op.name not in ELEMENTWISE:
            raise op.refused()
        given = [self.lane(operand, index) if operand.shape else (self.tensors.scalar(operand), 0)
                 for operand in op.operands]  # fmt: skip
        level = max((level for _, level in given), default=0)
        return self._name(lane, expression(op, [text for text, _ in given]), level)

    def _viewed(self, value: Value, index: tuple[Index, ...]) -> tuple[Index, ...]:
        """The index into a view's operand."""
        op = value.op
        assert op is not None
        source = op.operands[0].shape
        places = moved_dims(value)
        if places is not None:
            return tuple(("0", 0) if place is None else index[place] for place in places)
        flat, step, level = [], 1, 0
        for (text, depth), extent in zip(reversed(index), reversed(value.shape), strict=True):
            if extent > 1:
                flat.append(text if step == 1 else f"{text} * {step}")
                level = max(level, depth)
            step *= extent
        place = f"({' + '.join(flat) or '0'})"
        inner, step = [], 1
        for extent in reversed(source):
            text = place if step == 1 else f"({place} / {step})"
            inner.append((text if step * extent == value.type.size else f"({text} % {extent})", level) if extent > 1
                         else ("0", 0))  # fmt: skip
            step *= extent
        return tuple(reversed(inner))

    def _from_form(self, form: Form, index: tuple[Index, ...]) -> str:
        """A lane of what a loop carries as a moving form."""
        terms = [str(form.start)]
        terms += [
            str(times(stride, text))
            for (text, _), stride in zip(index, form.strides, strict=True)
            if stride != 0
        ]
        for lookup in form.rest:
            terms.append(str(times(lookup.factor, self._lookup(lookup, index)[0])))
        if isinstance(form.root, Lookup):
            terms.append(self._lookup(form.root, index)[0])
        elif form.root is not None:
            terms.insert(0, form.root)
        return " + ".join(terms)

    # -- addresses -------------------------------------------------------------------------------------------------
    def _lookup(self, lookup: Lookup, index: tuple[Index, ...] | None = None) -> Index:
        index = self.index if index is None else index
        return self.lane(lookup.value, tuple(("0", 0) if d is None else index[d] for d in lookup.dims))

    def address(self, form: Form, pointer: Value) -> str:
        """The element that a lane's pointer names, as something to read or assign."""
        kind = memory_type(pointer.type.element)
        terms: dict[int, list[str]] = {}
        for (text, level), stride in zip(self.index, form.strides, strict=True):
            if level and stride != 0:
                terms.setdefault(level, []).append(str(times(stride, f"(int64_t){text}")))
        for lookup in form.rest:
            text, level = self._lookup(lookup)
            terms.setdefault(level, []).append(str(times(lookup.factor, f"(int64_t){text}")))
        if isinstance(form.root, Lookup):
            base, base_level = self._lookup(form.root)
        else:
            base, base_level = str(form.root), 0
        terms.setdefault(base_level, []).insert(0, str(form.start))
        innermost = max(1, len(self.loops))
        for level in sorted(terms):
            if level >= innermost or level < base_level:
                continue
            if (offset := " + ".join(terms[level])) != "0":
                base = self._name(kind, f"{base} + ({offset})", level)[0]
        last = [
            term for level, more in terms.items() if level >= innermost or level < base_level for term in more
        ]
        # An index that counts lanes one by one stays an int: a vector load's address needs no wider arithmetic.
        plain = [re.sub(r"^\(int64_t\)(i\d+)$", r"\1", term) for term in last if term != "0"]
        return f"{base}[{' + '.join(plain) or '0'}]"

    def condition(self, rest: list[Lookup]) -> str:
        return " && ".join(self._lookup(lookup)[0] for lookup in rest)


def region_result(
    tensors: Tensors,
    nest: Nest,
    block: TtirBlock,
    given: list[str],
    level: int,
    scalar: Callable[[Value], str],
) -> list[str]:
    """The combining function of a reduction or a scan, written into the nest with these arguments."""
    names = dict(zip(block.args, given, strict=True))
    for op in block.ops:
        texts = [names.get(operand) or scalar(operand) for operand in op.operands]
        if op.name.endswith(".return"):
            return texts
        if op.name == "arith.constant":
            continue
        if op.name not in ELEMENTWISE:
            raise op.refused("not allowed in the function of a reduction")
        names[op.results[0]] = tensors.fresh("t")
        nest.put(
            f"const {lane_type(op.results[0].type)} {names[op.results[0]]} = {expression(op, texts)};", level
        )
    return []
