"""When each tensor of a graph lives, and whose memory a result may take. The writer of the graph's function asks;
the report prints the peak before and after.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from cumulo.compile.passes.clean import returned
from cumulo.compile.passes.facts import base_of, fake, hint, is_static, is_view, node_bytes, tensor
from cumulo.compile.passes.groups import FusedGroup


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One line of the function: a group's kernel or a node's operation."""

    nodes: tuple[Node, ...]  # what it makes
    reads: tuple[Node, ...]  # as it names them
    group: FusedGroup | None = None


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Peaks count what the graph itself makes; its inputs are the caller's."""

    peak_before_bytes: int
    peak_after_bytes: int
    takes: dict[Node, Node]  # a result, and the dead tensor whose memory it takes
    in_place: frozenset[Node]  # of these, those whose kernel reads the dead tensor itself

    @property
    def reused_bytes(self) -> int:
        return sum(map(node_bytes, self.takes))


def in_order(graph: Graph) -> list[GraphStep]:
    """Every node as a step of its own, as eager PyTorch would run them."""
    return [
        GraphStep((node,), tuple(node.all_input_nodes))
        for node in graph.nodes
        if node.op in ("call_function", "get_attr")
    ]


def plan_memory(before: int, steps: Sequence[GraphStep], graph: Graph) -> BufferPlan:
    """`before`: the peak of the graph as it was."""
    kept, pinned = returned(graph), _pinned(steps)
    last = _last_reads(steps)
    made_here = {node for step in steps for node in step.nodes if not is_view(node)}
    takes: dict[Node, Node] = {}
    in_place: set[Node] = set()
    free: dict[tuple[int, torch.dtype, torch.device], list[Node]] = defaultdict(list)

    def is_free_to_take(node: Node) -> bool:
        value = tensor(node)
        whole = value is not None and is_static(value) and _is_dense(value)
        return (
            node in made_here and node not in kept and node not in pinned and whole and node.op != "get_attr"
        )

    for place, step in enumerate(steps):
        dying = [base for base in dict.fromkeys(map(base_of, step.reads)) if last.get(base) == place]
        spent: set[Node] = set()
        if step.group is not None:
            for node in step.group.outputs:
                value = fake(node)
                if not _is_dense(value):
                    continue
                for one in dying:
                    given = tensor(one)
                    if (
                        one not in spent and one in step.group.source.replaceable and is_free_to_take(one)
                        and given is not None and given.dtype == value.dtype and given.shape == value.shape
                        and given.stride() == value.stride()
                    ):  # fmt: skip
                        takes[node] = one
                        in_place.add(node)
                        spent.add(one)
                        break
                else:
                    waiting = free[_kind(value)]
                    if waiting and node not in kept:
                        takes[node] = waiting.pop()
        for one in dying:
            if is_free_to_take(one) and one not in spent:
                given = fake(one)
                free[_kind(given)].append(one)
    return BufferPlan(before, peak_bytes(steps, graph, takes), takes, frozenset(in_place))


def peak_bytes(steps: Sequence[GraphStep], graph: Graph, takes: dict[Node, Node] | None = None) -> int:
    """The most bytes that live at once of what the steps make. What is returned lives to the end; memory that a
    later result will take stays."""
    takes, kept = takes or {}, returned(graph)
    last = _last_reads(steps)
    heirs, made = set(takes.values()), set()
    live = most = 0
    for place, step in enumerate(steps):
        owned = [node for node in step.nodes if not is_view(node) and node.op != "get_attr"]
        made.update(owned)
        live += sum(node_bytes(node) for node in owned if node not in takes)
        most = max(most, live)
        for base in {*map(base_of, step.reads), *owned}:
            if last.get(base, place) == place and base in made and base not in kept and base not in heirs:
                live -= node_bytes(base)
    return most


def _last_reads(steps: Sequence[GraphStep]) -> dict[Node, int]:
    last: dict[Node, int] = {}
    for place, step in enumerate(steps):
        for node in step.reads:
            last[base_of(node)] = place
        for node in step.nodes:
            if is_view(node):
                last[base_of(node)] = place
    return last


def _pinned(steps: Sequence[GraphStep]) -> set[Node]:
    """What an operation reads that may keep or show its arguments' memory."""
    found: set[Node] = set()
    for step in steps:
        if step.group is None:
            for node in step.nodes:
                target = node.target
                if is_view(node):
                    continue
                known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
                returns = getattr(getattr(target, "_schema", None), "returns", ())
                if not known or any(one.alias_info is not None for one in returns):
                    found.update(map(base_of, step.reads))
                    found.update(step.nodes)
    return found


def _kind(value: torch.Tensor) -> tuple[int, torch.dtype, torch.device]:
    return value.numel(), value.dtype, value.device


def _is_dense(value: torch.Tensor) -> bool:
    """Whether its elements fill its memory, each once."""
    expected = 1
    for stride, size in sorted(
        zip(value.stride(), value.shape, strict=True), key=lambda one: (one[0], one[1])
    ):
        if size == 1:
            continue
        if hint(stride) != expected:
            return False
        expected *= size
    return True
