"""Which operations become one kernel: groups that grow along the graph, from producer to consumer, as long as
nothing outside lies between them. The compiler calls `find_groups` once per graph, after the other passes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from cumulo.compile.passes.facts import (
    IS_KEPT,
    Notes,
    aten_name,
    base_of,
    declined,
    fake,
    fused,
    is_view,
    node_bytes,
    shown_tensor,
    tensor,
)
from cumulo.compile.passes.kernel_source import MOST_COLUMNS, KernelSource, write_kernel
from cumulo.compile.passes.operations import (
    FUSABLE,
    INSETS,
    REDUCTIONS,
    TYPES,
    CannotWrite,
    is_constant,
    reduced_dims,
)

MOST_NODES = 60


@dataclass(frozen=True, slots=True)
class FusedGroup:
    """Nodes that one kernel computes; `source` is named KERNEL until the compiler names it."""

    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]  # what others read
    source: KernelSource
    traffic_bytes: int


@dataclass(eq=False, slots=True)
class _Unit:
    """A group that grows, or a node that joins none: then it has no elements."""

    nodes: list[Node]
    elements: int | None  # of its largest tensors
    columns: int | None  # of the rows that it reduces
    bits: int  # its own, one for each unit that went into it
    before: int = 0  # the bits of all that must run first


def find_groups(module: GraphModule, notes: Notes) -> list[FusedGroup]:
    growing = _Growing()
    for node in module.graph.nodes:
        if not is_view(node) and not is_constant(node):
            growing.add(node, _why_not(node), notes)
    groups: list[FusedGroup] = []
    for unit in growing.units:
        if unit.elements is not None:
            groups += _written(sorted(unit.nodes), unit.columns, notes)
    return groups


class _Growing:
    def __init__(self) -> None:
        self.units: list[_Unit] = []
        self._unit_of: dict[Node, _Unit] = {}
        self._made = 0

    def add(self, node: Node, why_not: str | None, notes: Notes) -> None:
        """To the last of its producers' groups that it fits; the others that fit are merged with it."""
        producers = {id(unit): unit for one in _producers(node) if (unit := self._unit_of.get(one))}
        nearest = sorted(producers.values(), key=lambda unit: unit.bits, reverse=True)
        home = None
        if why_not is None:
            home = next(
                (unit for unit in nearest if _fits(unit, node) and self._may_join(unit, nearest)), None
            )
        elif why_not:
            declined(notes, [node], why_not)
        if home is None:
            columns = _columns(node) if why_not is None else None
            home = _Unit([node], _elements(node) if why_not is None else None, columns, 1 << self._made)
            self._made += 1
            self.units.append(home)
        else:
            home.nodes.append(node)
            home.columns = home.columns or _columns(node)
        self._unit_of[node] = home
        self._run_after(home, nearest)
        for other in nearest:
            if other is home or home.elements is None:
                continue
            if self._may_merge(home, other) or self._may_absorb(home, other, node):
                self._merge(home, other)

    def _may_join(self, unit: _Unit, producers: Sequence[_Unit]) -> bool:
        """Not where another producer needs the group first: the kernel would wait for itself."""
        return not any(one.before & unit.bits for one in producers if one is not unit)

    def _run_after(self, unit: _Unit, producers: Iterable[_Unit]) -> None:
        for one in producers:
            unit.before |= one.before | one.bits
        unit.before &= ~unit.bits
        for later in self.units:
            if later.before & unit.bits:
                later.before |= unit.before

    def _may_merge(self, one: _Unit, other: _Unit) -> bool:
        columns = one.columns or other.columns
        if other.elements != one.elements or columns != (other.columns or columns):
            return False
        nodes = (*one.nodes, *other.nodes)
        if len(nodes) > MOST_NODES or (
            columns and not all(_is_in_rows(node, columns, one.elements) for node in nodes)
        ):
            return False
        if fake(one.nodes[0]).device != fake(other.nodes[0]).device:
            return False
        return not self._is_between(one, other)

    def _may_absorb(self, one: _Unit, other: _Unit, node: Node) -> bool:
        """Whether what is computed for a piece of `node` alone may be computed in its place."""
        if aten_name(node) not in {"cat", *INSETS} or other.elements is None or other.columns is not None:
            return False
        inside = {*one.nodes, *other.nodes}
        if len(inside) > MOST_NODES or not all(_is_read_inside(each, inside) for each in other.nodes):
            return False
        return not self._is_between(one, other)

    def _is_between(self, one: _Unit, other: _Unit) -> bool:
        """Whether something else runs after one of them and before the other."""
        return any(
            (between.before & one.bits and other.before & between.bits)
            or (between.before & other.bits and one.before & between.bits)
            for between in self.units
            if between is not one and between is not other
        )

    def _merge(self, one: _Unit, other: _Unit) -> None:
        one.nodes += other.nodes
        one.columns = one.columns or other.columns
        one.bits |= other.bits
        one.before = (one.before | other.before) & ~one.bits
        for node in other.nodes:
            self._unit_of[node] = one
        self.units.remove(other)
        for later in self.units:
            if later is not one and later.before & one.bits:
                later.before |= one.before | one.bits


def _producers(node: Node) -> list[Node]:
    return [base_of(one) for one in node.all_input_nodes]


