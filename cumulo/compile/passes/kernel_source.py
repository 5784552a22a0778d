"""The Triton source of a group of operations: one kernel, one readable text. The compiler writes it for every group
before it decides that the group is one.

A kernel computes a tile of rows × columns. `KernelWriter.value` asks backwards from what is stored: the value of an
operation at an index is an expression over its arguments' values at theirs. A view only changes the index; a
reduction needs its whole row in the tile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from cumulo.compile.passes.facts import argument_of, aten_name, fake, is_result, is_static, is_view, tensor
from cumulo.compile.passes.index import COLUMN, ROW, IndexForm, number, split
from cumulo.compile.passes.operations import (
    INSETS,
    REDUCTIONS,
    TYPES,
    CannotWrite,
    KernelValue,
    is_constant,
    keeps_shape,
    literal,
    reduced_dims,
    register,
    rounded,
    write,
)
from cumulo.compile.passes.views import broadcast, moved, seen_through, within

MOST_COLUMNS = 16384  # of a reduction: its row is one tile
TILE = 1024  # elements of a tile of pointwise work
MOST_POINTERS = 24


@dataclass(frozen=True, slots=True)
class KernelSource:
    text: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    programs: int
    warps: int
    # Inputs that every element's program reads only where it writes: an output may take their memory.
    replaceable: frozenset[Node]


def write_kernel(
    name: str, nodes: Sequence[Node], outputs: Sequence[Node], columns: int | None
) -> KernelSource:
    """`outputs`: the nodes of the group that others read. `columns`: the row of the group's reductions, if it has
    any. Raises CannotWrite with the reason."""
    tensors = [tensor(node) for node in nodes]
    if any(value is None or not is_static(value) for value in tensors):
        raise CannotWrite("its sizes are known only at run time")
    main = max(outputs, key=lambda node: fake(node).numel())
    shape, strides = tuple(fake(main).shape), fake(main).stride()
    if columns is not None:
        if columns > MOST_COLUMNS:
            raise CannotWrite(f"a row of {columns:,} numbers is longer than a tile of {MOST_COLUMNS:,}")
        total = max(fake(node.args[0] if aten_name(node) in REDUCTIONS else node).numel() for node in nodes)
        return KernelWriter(name, nodes, outputs, ((total // columns,), (columns,)), None, True).source()
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)) if shape else []
    first: KernelSource | None = None
    for inner in range(len(order), 0, -1):
        sizes = tuple(shape[dim] for dim in order)
        writer = KernelWriter(
            name, nodes, outputs, (sizes[:-inner], sizes[-inner:]), (shape, tuple(order)), False
        )
        source = writer.source()
        first = first or source
        if not writer.splits_columns:
            return source
    return first or KernelWriter(name, nodes, outputs, ((), (1,)), None, False).source()


@dataclass
class KernelWriter:
    """Writes one kernel. `sizes`: of the dimensions that rows and columns run over. `order`: the shape they come
    from and its dimensions, slowest first; None: elements are counted in their logical order."""

    name: str
    nodes: Sequence[Node]
    outputs: Sequence[Node]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    order: tuple[tuple[int, ...], tuple[int, ...]] | None
    reduces: bool
    splits_columns: bool = False
    lines: list[str] = field(default_factory=list)
    pointers: dict[Node, str] = field(default_factory=dict)
    known: dict[Any, KernelValue] = field(default_factory=dict)
    reads: dict[Node, set[IndexForm]] = field(default_factory=dict)
    wide: bool = False

    def source(self) -> KernelSource:
        rows, columns = (math.prod(part) for part in self.sizes)
        self.rows, self.columns = rows, columns
        self.limits = {"x": rows, "y": columns}
        self.group = set(self.nodes)
        block = 1 << max(columns - 1, 0).bit_length()
        block = block if self.reduces else min(block, TILE)
        many = 1 << max(rows - 1, 0).bit_length()
        self.block_rows = 1 if block >= 256 else max(1, min(many, TILE // block))
        self.block = block
        self.flat = self.block_rows == 1  # one row a program: x is one number
        self.masks_columns = columns % block != 0
        stores = []
        for place, node in enumerate(self.outputs):
            value = fake(node)
            index = self._own_index(node, value)
            found = self.value(node, index, ())
            offset = self._offset(index, value.stride())
            stores.append((place, offset, found.text))
        body = [
            f"    tl.store(out{place} + {self._address(offset)}, {text}{self._mask(offset, (), '')})"
            for place, offset, text in stores
        ]
        if len(self.pointers) + len(self.outputs) > MOST_POINTERS:
            raise CannotWrite(f"it reads and writes more than {MOST_POINTERS} tensors")
        blocks = -(-columns // block)
        row = "tl.program_id(0)" if blocks == 1 else f"tl.program_id(0) // {blocks}"
        column = f"tl.arange(0, {block})"
        start = "" if blocks == 1 else f"tl.program_id(0) % {blocks} * {block} + "
        if rows == 1 and blocks > 1:
            start = f"tl.program_id(0) * {block} + "
        if self.flat:
            head = [f"    x = {row}"] * (rows > 1) + [f"    y = {start}{column}"]
        else:
            head = [f"    x = ({row} * {self.block_rows} + tl.arange(0, {self.block_rows}))[:, None]"]
            head += [f"    y = ({start}{column})[None, :]"]
        if self.wide:
            head += ["    x = x.to(tl.int64)"] * (rows > 1) + ["    y = y.to(tl.int64)"]
        text = "\n".join([*head, *self.lines, *body])
        parameters = ", ".join(
            [*self.pointers.values(), *(f"out{place}" for place in range(len(self.outputs)))]
        )
        operations = ", ".join(dict.fromkeys(aten_name(node) for node in self.nodes))
        docs = f'    """{operations}: {rows:,} rows of {columns:,}"""'
        whole = f"@triton.jit\ndef {self.name}({parameters}):\n{docs}\n{text}\n"
        return KernelSource(
            whole, tuple(self.pointers), tuple(self.outputs), blocks * -(-rows // self.block_rows),
            4 if block <= 2048 else 8 if block <= 8192 else 16, self._replaceable(),
        )  # fmt: skip

    # -- indices ---------------------------------------------------------------------------------------------
    def _own_index(self, node: Node, value: torch.Tensor) -> tuple[IndexForm, ...]:
        """Where a program's elements of an output lie."""
        shape = tuple(value.shape)
        if self.order is not None and shape == self.order[0]:
            outer, inner = self.sizes
            forms = (*split(ROW, outer, self.limits), *split(COLUMN, inner, self.limits))
            places = dict(zip(self.order[1], forms, strict=True))
            return tuple(places[dim] for dim in range(len(shape)))
        if value.numel() == self.rows * self.columns:
            row = ROW * self.columns if self.rows > 1 else number(0)
            return split(row + COLUMN, shape, self.limits)
        if self.reduces and value.numel() == self.rows:
            return split(ROW, shape, self.limits)
        raise CannotWrite("its results have different numbers of elements")

    def _offset(self, index: Sequence[IndexForm], strides: Sequence[int]) -> IndexForm:
        total = IndexForm()
        for form, stride in zip(index, strides, strict=True):
            total = total + form * stride
        self.splits_columns |= total.splits("y")
        reach = sum(abs(factor) for _, factor in total.terms) * max(self.rows, self.columns) + abs(
            total.constant
        )
        self.wide |= reach >= 1 << 31 and self.rows * self.columns >= 1 << 24
        return total

    def _address(self, offset: IndexForm) -> str:
        text = str(offset)
        return f"({text})" if " " in text else text

    def _mask(self, offset: IndexForm, conditions: Sequence[str], other: str) -> str:
        masks = list(conditions)
        if offset.uses("y") and self.masks_columns:
            masks.append(f"(y < {self.columns})")
        if offset.uses("x") and not self.flat and self.rows % self.block_rows:
            masks.append(f"(x < {self.rows})")
        return f", mask={' & '.join(masks)}{other}" if masks else ""

    def _replaceable(self) -> frozenset[Node]:
        """Inputs read at one place alone, the one where every output is written."""
        stored = set()
        for node in self.outputs:
            value = fake(node)
            stored.add(self._offset(self._own_index(node, value), value.stride()))
        return frozenset(
            node for node, offsets in self.reads.items() if len(stored) == 1 and offsets == stored
        )

    # -- values ----------------------------------------------------------------------------------------------
    def value(self, node: Node, index: tuple[IndexForm, ...], conditions: tuple[str, ...]) -> KernelValue:
        key = (node, index, conditions)
        if key not in self.known:
            self.known[key] = self._value(node, index, conditions)
        return self.known[key]

    def _value(self, node: Node, index: tuple[IndexForm, ...], conditions: tuple[str, ...]) -> KernelValue:
        value, name = tensor(node), aten_name(node)
        if value is None or not is_static(value):
            raise CannotWrite("it reads what is no tensor of known sizes")
        if value.dtype not in TYPES:
            raise CannotWrite(f"there is no generated code for {str(value.dtype).removeprefix('torch.')}")
        if is_constant(node):
            return self._constant(0 if name == "zeros" else 1 if name == "ones" else node.args[-1], node)
        if is_view(node) and not is_result(node):
            return self.value(*seen_through(node, index, self.limits), conditions)
        if node not in self.group:
            return self._load(node, value, index, conditions)
        if name in REDUCTIONS:
            return self._reduction(node, index, conditions)
        if name == "cat":
            return self._cat(node, index, conditions)
        if name in INSETS:
            return self._inset(node, index, conditions)
        if name == "roll":
            return self._roll(node, index, conditions)
        if name == "arange":
            return self._positions(node, index[0])

        def argument(one: Any) -> KernelValue | None:
            if not isinstance(one, Node):
                return None
            given = tensor(one)
            if given is None:
                raise CannotWrite("it reads a number that is known only at run time")
            return self.value(one, broadcast(index, given.shape), conditions)

        return self._let(write(node, argument), node)

    def _let(self, text: str, node: Node, dtype: torch.dtype | None = None) -> KernelValue:
        variable = f"v{len(self.lines)}"
        self.lines.append(f"    {variable} = {text}  # {aten_name(node) or node.op}")
        return KernelValue(variable, dtype or fake(node).dtype)

    def _constant(self, number: Any, node: Node) -> KernelValue:
        dtype = fake(node).dtype
        return self._let(f"tl.full([], {literal(number, dtype)}, tl.{register(dtype)})", node)

    def _positions(self, node: Node, index: IndexForm) -> KernelValue:
        args, dtype = tuple[Any, ...](node.args), fake(node).dtype
        start, step = (args[0], args[2] if len(args) > 2 else 1) if len(args) > 1 else (0, 1)
        if not isinstance(start, int) or not isinstance(step, int):
            raise CannotWrite("arange of what is no whole number")
        form = index * step + number(start)
        self.splits_columns |= form.splits("y")
        text = f"({form})" if form.terms else f"tl.full([], {form}, tl.int64)"
        return self._let(rounded(f"{text}.to(tl.{register(dtype)})", dtype), node)

    def _load(
        self, node: Node, value: torch.Tensor, index: tuple[IndexForm, ...], conditions: tuple[str, ...]
    ) -> KernelValue:
        pointer = self.pointers.setdefault(node, f"in{len(self.pointers)}")
        offset = self._offset(index, value.stride())
        self.reads.setdefault(node, set()).add(offset)
        same = (node, offset, conditions)
        if same not in self.known:
            mask, where = self._mask(offset, conditions, ", other=0"), self._address(offset)
            # A mask is never wider than its pointers.
            for variable in "xy":
                if not offset.uses(variable) and any(variable in one for one in conditions):
                    where += f" + {variable} * 0"
            kind = "" if register(value.dtype) == TYPES[value.dtype] else ".to(tl.float32)"
            kind = ".to(tl.int1)" if value.dtype == torch.bool else kind
            self.known[same] = self._let(f"tl.load({pointer} + {where}{mask}){kind}", node)
        return self.known[same]

    def _reduction(
        self, node: Node, index: tuple[IndexForm, ...], conditions: tuple[str, ...]
    ) -> KernelValue:
        value, name, args = fake(node), aten_name(node), tuple[Any, ...](node.args)
        before, dims, out = fake(args[0]), reduced_dims(node), fake(node).dtype
        sizes = tuple(before.shape[dim] for dim in dims)
        if not self.reduces or math.prod(sizes) != self.columns or conditions:
            raise CannotWrite("its rows are not those of the group")
        if not before.dtype.is_floating_point or not out.is_floating_point:
            raise CannotWrite("a reduction of whole numbers")
        if node.kwargs.get("dtype") not in (None, out):
            raise CannotWrite("a reduction to another type")
        inner = split(COLUMN, sizes, self.limits)
        outer = index[: before.dim() - len(dims)] if value.dim() == before.dim() else index
        if any(form.uses("y") for form in outer) or (keeps_shape(node) and index[-1:] != inner):
            raise CannotWrite("its row is not the tile's row")
        a = self.value(args[0], (*outer, *inner), ()).text

        def step(text: str) -> str:
            return self._let(text, node, torch.float32).text

        if name in ("sum", "mean"):
            text = self._over("sum", a, "0.0")
            text = text if name == "sum" else f"({text} / {self.columns})"
        elif name in ("amax", "amin"):
            text = self._extreme(a, name)
        elif name in ("_softmax", "_log_softmax"):
            shifted = step(f"{a} - {step(self._extreme(a, 'amax'))}")
            power = step(f"tl.exp({shifted})")
            total = step(self._over("sum", power, "0.0"))
            text = f"({power} / {total})" if name == "_softmax" else f"({shifted} - tl.log({total}))"
        else:  # the gradient of one of them, from that of its result and the result
            b = self.value(args[1], (*outer, *inner), ()).text
            factor = f"{a} * {b}" if name == "_softmax_backward_data" else a
            total = step(self._over("sum", step(factor), "0.0"))
            text = f"({b} * ({a} - {total}))" if factor != a else f"({a} - tl.exp({b}) * {total})"
        return self._let(rounded(text, out), node)

    def _over(self, how: str, text: str, neutral: str) -> str:
        if self.masks_columns:
            text = f"tl.where(y < {self.columns}, {text}, {neutral})"
        else:
            text = f"tl.broadcast_to({text}, [{self.block}])" if self.flat else text
        if self.flat:
            return f"tl.{how}({text}, 0)"
        return f"tl.{how}(tl.broadcast_to({text}, [{self.block_rows}, {self.block}]), 1)[:, None]"

    def _extreme(self, text: str, name: str) -> str:
        """With NaN for a row that has one."""
        how, neutral = ("max", 'float("-inf")') if name == "amax" else ("min", 'float("inf")')
        missing = self._over("max", f"({text} != {text}).to(tl.int32)", "0")
        return f'tl.where({missing} > 0, float("nan"), {self._over(how, text, neutral)})'

    def _cat(self, node: Node, index: tuple[IndexForm, ...], conditions: tuple[str, ...]) -> KernelValue:
        value, args = fake(node), tuple[Any, ...](node.args)
        dim = argument_of(node, 1, "dim", 0) % value.dim()
        pieces = [one for one in args[0] if fake(one).shape != (0,)]
        if any(fake(one).dtype != value.dtype for one in pieces):
            raise CannotWrite("it joins tensors of different types")
        begin, text = value.shape[dim], ""
        for one in reversed(pieces):
            end, begin = begin, begin - fake(one).shape[dim]
            limits = within(index[dim], begin, end, value.shape[dim])
            if limits is None:
                continue
            found = self.value(one, moved(index, dim, -begin), (*conditions, *limits))
            if not limits:
                return found
            text = f"tl.where({' & '.join(limits)}, {found.text}, {text})" if text else found.text
        return self._let(text, node)

    def _roll(self, node: Node, index: tuple[IndexForm, ...], conditions: tuple[str, ...]) -> KernelValue:
        args = tuple[Any, ...](node.args)
        shifts, dims = list(args[1]), list(args[2]) if len(args) > 2 else []
        if len(shifts) != 1 or len(dims) != 1:
            raise CannotWrite("roll over several dimensions")
        dim = dims[0] % len(index)
        size = fake(node).shape[dim]
        by, text = shifts[0] % size, ""
        for start, end, step in ((0, by, size - by), (by, size, -by)):
            limits = within(index[dim], start, end, size)
            if limits is None or start == end:
                continue
            found = self.value(args[0], moved(index, dim, step), (*conditions, *limits))
            text = f"tl.where({' & '.join(limits)}, {found.text}, {text})" if text and limits else found.text
        return self._let(text, node)

    def _inset(self, node: Node, index: tuple[IndexForm, ...], conditions: tuple[str, ...]) -> KernelValue:
        """A tensor written into a part of another one, or of a constant."""
        value, name, args = fake(node), aten_name(node), tuple[Any, ...](node.args)
        inner, rest, fill = args[0], None, 0
        cuts: list[tuple[int, int, int]] = []
        if name == "constant_pad_nd":
            fill = args[2] if len(args) > 2 else 0
            if min(args[1]) < 0:
                raise CannotWrite("negative padding")
            for place, (left, right) in enumerate(zip(args[1][::2], args[1][1::2], strict=True)):
                dim = value.dim() - 1 - place
                cuts.append((dim, left, value.shape[dim] - right))
        else:
            dim, start, *more = args[2:] if len(args) > 3 else (*args[2:], 0)
            dim, size = dim % value.dim(), value.shape[dim]
            if len(more) > 1 and more[1] != 1:
                raise CannotWrite(f"{name} with a step")
            start = min(max(start + size if start is not None and start < 0 else start or 0, 0), size)
            if name == "slice_scatter":
                rest, inner = self.value(inner, index, conditions), args[1]
            cuts.append((dim, start, start + (1 if name == "select_backward" else fake(inner).shape[dim])))
        if fake(inner).dtype != value.dtype:
            raise CannotWrite("it joins tensors of different types")
        rest = rest or self._constant(fill, node)
        limits: list[str] = []
        for dim, start, end in cuts:
            cut = within(index[dim], start, end, value.shape[dim])
            if cut is None:
                return rest
            index, limits = moved(index, dim, -start), limits + cut
        if name == "select_backward":
            index = (*index[: cuts[0][0]], *index[cuts[0][0] + 1 :])
        found = self.value(inner, index, (*conditions, *limits))
        if not limits:
            return found
        return self._let(f"tl.where({' & '.join(limits)}, {found.text}, {rest.text})", node)
