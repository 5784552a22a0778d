"""The Triton source of a group of operations: one kernel, one readable text. The compiler writes it for every group
before it decides that the group is one.

A kernel computes a tile of rows × columns. `Writer.value` asks backwards from what is stored: the value of an
operation at an index is an expression over its arguments' values at theirs. A view only changes the index; a reduction
needs its whole row in the tile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from cumulo.compile.passes.facts import aten_name, is_result, is_static, is_view, tensor
from cumulo.compile.passes.index import COLUMN, ROW, Form, number, split
from cumulo.compile.passes.operations import (
    POINTWISE,
    TYPES,
    CannotWrite,
    Value,
    literal,
    register,
    rounded,
    write,
)

MOST_COLUMNS = 16384  # of a reduction: its row is one tile
TILE = 1024  # elements of a tile of pointwise work
MOST_POINTERS = 24

REDUCTIONS = {"sum", "mean", "amax", "amin", "_softmax", "_log_softmax", "_softmax_backward_data",
              "_log_softmax_backward_data"}  # fmt: skip
CONSTANTS = {"full", "zeros", "ones", "scalar_tensor"}
INSETS = {"slice_scatter", "constant_pad_nd", "slice_backward", "select_backward"}
FUSABLE = POINTWISE | REDUCTIONS | {"cat", "arange"} | INSETS


@dataclass(frozen=True, slots=True)
class KernelSource:
    text: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    programs: int
    warps: int
    # Inputs that every element's program reads only where it writes: an output may take their memory.
    replaceable: frozenset[Node]


def reduced_dims(node: Node) -> tuple[int, ...]:
    """The dimensions that a reduction takes together, which must be the last ones."""
    value = tensor(node.args[0])
    assert value is not None
    name = aten_name(node)
    if name in ("_softmax", "_log_softmax"):
        given: Any = [node.args[1]]
    elif name.endswith("_backward_data"):
        given = [node.args[2]]
    else:
        given = node.args[1] if len(node.args) > 1 and node.args[1] is not None else []
        given = list(given) or list(range(value.dim()))
    dims = tuple(sorted(dim % value.dim() for dim in given)) if value.dim() else ()
    if dims != tuple(range(value.dim() - len(dims), value.dim())) or not dims:
        raise CannotWrite("it reduces over other than the last dimensions")
    return dims


def keeps_shape(node: Node) -> bool:
    """Whether a reduction gives a number for each element of its row, as softmax does."""
    return aten_name(node).startswith("_")


def write_kernel(
    name: str, nodes: Sequence[Node], outputs: Sequence[Node], columns: int | None
) -> KernelSource:
    """`outputs`: the nodes of the group that others read. `columns`: the row of the group's reductions, if it has
    any. Raises CannotWrite with the reason."""
    tensors = [tensor(node) for node in nodes]
    if any(value is None or not is_static(value) for value in tensors):
        raise CannotWrite("its sizes are known only at run time")
    main = max(outputs, key=lambda node: tensor(node).numel())  # type: ignore[union-attr]
    shape, strides = tuple(tensor(main).shape), tensor(main).stride()  # type: ignore[union-attr]
    if columns is not None:
        for node in nodes:
            value = tensor(node)
            assert value is not None
            if columns > MOST_COLUMNS:
                raise CannotWrite(f"a row of {columns:,} numbers is longer than a tile of {MOST_COLUMNS:,}")
        total = max(tensor(node).numel() for node in nodes)  # type: ignore[union-attr]
        total = max([total, *(tensor(n.args[0]).numel() for n in nodes if aten_name(n) in REDUCTIONS)])  # type: ignore[union-attr]
        return Writer(name, nodes, outputs, ((total // columns,), (columns,)), None, True).source()
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)) if shape else []
    first: KernelSource | None = None
    for inner in range(len(order), 0, -1):
        sizes = tuple(shape[dim] for dim in order)
        writer = Writer(name, nodes, outputs, (sizes[:-inner], sizes[-inner:]), (shape, tuple(order)), False)
        source = writer.source()
        first = first or source
        if not writer.splits_columns:
            return source
    return first or Writer(name, nodes, outputs, ((), (1,)), None, False).source()


@dataclass
class Writer:
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
    known: dict[Any, Value] = field(default_factory=dict)
    reads: dict[Node, set[Form]] = field(default_factory=dict)
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
            value = tensor(node)
            assert value is not None
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
    def _own_index(self, node: Node, value: torch.Tensor) -> tuple[Form, ...]:
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

    def _offset(self, index: Sequence[Form], strides: Sequence[int]) -> Form:
        total = Form()
        for form, stride in zip(index, strides, strict=True):
            total = total + form * stride
        self.splits_columns |= total.splits("y")
        reach = sum(abs(factor) for _, factor in total.terms) * max(self.rows, self.columns) + abs(
            total.constant
        )
        self.wide |= reach >= 1 << 31 and self.rows * self.columns >= 1 << 24
        return total

    def _address(self, offset: Form) -> str:
        text = str(offset)
        return f"({text})" if " " in text else text

    def _mask(self, offset: Form, conditions: Sequence[str], other: str) -> str:
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
            value = tensor(node)
            assert value is not None
            stored.add(self._offset(self._own_index(node, value), value.stride()))
        return frozenset(
            node for node, offsets in self.reads.items() if len(stored) == 1 and offsets == stored
        )

    # -- values ----------------------------------------------------------------------------------------------
    def value(self, node: Node, index: tuple[Form, ...], conditions: tuple[str, ...]) -> Value:
        key = (node, index, conditions)
        if key not in self.known:
            self.known[key] = self._value(node, index, conditions)
        return self.known[key]

    def _value(self, node: Node, index: tuple[Form, ...], conditions: tuple[str, ...]) -> Value:
        value, name = tensor(node), aten_name(node)
        if value is None or not is_static(value):
            raise CannotWrite("it reads what is no tensor of known sizes")
        if value.dtype not in TYPES:
            raise CannotWrite(f"no generated code for {str(value.dtype).removeprefix('torch.')}")
        if name in CONSTANTS and not node.all_input_nodes:
            fill = {
                "full": node.args[-1],
                "zeros": 0,
                "ones": 1,
                "scalar_tensor": node.args[0] if node.args else 0,
            }
            constant = literal(fill[name], value.dtype)
            return self._let(f"tl.full([], {constant}, tl.{register(value.dtype)})", value.dtype, node)
        if is_view(node) and not is_result(node):
            source, moved = seen_through(node, index, self.limits)
            return self.value(source, moved, conditions)
        if node not in self.group:
            return self._load(node, value, index, conditions)
        if name in REDUCTIONS:
            return self._reduction(node, index, conditions)
        if name == "cat":
            return self._cat(node, index, conditions)
        if name in INSETS:
            return self._inset(node, index, conditions)
        if name == "arange":
            start, step = (
                (node.args[0], node.args[2] if len(node.args) > 2 else 1) if len(node.args) > 1 else (0, 1)
            )
            if not isinstance(start, int) or not isinstance(step, int):
                raise CannotWrite("arange of what is no whole number")
            form = index[0] * step + number(start)
            self.splits_columns |= form.splits("y")
            return self._let(rounded(f"({form})" if form.terms else f"tl.full([], {form}, tl.int64)", value.dtype)
                             if not value.dtype.is_floating_point
                             else f"({form}).to(tl.float32)", value.dtype, node)  # fmt: skip

        def argument(one: Any) -> Value | None:
            if not isinstance(one, Node):
                return None
            given = tensor(one)
            if given is None:
                raise CannotWrite("it reads a number that is known only at run time")
            return self.value(one, _broadcast(index, given.shape), conditions)

        return self._let(write(node, argument), value.dtype, node)

    def _let(self, text: str, dtype: torch.dtype, node: Node) -> Value:
        variable = f"v{len(self.lines)}"
        self.lines.append(f"    {variable} = {text}  # {aten_name(node) or node.name}")
        return Value(variable, dtype)

    def _load(
        self, node: Node, value: torch.Tensor, index: tuple[Form, ...], conditions: tuple[str, ...]
    ) -> Value:
        pointer = self.pointers.setdefault(node, f"in{len(self.pointers)}")
        offset = self._offset(index, value.stride())
        self.reads.setdefault(node, set()).add(offset)
        same = (node, offset, conditions)
        if same not in self.known:
            text = (
                f"tl.load({pointer} + {self._address(offset)}{self._mask(offset, conditions, ', other=0')})"
            )
            if register(value.dtype) != TYPES[value.dtype]:
                text += ".to(tl.float32)"
            elif value.dtype == torch.bool:
                text += ".to(tl.int1)"
            variable = f"v{len(self.lines)}"
            self.lines.append(f"    {variable} = {text}")
            self.known[same] = Value(variable, value.dtype)
        return self.known[same]

    def _reduction(self, node: Node, index: tuple[Form, ...], conditions: tuple[str, ...]) -> Value:
        value, name, before = tensor(node), aten_name(node), tensor(node.args[0])
        assert value is not None and before is not None
        dims = reduced_dims(node)
        sizes = [before.shape[dim] for dim in dims]
        if not self.reduces or math.prod(sizes) != self.columns or conditions:
            raise CannotWrite("its rows are not those of the group")
        if keeps_shape(node):
            outer, last = index[:-1], index[-1]
        else:
            keep = value.dim() == before.dim()
            outer, last = index[: before.dim() - len(dims)] if keep else index, None
        if any(form.uses("y") for form in outer) or not before.dtype.is_floating_point:
            raise CannotWrite("its row is not the tile's row, or holds whole numbers")
        if node.kwargs.get("dtype") not in (None, value.dtype) or not value.dtype.is_floating_point:
            raise CannotWrite("a reduction to another type")
        row = (*outer, *split(COLUMN, tuple(sizes), self.limits))
        if last is not None and last != row[-1]:
            raise CannotWrite("its row is not the tile's row")
        a = self.value(node.args[0], row, ())  # type: ignore[arg-type]
        out = value.dtype
        if name in ("sum", "mean"):
            text = self._over("sum", a.text, "0.0")
            text = text if name == "sum" else f"({text} / {self.columns})"
            return self._let(rounded(text, out), out, node)
        if name in ("amax", "amin"):
            return self._let(rounded(self._extreme(a.text, name), out), out, node)
        if name in ("_softmax", "_log_softmax"):
            most = self._let(self._extreme(a.text, "amax"), torch.float32, node)
            shifted = self._let(f"{a.text} - {most.text}", torch.float32, node)
            power = self._let(f"tl.exp({shifted.text})", torch.float32, node)
            total = self._let(self._over("sum", power.text, "0.0"), torch.float32, node)
            text = (
                f"{power.text} / {total.text}"
                if name == "_softmax"
                else f"{shifted.text} - tl.log({total.text})"
            )
            return self._let(rounded(text, out), out, node)
        given = tensor(node.args[1])
        assert given is not None
        b = self.value(node.args[1], row, ())  # type: ignore[arg-type]
        if name == "_softmax_backward_data":
            product = self._let(f"{a.text} * {b.text}", torch.float32, node)
            total = self._let(self._over("sum", product.text, "0.0"), torch.float32, node)
            return self._let(rounded(f"{product.text} - {b.text} * {total.text}", out), out, node)
        total = self._let(self._over("sum", a.text, "0.0"), torch.float32, node)
        return self._let(rounded(f"{a.text} - tl.exp({b.text}) * {total.text}", out), out, node)

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

    def _cat(self, node: Node, index: tuple[Form, ...], conditions: tuple[str, ...]) -> Value:
        value = tensor(node)
        assert value is not None
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % value.dim()  # type: ignore[operator]
        pieces = [one for one in node.args[0] if tensor(one).shape != (0,)]  # type: ignore[union-attr]
        for one in reversed(pieces):
            piece = tensor(one)
            assert piece is not None
            if piece.dtype != value.dtype:
                raise CannotWrite("it joins tensors of different types")
        sizes = [tensor(one).shape[dim] for one in pieces]  # type: ignore[union-attr]
        begin, text = sum(sizes), ""
        for one, size in zip(reversed(pieces), reversed(sizes), strict=True):
            begin -= size
            within = _within(index[dim], begin, begin + size, value.shape[dim])
            if within is None:
                continue
            moved = (*index[:dim], index[dim] + number(-begin), *index[dim + 1 :])
            found = self.value(one, moved, (*conditions, *within))
            if not within:
                return found
            text = f"tl.where({' & '.join(within)}, {found.text}, {text})" if text else found.text
        return self._let(text, value.dtype, node)

    def _inset(self, node: Node, index: tuple[Form, ...], conditions: tuple[str, ...]) -> Value:
        """A tensor written into a part of another one, or of a constant."""
        value = tensor(node)
        assert value is not None
        name, fill, inner, rest = aten_name(node), 0, node.args[0], None
        moved, within, cuts = list(index), [], []
        if name == "constant_pad_nd":
            padding = list(node.args[1])  # type: ignore[arg-type]
            fill = node.args[2] if len(node.args) > 2 else 0
            if min(padding) < 0:
                raise CannotWrite("negative padding")
            for place in range(len(padding) // 2):
                dim = value.dim() - 1 - place
                cuts.append((dim, padding[2 * place], value.shape[dim] - padding[2 * place + 1]))
        else:
            dim, start, *more = node.args[2:] if len(node.args) > 3 else (*node.args[2:], 0, None)
            dim, size = dim % value.dim(), value.shape[dim]
            if len(more) > 1 and more[1] != 1:
                raise CannotWrite(f"{name} with a step")
            start = min(max(start + size if start is not None and start < 0 else start or 0, 0), size)
            if name == "slice_scatter":
                rest, inner = self.value(inner, index, conditions), node.args[1]  # type: ignore[arg-type]
            length = 1 if name == "select_backward" else tensor(inner).shape[dim]  # type: ignore[union-attr]
            cuts.append((dim, start, start + length))
        if rest is None:
            constant = f"tl.full([], {literal(fill, value.dtype)}, tl.{register(value.dtype)})"
            rest = self._let(constant, value.dtype, node)
        given = tensor(inner)
        if given is None or given.dtype != value.dtype:
            raise CannotWrite("it joins tensors of different types")
        for dim, start, end in cuts:
            moved[dim] = index[dim] + number(-start)
            cut = _within(index[dim], start, end, value.shape[dim])
            if cut is None:
                return rest
            within += cut
        if name == "select_backward":
            del moved[cuts[0][0]]
        found = self.value(inner, tuple(moved), (*conditions, *within))  # type: ignore[arg-type]
        if not within:
            return found
        return self._let(f"tl.where({' & '.join(within)}, {found.text}, {rest.text})", value.dtype, node)


def _within(form: Form, start: int, end: int, size: int) -> list[str] | None:
    """The conditions under which start <= form < end; none where it always is, None where it never is."""
    if not form.terms:
        return [] if start <= form.constant < end else None
    return [f"({form} >= {start})"] * (start > 0) + [f"({form} < {end})"] * (end < size)


def _broadcast(index: tuple[Form, ...], shape: Sequence[int]) -> tuple[Form, ...]:
    """The index in an argument of this shape."""
    kept = index[len(index) - len(shape) :] if len(shape) else ()
    return tuple(number(0) if size == 1 else form for form, size in zip(kept, shape, strict=True))


def seen_through(
    view: Node, index: tuple[Form, ...], limits: dict[str, int]
) -> tuple[Node, tuple[Form, ...]]:
    """Which element of its source a view shows at this index."""
    source, name, args = view.args[0], aten_name(view), view.args
    assert isinstance(source, Node)
    if not name:  # a piece of a split
        place, whole = args[1], source.args[0]
        assert isinstance(place, int) and isinstance(whole, Node)
        before, kind = tensor(whole), aten_name(source)
        pieces = source.meta["val"]
        if before is None or not is_view(source):
            raise CannotWrite("it reads one of several results")
        dim = (
            (source.args[1] if kind == "unbind" else source.args[2])
            if len(source.args) > (kind != "unbind") + 1
            else 0
        )
        dim = dim % before.dim()  # type: ignore[operator]
        if kind == "unbind":
            return whole, (*index[:dim], number(place), *index[dim:])
        start = sum(piece.shape[dim] for piece in pieces[:place])
        return whole, (*index[:dim], index[dim] + number(start), *index[dim + 1 :])
    value, before = tensor(view), tensor(source)
    if value is None or before is None or not is_static(before):
        raise CannotWrite("it reads a view of unknown sizes")
    shape, dims = value.shape, before.dim()
    if name in ("detach", "alias"):
        return source, index
    if name in ("view", "_unsafe_view"):
        if value.dtype != before.dtype:
            raise CannotWrite("it reads bits as another type")
        total, step = Form(), 1
        for form, size in zip(reversed(index), reversed(shape), strict=True):
            total, step = total + form * step, step * size
        return source, split(total, tuple(before.shape), limits)
    if name in ("permute", "transpose", "t"):
        order = list(range(dims))
        if name == "permute":
            order = [dim % dims for dim in args[1]]  # type: ignore[union-attr, operator]
        elif dims > 1:
            one, two = (args[1] % dims, args[2] % dims) if name == "transpose" else (0, 1)  # type: ignore[operator]
            order[one], order[two] = order[two], order[one]
        moved = dict(zip(order, index, strict=True))
        return source, tuple(moved[dim] for dim in range(dims))
    if name == "expand":
        return source, _broadcast(index, before.shape)
    if name in ("unsqueeze", "squeeze"):
        forms = iter(form for form, size in zip(index, shape, strict=True) if size != 1)
        return source, tuple(number(0) if size == 1 else next(forms) for size in before.shape)
    if name in ("slice", "select"):
        dim = (args[1] if len(args) > 1 else 0) % dims  # type: ignore[operator]
        size, start = before.shape[dim], args[2] if len(args) > 2 and args[2] is not None else 0
        if not isinstance(start, int):
            raise CannotWrite("it reads a part that is known only at run time")
        start = min(max(start + size if start < 0 else start, 0), size)
        if name == "select":
            return source, (*index[:dim], number(start), *index[dim:])
        step = args[4] if len(args) > 4 else 1
        return source, (*index[:dim], index[dim] * step + number(start), *index[dim + 1 :])  # type: ignore[operator]
    raise CannotWrite(f"it reads through {name}")
