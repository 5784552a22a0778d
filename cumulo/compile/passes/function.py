"""One flat Python function for a graph: its kernels and library calls in order, each tensor deleted after its last
use. The compiler calls `order_steps`, then `write_function`.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cumulo.compile.passes.facts import base_of, fake, is_result, is_static, is_view, shown_tensor, tensor
from cumulo.compile.passes.groups import FusedGroup
from cumulo.compile.passes.memory import BufferPlan, GraphStep


def order_steps(module: GraphModule, groups: Sequence[FusedGroup]) -> list[GraphStep]:
    """Groups and single nodes in an order in which all that a step reads is there, without what nobody reads."""
    of_node = {node: group for group in groups for node in group.nodes}
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    steps: dict[Any, GraphStep] = {}
    output = next(iter(reversed(module.graph.nodes)))
    wanted = [*output.all_input_nodes, *(n for n in places if n.op == "call_function" and _is_noticed(n))]
    while wanted:
        node = wanted.pop()
        group = of_node.get(node)
        key = group or node
        if key in steps or node.op == "placeholder":
            continue
        if group is not None:
            steps[key] = GraphStep(group.outputs, group.source.inputs, group)
        else:
            steps[key] = GraphStep(
                (node,), (shown_tensor(node),) if is_shortcut(node) else tuple(node.all_input_nodes)
            )
        wanted += steps[key].reads
    maker = {node: key for key, step in steps.items() for node in step.nodes}
    waits = {key: {maker[node] for node in step.reads if node in maker} for key, step in steps.items()}
    # Operations that can be noticed keep their order among each other, and towards what reads the same tensors.
    noticed = [key for key in steps if isinstance(key, Node) and _is_noticed(key)]
    noticed.sort(key=lambda node: places[node])
    for first, second in pairwise(noticed):
        waits[second].add(first)
    for node in noticed:
        touched = {base_of(one) for one in node.all_input_nodes}
        for key, step in steps.items():
            if key is not node and touched & {base_of(one) for one in (*step.reads, *step.nodes)}:
                earlier = max(places[one] for one in step.nodes) < places[node]
                waits[node if earlier else key].add(key if earlier else node)
    followers: dict[Any, list[Any]] = defaultdict(list)
    for key, needed in waits.items():
        for one in needed:
            followers[one].append(key)
    ready = [
        (max(places[node] for node in steps[key].nodes), key) for key, needed in waits.items() if not needed
    ]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, key = heapq.heappop(ready)
        ordered.append(steps[key])
        for one in followers[key]:
            waits[one].discard(key)
            if not waits[one]:
                heapq.heappush(ready, (max(places[node] for node in steps[one].nodes), one))
    if len(ordered) != len(steps):
        raise RuntimeError(
            "the groups of a graph wait for each other: a fault of cumulo.compile.passes.groups"
        )
    return ordered


def is_shortcut(node: Node) -> bool:
    """Whether a view, or a view of views, is made from its memory in one call."""
    if not is_view(node) or is_result(node) or "g_view" not in _allocators():
        return False
    source, shown, base = tensor(node.args[0]), tensor(node), shown_tensor(node)
    memory = tensor(base)
    if source is None or shown is None or memory is None or base.op == "get_attr":
        return False
    same = memory.dtype == shown.dtype and not shown.is_complex()
    return same and is_static(shown) and is_static(memory)


def _is_noticed(node: Node) -> bool:
    """Whether it does more than give a value: writes, draws random numbers, or is nobody's known operation."""
    target = node.target
    if getattr(target, "__name__", "") == "getitem" or getattr(target, "__module__", "") == "_operator":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True
    random = torch.Tag.nondeterministic_seeded in target.tags
    return random or target._schema.is_mutable or not target._schema.returns


Launcher = Callable[..., Any]


def write_function(
    module: GraphModule,
    steps: Sequence[GraphStep],
    plan: BufferPlan,
    launchers: dict[FusedGroup, tuple[str, Launcher, bool]],
) -> tuple[Callable[[list[Any]], Any], str]:
    """The function, which takes the list of its arguments and empties it, and its text. `launchers`: of each group
    the name of its kernel, what runs it, and whether that takes the outputs or returns them."""
    writer = _Writer(module)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    last: dict[Node, int] = {}
    for place, step in enumerate(steps):
        last.update(dict.fromkeys((*step.reads, *step.nodes), place))
    for new, old in plan.takes.items():  # its name is needed until then
        last[old] = next(place for place, step in enumerate(steps) if new in step.nodes)
    output = next(iter(reversed(module.graph.nodes)))
    for node in output.all_input_nodes:
        last[node] = len(steps)
    unused = [node for node in inputs if node not in last]
    dead = defaultdict(list)
    for node, place in last.items():
        dead[place].append(node)
    if inputs:
        writer.line(", ".join(node.name for node in inputs) + ", = arguments")
        writer.line("arguments.clear()")
    if unused:
        writer.line("del " + ", ".join(node.name for node in unused))
    for place, step in enumerate(steps):
        if step.group is not None:
            writer.group(step, plan, *launchers[step.group])
        else:
            writer.call(step.nodes[0])
        gone = [node.name for node in dead[place] if node.op != "get_attr"]
        if gone:
            writer.line("del " + ", ".join(gone))
    writer.line(f"return {writer.shown(output.args[0])}")
    text = "def run(arguments):\n" + "".join(f"    {line}\n" for line in writer.lines)
    exec(compile(text, "<cumulo graph>", "exec"), writer.names)
    run: Callable[[list[Any]], Any] = writer.names["run"]
    return run, text


