"""A whole training step's communication, played link by link on a fabric. `cumulo simulate network
--train` calls it.

Every axis of the layout is played with all its groups at once, one call of each kind, and counted as often
as a step makes it. The cost model knows groups and tiers only; here every message has its path.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cumulo.collectives.simulate.collective_traffic import collective_traffic
from cumulo.collectives.simulate.fabrics.links import FabricGraph, Ints, Routing
from cumulo.collectives.simulate.player import RoundTraffic, play_network
from cumulo.collectives.simulate.rounds import MessageRound
from cumulo.plan.job import TrainJob
from cumulo.plan.time.communication import (
    data_exchanges,
    data_rounds,
    layer_calls,
    message_call,
    recomputed_share,
    stage_layers,
)

Outermost = Literal["pp", "dp"]


@dataclass(frozen=True, slots=True)
class StepCall:
    """One kind of collective of a step: all groups of an axis at once, `calls` times."""

    axis: str
    collective: str
    groups: Ints  # a row of mesh ranks for each group
    per_node: int  # members that share a node
    size_bytes: float
    calls: int


@dataclass(frozen=True, slots=True)
class AxisTime:
    axis: str
    collective: str
    ranks: int  # of one group
    size_bytes: float
    calls: int
    call_s: float
    far_share: float  # of the messages: those that pass the top tier
    busiest: str  # tier, with its highest use

    @property
    def total_s(self) -> float:
        return self.calls * self.call_s


def mesh(job: TrainJob, outermost: Outermost) -> Ints:
    """Mesh ranks as (pp, dp, cp, tp). `outermost` pp: a stage's copies lie side by side, as in `Layout`.
    dp: a copy's stages do, as on the Llama 3 cluster (Grattafiori et al. 2024, section 3.3.2)."""
    layout = job.layout
    if outermost == "pp":
        return np.arange(layout.world).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    ranks = np.arange(layout.world).reshape(layout.dp, layout.pp, layout.cp, layout.tp)
    return ranks.transpose(1, 0, 2, 3)


def step_calls(job: TrainJob, node_gpus: int, outermost: Outermost = "pp") -> Iterator[StepCall]:
    """What a step communicates, as the cost model counts it."""
    ranks = mesh(job, outermost).ravel()
    for (axis, collective, members, stride, size), calls in _counted(job).items():
        groups = ranks.reshape(-1, members, stride).swapaxes(1, 2).reshape(-1, members)
        near = max(1, min(members, node_gpus // stride))
        if collective == "neighbours" or np.any(groups[:, :near] // node_gpus != groups[:, :1] // node_gpus):
            near = 1
        yield StepCall(axis, collective, groups, near, size, calls)


def _counted(job: TrainJob) -> dict[tuple[str, str, int, int, float], int]:
    """Calls by axis, collective, members of a group, stride and bytes."""
    found: Counter[tuple[str, str, int, int, float]] = Counter()
    m, again = job.micro_batches, recomputed_share(job)
    for has_experts, layers in stage_layers(job).items():
        for call in layer_calls(job, has_experts):
            calls = m * round(layers * (call.forward + call.backward + again * call.again))
            if call.axis == "cp":  # once round the ring is an all-gather
                key = ("cp", "all_gather", call.ranks, call.stride, call.ranks * call.size_bytes)
                found[key] += calls // (call.ranks - 1)
            else:
                found[call.axis, call.collective, call.ranks, call.stride, call.size_bytes] += calls
    if (message := message_call(job)) is not None:  # activations on and gradients back, at the same time
        found["pp", "neighbours", job.layout.pp, message.stride, message.size_bytes] += m * message.forward
    sizes: defaultdict[tuple[str, str, int, int, int], float] = defaultdict(float)
    for exchange in data_exchanges(job):
        for call in exchange.calls:
            # Expert data parallelism, where it is among other ranks.
            axis = "edp" if job.layout.ep > 1 and call.place.endswith("experts") else "dp"
            times = data_rounds(job) * (call.forward + call.backward)
            sizes[axis, call.collective, call.ranks, call.stride, times] += call.size_bytes
    for (axis, collective, members, stride, times), size in sizes.items():
        found[axis, collective, members, stride, size] += times
    return found


def play_step(
    calls: Iterator[StepCall],
    graph: FabricGraph,
    routing: Routing,
    placement: Ints | None = None,
    step_overhead_s: float = 0.0,
) -> Iterator[AxisTime]:
    """`placement`: the GPU of each mesh rank."""
    for call in calls:
        groups = call.groups if placement is None else placement[call.groups]
        if call.collective == "neighbours":  # activations on and gradients back, at the same time
            one, other = groups[:, :-1].ravel(), groups[:, 1:].ravel()
            both = MessageRound(np.r_[one, other], np.r_[other, one], np.full(2 * len(one), call.size_bytes))
            traffic = RoundTraffic(call.axis, [both])
        else:
            algorithm = "multi-ring" if call.collective != "all_to_all" else "pairwise"
            made = collective_traffic(
                call.axis, call.collective, algorithm, groups, call.size_bytes, call.per_node
            )
            assert isinstance(made, RoundTraffic)  # rings and pairs have equal ranks
            traffic = made
        run = play_network(graph, [traffic], routing, step_overhead_s=step_overhead_s, record=True)
        assert run.use is not None
        tiers = run.use.by_tier()
        busiest = max(tiers, key=lambda tier: tiers[tier][1], default="none")
        named = f"{busiest} {tiers[busiest][1]:.0%}" if tiers else "none"
        yield AxisTime(
            call.axis, call.collective, groups.shape[1], call.size_bytes, call.calls, run.end_s,
            _far_share(call, groups, graph), named,
        )  # fmt: skip


def _far_share(call: StepCall, groups: Ints, graph: FabricGraph) -> float:
    """The share of messages to the next member: how many pass the highest tier of links."""
    source, target = groups.ravel(), np.roll(groups, -1, axis=1).ravel()
    if call.collective == "neighbours":
        source, target = groups[:, :-1].ravel(), groups[:, 1:].ravel()
    paths = graph.paths(source, target, np.zeros(len(source), np.int64), Routing())
    top = len(graph.links.tiers) - 1
    return float(((paths >= 0) & (graph.links.tier[paths] == top)).any(axis=1).mean())
