"""Passes that only take away: constants computed now, common subexpressions, needless copies and views, dead code.
The compiler runs them in this order, before anything is fused."""

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from cumulo.compile.passes.facts import (
    Notes,
    aten_name,
    base_of,
    declined,
    fused,
    is_pure,
    is_static,
    is_view,
    node_bytes,
    tensor,
    tensor_bytes,
)

MOST_CONSTANT_BYTES = 1 << 20  # of one folded constant: a larger one is better computed than kept

_MAKERS = {"arange", "full", "zeros", "ones", "scalar_tensor", "eye", "linspace"}
_LIKE = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "full_like": None, "new_full": None}


USER_OUTPUTS = "cumulo_user_outputs"  # in a module's meta: how many of its outputs the user gets


def returned(graph: Graph) -> set[Node]:
    """The nodes whose memory outlives the graph."""
    output = next(iter(reversed(graph.nodes)))
    return {base_of(node) for node in output.all_input_nodes}


def user_gets(module: GraphModule) -> set[Node]:
    """The nodes whose memory the user gets and may write to. What a forward graph saves for its backward graph is
    read alone."""
    output = next(iter(reversed(module.graph.nodes)))
    values = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    seen = values[: module.meta.get(USER_OUTPUTS, len(values))]
    return {base_of(node) for node in seen if isinstance(node, Node)}


def written(graph: Graph) -> set[Node]:
    """The nodes whose memory an operation of the graph writes to; what is not an operation may write to all."""
    nodes: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            schema = getattr(node.target, "_schema", None)
            if (schema is not None and schema.is_mutable) or not isinstance(
                node.target, torch._ops.OpOverload
            ):
                nodes.update(base_of(one) for one in node.all_input_nodes)
    return nodes


