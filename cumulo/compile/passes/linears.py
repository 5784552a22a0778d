"""The pass that makes one product of several of one input: query, key and value; gate and up. It keeps a joined
copy of their weights, so the user must say that these do not change: options={"freeze": True}."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from cumulo.base.quantities import quantity
from cumulo.compile.passes.facts import IS_KEPT, Notes, aten_name, declined, fake, fused, node_bytes, tensor

FROZEN = "cumulo_frozen"  # in a module's meta: the names of the inputs that never change


def join_linears(module: GraphModule, notes: Notes) -> GraphModule:
    products: dict[Node, list[Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if aten_name(node) == "mm" and _weight(node) is not None:
            products[node.args[0]].append(node)
    frozen = module.meta.get(FROZEN, ())
    chosen = []
    for several in products.values():
        weights = [_weight(one) for one in several]
        if len(several) > 1 and all(one is not None and one.name in frozen for one in weights):
            chosen.append(several)
        elif len(several) > 1:
            size = quantity(sum(node_bytes(one) for one in weights if one is not None), "B")
            why = f"joining {len(several)} products of one input needs options={{'freeze': True}} and {size}"
            declined(notes, several, why)
    if not chosen:
        return module
    try:
        changed = _joined(module, chosen)
    except (RuntimeError, ValueError) as reason:
        for several in chosen:
            declined(notes, several, f"their parts of one product do not fit what reads them: {reason}")
        return module
    for several in chosen:
        fused(notes, "linears of one input", several, (len(several) - 1) * node_bytes(several[0].args[0]))  # type: ignore[arg-type]
    return changed


def _weight(product: Node) -> Node | None:
    """The input W of x Wᵀ."""
    turned = product.args[1]
    if isinstance(turned, Node) and aten_name(turned) == "t" and isinstance(turned.args[0], Node):
        weight = turned.args[0]
        value = tensor(weight)
        return weight if weight.op == "placeholder" and value is not None and value.is_contiguous() else None
    return None


def _joined(module: GraphModule, chosen: list[list[Node]]) -> GraphModule:
    """A copy of the module with the products joined. Raises where a view of a part is impossible, or a result would
    lie otherwise in memory than the caller expects."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    changed = GraphModule(module, graph)
    changed.meta = dict(module.meta)
    for several in chosen:
        first = copies[several[0]]
        weights = tuple(copies[weight] for one in several if (weight := _weight(one)) is not None)
        with graph.inserting_before(first):
            held = graph.call_function(_keep_joined(), weights)
            turned = graph.call_function(torch.ops.aten.t.default, (held,))
            whole = graph.call_function(torch.ops.aten.mm.default, (first.args[0], turned))
            start = 0
            for one, weight in zip(several, weights, strict=True):
                end = start + weight.meta["val"].shape[0]
                part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, 1, start, end))
                copies[one].replace_all_uses_with(part)
                start = end
        for node in (held, turned, whole):
            node.meta = {"stack_trace": first.meta.get("stack_trace"), IS_KEPT: node is held}
        for one in several:
            graph.erase_node(copies[one])
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    results = [one for one in module.graph.output_node().all_input_nodes if tensor(one) is not None]
    before = [(fake(node).shape, fake(node).stride()) for node in results]
    FakeTensorProp(changed, detect_fake_mode(inputs)).propagate_dont_convert_inputs(*inputs)
    after = [(fake(copies[node]).shape, fake(copies[node]).stride()) for node in results]
    if before != after:
        raise ValueError("a result would lie otherwise in memory")
    return changed


def _keep_joined() -> Callable[..., Tensor]:
    kept: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def joined_weights(*weights: Tensor) -> Tensor:
        """The weights below each other, joined when they are first seen. They are held, so that no others can take
        their place in memory."""
        if isinstance(weights[0], FakeTensor):
            return torch.cat(weights)  # its shape is asked for
        if not kept or [one.data_ptr() for one in kept[0][0]] != [one.data_ptr() for one in weights]:
            kept[:] = [(weights, torch.cat(weights))]
        return kept[0][1]

    return joined_weights
