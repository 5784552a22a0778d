"""What becomes of a node of which something was heard: it is ignored, watched, cordoned, or drained. One rule for
all signals: a verdict on its log, a failed check, a hang that names it, jobs that failed there. `node_health` asks
it and keeps what it decides; players of policies ask `drained`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import median
from typing import Literal, get_args

from cumulo.base.quantities import quantity
from cumulo.base.report import Row
from cumulo.cluster.decide.decisions import Eviction
from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.diagnose.diagnosis import NodeAct

SignalKind = Literal["log", "check", "hang", "failure", "profile"]
ACTS: tuple[NodeAct, ...] = get_args(NodeAct)  # the mildest first
WATCHED_S = 86_400.0
_BY_CHANCE = 1e-3  # failures that chance explains with no more than this probability cordon a node
SLOW = 0.8  # of what a node should reach
_ITS_OWN = "its earlier checks"


@dataclass(frozen=True, slots=True)
class HealthSignal:
    node: str
    kind: SignalKind
    text: str  # what was seen, for people
    time_s: float
    asks: NodeAct = "watch"  # what the signal calls for by itself
    job: str = ""  # whose program may be at fault instead: its signals count once on a node


def judged(
    signal: HealthSignal, heard: Iterable[HealthSignal], ran: Mapping[str, int]
) -> tuple[NodeAct, str]:
    """What becomes of the node, and why. `heard`: earlier signals of nodes, each since it was last brought back;
    `ran`: how many jobs each node had within a day. A job's failure may be its program's own: the node is cordoned
    only where jobs of other nodes fail so rarely that chance does not explain the failures here. All other signals
    get what they ask for."""
    if signal.asks != "watch" or not signal.job:
        return signal.asks, signal.text
    known = [one for one in heard if one.asks == "watch" and signal.time_s - one.time_s < WATCHED_S]
    failed = Counter(node for node, job in {(one.node, one.job) for one in (*known, signal)} if job)
    jobs = {node: max(ran.get(node, 0), failed[node]) for node in ran.keys() | failed.keys()}
    here, had = failed[signal.node], jobs[signal.node]
    if chance(here, had, failed.total(), sum(jobs.values()), len(jobs)) > _BY_CHANCE:
        return "watch", signal.text
    told = f"{here} of its {had} jobs of a day failed, and {failed.total() - here} on the other nodes"
    return "cordon", f"{told}; the last: {signal.text}"


def chance(here: int, had: int, failed: int, jobs: int, nodes: int) -> float:
    """How likely it is that any node has so many of the failures if all nodes are alike: the tail of the
    hypergeometric distribution (Fisher 1935) times the number of nodes."""
    ways = sum(comb(had, one) * comb(jobs - had, failed - one) for one in range(here, min(had, failed) + 1))
    return min(1.0, nodes * ways / comb(jobs, failed))


def drained(nodes: Iterable[ClusterNode], running: Mapping[str, Sequence[TaskPlace]]) -> list[Eviction]:
    """The running jobs that leave nodes which are drained."""
    draining = {node.name for node in nodes if node.health == "draining"}
    found = ((job, sorted(draining & {place.node for place in places})) for job, places in running.items())
    told = "is drained: the job saves a checkpoint and goes on elsewhere"
    return [Eviction(job, f"{', '.join(bad)} {told}") for job, bad in found if bad]


@dataclass(slots=True)
class NodeCheck:
    """What a check found."""

    node: str
    device: str  # only nodes with the same one are compared
    rates: dict[str, float] = field(default_factory=dict)  # bytes/s, and FLOP/s of products
    published: dict[str, float] = field(default_factory=dict)  # what the catalogue's device should reach
    wrong: list[str] = field(default_factory=list)  # what no healthy node does
    disturbed: str = ""  # why rates cannot be judged


def compared(found: NodeCheck, known: Iterable[NodeCheck]) -> list[Row]:
    """Each rate next to what it should be: what is published of the device, else the median of the last checks of
    other nodes, else of this node's own earlier ones."""
    alike = [one for one in known if one.device == found.device]
    others = {one.node: one for one in alike if one.node != found.node}.values()
    own = [one for one in alike if one.node == found.node]
    rows = []
    for name, rate in found.rates.items():
        should, basis = found.published.get(name), "the catalogue"
        for some, whose in ((others, "other nodes"), (own, _ITS_OWN)):
            rates = [one.rates[name] for one in some if name in one.rates]
            if should is None and rates:
                should, basis = median(rates), f"the median of {whose} ({len(rates)})"
        size, unit = (1.0, "FLOP/s") if "product" in name else (1e9, "GB/s")
        told = (
            f"{rate / should:.2f} of {quantity(should / size, unit)}, {basis}"
            if should
            else "the first check"
        )
        must = SLOW * should / size if should and not found.disturbed else None
        rows.append(Row(name, rate / size, unit, must=must, note=found.disturbed or told))
    return rows


def check_signals(found: NodeCheck, rows: Iterable[Row], now_s: float) -> list[HealthSignal]:
    """What a check says of its node; `rows` are those of `compared`. A node that is slower than it was itself is
    only watched: a laptop on its battery is."""
    told = [(f"{row.name} is {row.note}", _ITS_OWN in row.note) for row in rows if not row.ok]
    asked: tuple[tuple[list[str], NodeAct], ...] = (
        ([text for text, own in told if own], "watch"),
        ([text for text, own in told if not own], "cordon"),
        (found.wrong, "drain"),
    )
    return [HealthSignal(found.node, "check", "; ".join(some), now_s, act) for some, act in asked if some]