def _why_not(node: Node) -> str | None:
    """Why a node joins no group; None where it may, "" where nothing need be said."""
    name, value = aten_name(node), tensor(node)
    if node.op != "call_function" or (value is None and not name) or node.meta.get(IS_KEPT):
        return ""
    if name not in FUSABLE or value is None:
        called = getattr(node.target, "__name__", "") if callable(node.target) else ""
        return (
            f"{name} is a library's kernel" if name else f"{called or node.target} is an operation of its own"
        )
    inputs = [tensor(one) for one in node.all_input_nodes]
    if any(one is None for one in inputs):
        return "it reads a number that is known only at run time"
    for one in (value, *inputs):
        assert one is not None
        if not all(isinstance(size, int) for size in one.shape):
            return "its sizes are known only at run time"
        if one.dtype not in TYPES:
            return f"there is no generated code for {str(one.dtype).removeprefix('torch.')}"
        if one.device != value.device:
            return "its tensors are on different devices"
    if value.numel() == 0 or _elements(node) == 0:
        return "it is empty"
    if name in REDUCTIONS:
        try:
            columns = _columns(node)
        except CannotWrite as reason:
            return str(reason)
        if columns is not None and columns > MOST_COLUMNS:
            return f"a row of {columns:,} numbers is longer than a tile of {MOST_COLUMNS:,}"
    return None


def _columns(node: Node) -> int | None:
    if aten_name(node) not in REDUCTIONS:
        return None
    before = fake(node.args[0])
    return math.prod(before.shape[dim] for dim in reduced_dims(node))


def _elements(node: Node) -> int:
    """The elements of its largest tensor: a reduction is as large as what it reads."""
    return fake(node.args[0] if aten_name(node) in REDUCTIONS else node).numel()


def _fits(unit: _Unit, node: Node) -> bool:
    """Whether the node runs over the rows and columns of the group."""
    value, columns = fake(node), _columns(node)
    if unit.elements is None or len(unit.nodes) >= MOST_NODES:
        return False
    if fake(unit.nodes[0]).device != value.device:
        return False
    if columns is not None:
        known = columns == (unit.columns or columns) and _elements(node) == unit.elements
        return known and all(_is_in_rows(one, columns, unit.elements) for one in unit.nodes)
    if value.numel() == unit.elements:
        return unit.columns is None or _is_in_rows(node, unit.columns, unit.elements)
    # A number for each row, such as the root of its mean.
    return unit.columns is not None and value.numel() == unit.elements // unit.columns


def _is_in_rows(node: Node, columns: int, elements: int | None) -> bool:
    """Whether the last dimensions of a full tensor make up rows of this length; numbers of whole rows always do."""
    value = fake(node)
    if aten_name(node) in REDUCTIONS or value.numel() != elements:
        return True
    size = 1
    for one in reversed(value.shape):
        if size >= columns:
            break
        size *= one
    return size == columns


def _written(nodes: Sequence[Node], columns: int | None, notes: Notes) -> list[FusedGroup]:
    """The group, or the parts of it that can be written."""
    if len(nodes) == 1:
        declined(notes, nodes, "it stands alone: nothing next to it runs over the same elements")
        return []
    outputs = outputs_of(nodes)
    has_rows = any(aten_name(node) in REDUCTIONS for node in nodes)
    try:
        source = write_kernel("KERNEL", nodes, outputs, columns if has_rows else None)
    except CannotWrite as reason:
        half = len(nodes) // 2
        declined(notes, nodes, f"not one kernel: {reason}")
        return _written(nodes[:half], columns, notes) + _written(nodes[half:], columns, notes)
    traffic = sum(map(node_bytes, outputs)) + sum(_read_bytes(one, nodes) for one in source.inputs)
    fused(notes, pattern_name(nodes), nodes, sum(map(_traffic, nodes)) - traffic)
    return [FusedGroup(tuple(nodes), outputs, source, traffic)]


def outputs_of(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """What is read outside, itself or through views."""
    inside = set(nodes)
    return tuple(node for node in nodes if not _is_read_inside(node, inside))


def _is_read_inside(node: Node, inside: set[Node]) -> bool:
    """Whether all that reads it, itself or through views, is among these."""
    return all(_is_read_inside(user, inside) if is_view(user) else user in inside for user in node.users)


def _read_bytes(base: Node, nodes: Sequence[Node]) -> int:
    """What a kernel reads of a tensor: all of it, or the parts that views show."""
    parts = {one for node in nodes for one in node.all_input_nodes if shown_tensor(one) is base}
    return min(node_bytes(base), sum(map(node_bytes, parts)))


def _traffic(node: Node) -> int:
    return node_bytes(node) + sum(map(node_bytes, node.all_input_nodes))


def pattern_name(nodes: Sequence[Node]) -> str:
    """What people call such a group."""
    names = {aten_name(node) for node in nodes}
    parts = []
    if ("neg" in names and names & {"cat", *INSETS}) or "roll" in names:
        parts.append("rotary")
    if names & {"silu", "silu_backward"} and "mul" in names:
        parts.append("SwiGLU")
    elif names & {"relu", "gelu", "silu", "tanh", "sigmoid"} and "add" in names and not names & REDUCTIONS:
        parts.append("bias + activation")
    if "mean" in names and "rsqrt" in names:
        first = next(node for node in nodes if aten_name(node) == "mean")
        early = {aten_name(node) for node in nodes if node < first}
        parts.append("residual + norm" if "add" in early else "norm")
    elif names & {"_softmax", "_log_softmax", "amax"}:
        parts.append("softmax")
    elif names & REDUCTIONS:
        parts.append("rows")
    return ", ".join(parts) or "pointwise"
