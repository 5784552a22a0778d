"""What a pass tells: what it fused and what it declined, each with the reason and the user's line. Every pass
appends to the notes of its graph; the report prints them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True, slots=True)
class Fused:
    """`nodes` became one kernel, or fewer operations."""

    pattern: str
    nodes: tuple[str, ...]
    bytes_saved: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class Declined:
    """`nodes` stay as they are."""

    nodes: tuple[str, ...]
    why: str
    line: str = ""


Notes = list[Fused | Declined]
IS_KEPT = "cumulo_is_kept"  # in a node's meta: its value is there from call to call and moves nothing


def fused(notes: Notes, pattern: str, nodes: Sequence[Node], bytes_saved: int) -> None:
    notes.append(Fused(pattern, tuple(node.name for node in nodes), bytes_saved, user_line(nodes)))


def declined(notes: Notes, nodes: Sequence[Node], why: str) -> None:
    notes.append(Declined(tuple(node.name for node in nodes), why, user_line(nodes)))


def user_line(nodes: Sequence[Node]) -> str:
    """file:line of the Python line that made the last of these nodes which knows it."""
    for node in reversed(nodes):
        lines = [one.strip() for one in (node.meta.get("stack_trace") or "").splitlines()]
        frames = [one for one in lines if one.startswith('File "') and ", line " in one]
        if frames:
            path, _, rest = frames[-1].removeprefix('File "').partition('", line ')
            return f"{path}:{rest.partition(',')[0]}"
    return ""


# -- what a node's value is --------------------------------------------------------------------------------------
def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node's value; None where the value is none, or several."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def fake(node: Any) -> torch.Tensor:
    """The fake tensor of what is known to be one."""
    value = tensor(node)
    assert value is not None, node
    return value


def is_static(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset()))


def node_bytes(node: Node) -> int:
    """Bytes of a node's tensors, each element once; a symbolic size counts as the one it was first seen with."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(tensor_bytes(one) for one in values if isinstance(one, torch.Tensor))


def tensor_bytes(value: torch.Tensor) -> int:
    total = value.element_size()
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if isinstance(stride, int) and stride == 0:
            continue  # expanded: the same element again
        total *= hint(size)
    return total


def hint(size: Any) -> int:
    """A size as a number."""
    if isinstance(size, int):
        return size
    known = getattr(size.node, "hint", None)
    return int(known) if known is not None else 1


def argument_of(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


_VIEWS = {
    "view", "_unsafe_view", "permute", "transpose", "t", "slice", "select", "expand", "unsqueeze", "squeeze",
    "split", "split_with_sizes", "detach", "alias", "unbind", "as_strided", "diagonal", "unfold", "view_as_real",
    "view_as_complex",
}  # fmt: skip


def aten_name(node: Node) -> str:
    """ "add" of aten.add.Tensor; empty for everything that is not aten's."""
    target = node.target
    if (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
    ):
        return target._schema.name.removeprefix("aten::")
    return ""


def is_view(node: Node) -> bool:
    """Whether the value shares its first argument's memory and nothing is computed."""
    if node.op != "call_function":
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return isinstance(node.args[0], Node) and isinstance(node.args[0].meta.get("val"), (list, tuple))
    return aten_name(node) in _VIEWS


def base_of(node: Node) -> Node:
    """The node that owns the memory which a view shows."""
    while is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def shown_tensor(node: Node) -> Node:
    """The node whose value a view shows: base_of, but one of several results stays itself."""
    while is_view(node) and isinstance(node.args[0], Node) and not is_result(node):
        node = node.args[0]
    return node


def is_result(node: Node) -> bool:
    """Whether it is one of an operation's several results."""
    source = node.args[0] if node.args else None
    return not aten_name(node) and is_view(node) and isinstance(source, Node) and not is_view(source)


def is_pure(node: Node) -> bool:
    """Whether leaving it out, or computing it once instead of twice, cannot be noticed."""
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    known = target.namespace in ("aten", "prims", "cumulo")
    return known and not random and not target._schema.is_mutable