def fold_constants(module: GraphModule, notes: Notes) -> GraphModule:
    """What depends on no input is computed once, now. The makers of filled tensors become aten.full."""
    graph, result = module.graph, user_gets(module)
    known: dict[Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        value = tensor(node)
        if value is None or not is_pure(node) or not is_static(value):
            continue
        name = aten_name(node)
        if name in _LIKE and node not in result:
            fill = _LIKE[name]
            if fill is None:
                fill = node.args[-1]
            if isinstance(fill, Node):
                continue
            with graph.inserting_before(node):
                filled = graph.call_function(
                    torch.ops.aten.full.default,
                    (list(value.shape), fill),
                    {"dtype": value.dtype, "device": value.device},
                )
            if value.is_contiguous():
                filled.meta = dict(node.meta)
                node.replace_all_uses_with(filled)
                graph.erase_node(node)
                node, name = filled, "full"
            else:
                graph.erase_node(filled)
        inputs = node.all_input_nodes
        if not (name in _MAKERS and not inputs) and not (inputs and all(one in known for one in inputs)):
            continue
        if value.numel() * value.element_size() > MOST_CONSTANT_BYTES:
            if name not in _MAKERS:
                declined(
                    notes, [node], f"its constant value would be larger than {MOST_CONSTANT_BYTES >> 20} MiB"
                )
            continue
        with _disable_current_modes(), torch.no_grad():
            real = pytree.tree_map(
                lambda one: known.get(one, one) if isinstance(one, Node) else one, [*node.args]
            )
            known[node] = node.target(*real, **node.kwargs)

    def is_read(node: Node) -> bool:
        return any(user not in known for user in node.users)

    for node, constant in known.items():
        is_source = not node.all_input_nodes and aten_name(node) != "arange"
        if is_source or not is_read(node) or (is_view(node) and is_read(base_of(node))):
            continue
        if base_of(node) in result:
            declined(notes, [node], "its value is constant, but the caller may write to what is returned")
            continue
        if tuple(constant.stride()) != _stride(node):
            continue
        name = f"_constant_{node.name}"
        module.register_buffer(name, constant)
        with graph.inserting_before(node):
            held = graph.get_attr(name)
        held.meta = dict(node.meta)
        fused(notes, "constant", _ancestors(node), sum(map(node_bytes, _ancestors(node))))
        node.replace_all_uses_with(held)
    return module


def _stride(node: Node) -> tuple[int, ...]:
    value = tensor(node)
    assert value is not None
    return tuple(value.stride())


def _ancestors(node: Node) -> list[Node]:
    """The node after everything it is computed from."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        one = stack.pop()
        if one not in found:
            found[one] = None
            stack += one.all_input_nodes
    return sorted(found)


def common_subexpressions(module: GraphModule, notes: Notes) -> GraphModule:
    """The second of two equal operations on equal arguments goes."""
    graph = module.graph
    result, touched = user_gets(module), written(graph)
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node):
            continue
        if any(base_of(one) in touched for one in node.all_input_nodes) or node in touched:
            continue
        flat, shape = pytree.tree_flatten((node.args, node.kwargs))
        try:
            key = (node.target, shape, tuple((type(one), one) for one in flat))
            first = seen.setdefault(key, node)
        except TypeError:  # an argument without a hash
            continue
        if first is node:
            continue
        if not is_view(node) and first in result and node in result:
            declined(
                notes, [first, node], "equal values, but both are returned and the caller may write to one"
            )
            continue
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        if not is_view(first):
            fused(notes, "common subexpression", [first], _traffic(first))
            result.update({first} if node in result else ())
    return module


def _traffic(node: Node) -> int:
    return node_bytes(node) + sum(map(node_bytes, node.all_input_nodes))


def drop_copies(module: GraphModule, notes: Notes) -> GraphModule:
    """Copies whose original would do, multiplications by one, and views that show what was there before."""
    graph = module.graph
    result, touched = returned(graph), written(graph)
    outputs = set(next(iter(reversed(graph.nodes))).all_input_nodes)
    for node in list(graph.nodes):
        value = tensor(node)
        if value is None or node.op != "call_function" or not is_pure(node) or not is_static(value):
            continue
        if is_view(node):
            source = _same_view(node, value)
            if source is not None and node not in outputs:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            continue
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        before = tensor(source)
        if source is None or before is None or not _keeps_values(node):
            continue
        if before.dtype != value.dtype or before.device != value.device or before.shape != value.shape:
            continue
        if before.stride() != value.stride():
            continue  # a change of layout is work, which a group may do while it computes
        if node in result:
            declined(notes, [node], "a copy that is returned, so that the caller may write to it")
        elif base_of(source) in touched or node in touched:
            declined(notes, [node], "a copy of what is written to later")
        else:
            fused(notes, "needless copy", [node], node_bytes(node) + tensor_bytes(before))
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    return module


def _same_view(node: Node, value: torch.Tensor) -> Node | None:
    """The first node of a chain of views that shows the same elements in the same order."""
    found, source = None, node
    while is_view(source) and isinstance(source.args[0], Node):
        source = source.args[0]
        before = tensor(source)
        if before is None:
            continue
        same = before.shape == value.shape and before.stride() == value.stride()
        if same and before.dtype == value.dtype and before.storage_offset() == value.storage_offset():
            found = source
    return found


def _keeps_values(node: Node) -> bool:
    name, rest = aten_name(node), node.args[1:]
    if name in ("clone", "_to_copy", "contiguous"):
        return True
    one = rest[0] if rest else None
    exact = isinstance(one, (int, float)) and one == 1
    if name in ("mul", "div") and len(rest) == 1 and exact and not node.kwargs:
        return True
    if name == "pow" and exact:
        return True
    value = tensor(node)
    integer = value is not None and not value.dtype.is_floating_point and not value.dtype.is_complex
    return name in ("add", "sub") and integer and isinstance(one, int) and one == 0  # -0.0 + 0 is 0.0


def remove_dead(module: GraphModule, notes: Notes) -> GraphModule:
    """What nobody reads goes, unless it can be noticed."""
    for node in reversed(list(module.graph.nodes)):
        if not node.users and (is_pure(node) or node.op == "get_attr"):
            if not is_view(node) and node.op != "get_attr":
                fused(notes, "dead code", [node], node_bytes(node))
            module.graph.erase_node(node)
    return module
