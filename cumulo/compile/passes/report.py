"""What compiling a graph did, as data: operations before, kernels after, traffic, reasons, memory, pictures. The
compiler makes a GraphReport of each graph; `cumulo compile MODEL` prints a CompileReport of a model.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from cumulo.base.quantities import quantity
from cumulo.compile.passes.facts import (
    IS_KEPT,
    Declined,
    Fused,
    aten_name,
    is_view,
    node_bytes,
)
from cumulo.compile.passes.memory import GraphStep


@dataclass(frozen=True, slots=True)
class GraphWork:
    """What the operations of a graph move and compute, from their shapes."""

    traffic_bytes: int
    operations: tuple[tuple[int, float], ...]  # bytes and FLOPs of each


@dataclass(frozen=True, slots=True)
class Kernel:
    """A generated kernel."""

    name: str
    pattern: str
    code: str  # what runs it: triton, inductor
    text: str
    operations: int
    times: int  # how often the graph runs it


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A node of a picture of the graph."""

    name: str
    label: str
    reads: tuple[str, ...]
    is_view: bool
    is_kernel: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class GraphReport:
    stage: str  # forward, backward, inference
    operations_before: int
    kernels_after: int  # generated kernels and library calls
    before: GraphWork
    after: GraphWork
    notes: tuple[Fused | Declined, ...]
    peak_before_bytes: int
    peak_after_bytes: int
    reused_bytes: int
    in_place: int
    function: str  # the Python function that runs it
    kernels: tuple[Kernel, ...]
    graph_before: tuple[DrawnNode, ...]
    graph_after: tuple[DrawnNode, ...]

    @property
    def summary(self) -> str:
        saved = self.before.traffic_bytes - self.after.traffic_bytes
        change = (
            f"{quantity(saved, 'B')} less traffic" if saved >= 0 else f"{quantity(-saved, 'B')} more traffic"
        )
        return (
            f"{self.stage}: {self.operations_before} operations became {self.kernels_after} kernels; {change}"
        )

    def reasons(self) -> list[tuple[str, int, str]]:
        """Why operations were not fused, how many, and the line of the first; the most frequent first."""
        counts: Counter[str] = Counter()
        lines: dict[str, str] = {}
        for note in self.notes:
            if isinstance(note, Declined):
                counts[note.why] += len(note.nodes)
                lines.setdefault(note.why, note.line)
        return [(why, count, lines[why]) for why, count in counts.most_common()]

    def patterns(self) -> list[tuple[str, int, int, int]]:
        """What was fused: pattern, how often, operations and bytes saved in all."""
        found: dict[str, list[int]] = {}
        for note in self.notes:
            if isinstance(note, Fused):
                row = found.setdefault(note.pattern, [0, 0, 0])
                row[0] += 1
                row[1] += len(note.nodes)
                row[2] += note.bytes_saved
        return [(name, *row) for name, row in found.items()]  # type: ignore[misc]


def count_operations(graph: Graph) -> int:
    return sum(node.op == "call_function" and not is_view(node) for node in graph.nodes)


def count_kernels(steps: Sequence[GraphStep]) -> int:
    """Generated kernels and library calls; views and what is kept from call to call run nothing."""
    nodes = [step.nodes[0] for step in steps if step.group is None]
    idle = sum(node.op == "get_attr" or is_view(node) or bool(node.meta.get(IS_KEPT)) for node in nodes)
    return len(steps) - idle


def work_of(steps: Sequence[GraphStep]) -> GraphWork:
    each = [(_moved(step), sum(map(_flops, step.nodes))) for step in steps if not is_view(step.nodes[0])]
    return GraphWork(sum(moved for moved, _ in each), tuple(each))


def _moved(step: GraphStep) -> int:
    if step.group is None:
        node = step.nodes[0]
        return (
            0
            if node.op == "get_attr" or node.meta.get(IS_KEPT)
            else node_bytes(node) + sum(map(node_bytes, node.all_input_nodes))
        )
    return step.group.traffic_bytes