class _Writer:
    def __init__(self, module: GraphModule) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"torch": torch} | _allocators()
        self._module = module
        self._shown: dict[Any, str] = {}

    def line(self, text: str) -> None:
        self.lines.append(text)

    def named(self, thing: Any, hint: str) -> str:
        """A global name of the function for what has no literal."""
        key = (type(thing), thing) if not isinstance(thing, torch.Tensor) else id(thing)
        if key not in self._shown:
            name = "g_" + "".join(letter if letter.isalnum() else "_" for letter in hint)
            while name in self.names:
                name += "_"
            self.names[name] = thing
            self._shown[key] = name
        return self._shown[key]

    def shown(self, argument: Any) -> str:
        if isinstance(argument, Node):
            if argument.op == "get_attr":
                return self.named(_attribute(self._module, str(argument.target)), str(argument.target))
            return argument.name
        if isinstance(argument, (list, tuple)):
            inner = ", ".join(map(self.shown, argument))
            return f"[{inner}]" if isinstance(argument, list) else f"({inner}{',' * (len(argument) == 1)})"
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{key!r}: {self.shown(value)}" for key, value in argument.items()) + "}"
        if isinstance(argument, slice):
            return f"slice({self.shown(argument.start)}, {self.shown(argument.stop)}, {self.shown(argument.step)})"
        if argument is None or (
            isinstance(argument, (bool, int, str)) and type(argument) in (bool, int, str)
        ):
            return repr(argument)
        if isinstance(argument, float) and math.isfinite(argument):
            return repr(argument)
        if isinstance(argument, (torch.dtype, torch.memory_format, torch.layout)):
            return str(argument)
        return self.named(argument, f"{type(argument).__name__}_{argument}")

    def call(self, node: Node) -> None:
        if node.op == "get_attr":
            return
        if getattr(node.target, "__name__", "") == "getitem":
            self.line(f"{node.name} = {self.shown(node.args[0])}[{self.shown(node.args[1])}]")
            return
        if is_shortcut(node):
            base, view, source = shown_tensor(node), fake(node), fake(shown_tensor(node))
            offset = view.storage_offset() - source.storage_offset()
            self.line(
                f"{node.name} = g_view({base.name}, {tuple(view.shape)}, {tuple(view.stride())}, {offset})"
            )
            return
        if isinstance(node.target, torch._ops.OpOverload):
            name = self.named(node.target, str(node.target))
        else:
            name = self.named(node.target, getattr(node.target, "__name__", "call"))
        arguments = [self.shown(one) for one in node.args]
        arguments += [f"{key}={self.shown(value)}" for key, value in node.kwargs.items()]
        self.line(f"{node.name} = {name}({', '.join(arguments)})")

    def group(
        self, step: GraphStep, plan: BufferPlan, name: str, launcher: Launcher, takes_outputs: bool
    ) -> None:
        assert step.group is not None
        self.names[name] = launcher  # kernel_0_..., which no node is called
        reads = [self.shown(node) for node in step.reads]
        if not takes_outputs:
            self.line(f"{', '.join(node.name for node in step.nodes)}, = {name}([{', '.join(reads)}])")
            return
        for node in step.nodes:
            value, old = fake(node), plan.takes.get(node)
            size, stride = tuple(value.shape), tuple(value.stride())
            if old is None:
                self.line(f"{node.name} = {self._empty(value, size, stride)}")
                continue
            before = tensor(old)
            same = before is not None and before.shape == value.shape and before.stride() == value.stride()
            self.line(f"{node.name} = {old.name}" + ("" if same else f".as_strided({size}, {stride})"))
        self.line(f"{name}({', '.join([*reads, *(node.name for node in step.nodes)])})")

    def _empty(self, value: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> str:
        quick = f"g_empty_{value.device.type}"
        if quick in self.names and value.device.index in (None, 0):
            return f"{quick}({size}, {stride}, {value.dtype})"
        device = self.named(value.device, f"device_{value.device}")
        return f"torch.empty_strided({size}, {stride}, dtype={value.dtype}, device={device})"


@cache
def _allocators() -> dict[str, Any]:
    """PyTorch's allocation and views without the dispatcher, where this version has it."""
    guards = getattr(torch._C._dynamo, "guards", None)
    found = {f"empty_{kind}": getattr(guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
    found["view"] = getattr(guards, "_reinterpret_tensor", None)
    return {f"g_{name}": quick for name, quick in found.items() if quick is not None}


def _attribute(module: GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found