def _flops(node: Node) -> float:
    """The FLOPs of a matrix product or attention; of the others the traffic counts."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry or node.op != "call_function":
        return 0.0
    args, kwargs = pytree.tree_map(
        lambda one: one.meta.get("val") if isinstance(one, Node) else one, (node.args, node.kwargs)
    )
    try:
        return float(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    except (TypeError, ValueError, AssertionError):
        return 0.0


def draw_graph(graph: Graph) -> tuple[DrawnNode, ...]:
    return tuple(
        DrawnNode(
            node.name, aten_name(node) or node.name, tuple(one.name for one in node.all_input_nodes), is_view(node),
            False, node_bytes(node),
        )
        for node in graph.nodes
        if node.op == "call_function"
    )  # fmt: skip


def draw_steps(steps: Sequence[GraphStep]) -> tuple[DrawnNode, ...]:
    from cumulo.compile.passes.groups import pattern_name

    drawn = []
    for step in steps:
        first, group = step.nodes[0], step.group
        label = pattern_name(group.nodes) if group else aten_name(first) or first.name
        drawn.append(
            DrawnNode(
                first.name, label, tuple(node.name for node in step.reads), group is None and is_view(first),
                group is not None, sum(map(node_bytes, step.nodes)),
            )
        )  # fmt: skip
    return tuple(drawn)


@dataclass(frozen=True, slots=True)
class Break:
    """Where dynamo left the graph, and why."""

    why: str
    line: str
    code: str


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a call: eager, compiled, and the first one, which compiles."""

    eager_s: float
    compiled_s: float
    first_s: float


@dataclass(frozen=True, slots=True)
class CompileReport:
    model: str
    device: str
    graphs: tuple[GraphReport, ...]
    breaks: tuple[Break, ...]
    recompiles: tuple[str, ...]  # which guard failed, of each graph that was compiled again
    difference: float  # from eager, against the largest number of a tensor
    speed: Speed
    bytes_per_s: float
    flops_per_s: float

    def predicted_s(self, before: bool = False) -> float:
        """By a roofline: each operation takes as long as its bytes or its FLOPs, whichever is longer."""
        works = [graph.before if before else graph.after for graph in self.graphs]
        return sum(
            max(moved / self.bytes_per_s, flops / self.flops_per_s)
            for work in works
            for moved, flops in work.operations
        )

    def to_text(self) -> str:
        speed, seconds = self.speed, partial(quantity, unit="s")
        lines = [graph.summary for graph in self.graphs]
        lines += [
            f"a call takes {seconds(speed.compiled_s)}, predicted {seconds(self.predicted_s())}",
            f"eager takes {seconds(speed.eager_s)}, predicted {seconds(self.predicted_s(before=True))}",
            f"the first call took {seconds(speed.first_s)}",
            f"largest difference from eager: {self.difference:.1e} of a tensor's largest number",
        ]
        for graph in self.graphs:
            lines += ["", f"{graph.stage}: fused"]
            for name, times, operations, saved in graph.patterns():
                lines.append(
                    f"  {times} × {name}: {operations} operations, {quantity(saved, 'B')} less traffic"
                )
            lines.append(f"{graph.stage}: these could not fuse, because")
            lines += [
                f"  {count} × {why}{f' ({line})' if line else ''}" for why, count, line in graph.reasons()
            ]
            lines.append(
                f"{graph.stage}: peak memory {quantity(graph.peak_before_bytes, 'B')} before, "
                f"{quantity(graph.peak_after_bytes, 'B')} after; {quantity(graph.reused_bytes, 'B')} reused, "
                f"{graph.in_place} results in place"
            )
        for one in self.breaks:
            lines += ["", f"the graph breaks at {one.line}: {one.why}", f"  {one.code}"]
        lines += [f"compiled again: {why}" for why in self.recompiles]
        return "\n".join(lines)
