"""A whole training step's communication, played link by link on a fabric. `cumulo simulate network
--train` calls it.

Every axis of the layout is played with all its groups at once, one call of each kind, and counted as often
as a step makes it. The cost model knows groups and tiers only; here every message has its path.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cumulo.collectives.simulate.collective_traffic import collective_traffic
from cumulo.collectives.simulate.fabrics.links import FabricGraph, Ints, Routing
from cumulo.collectives.simulate.player import RoundTraffic, play_network
from cumulo.collectives.simulate.rounds import MessageRound
from cumulo.plan.job import DTYPE_BYTES, TrainJob
from cumulo.plan.time.data_parallel import heaviest_stage
from cumulo.plan.time.pipeline import messages_of_stage

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
    layout, model, m = job.layout, job.split_model, job.micro_batches
    ranks = mesh(job, outermost)
    stream = float(job.stream_bytes)
    layers = -(-model.layers // layout.pp)
    if layout.tp > 1:
        groups, calls = ranks.reshape(-1, layout.tp), 4 * m * layers  # two blocks, forward and backward
        near = min(layout.tp, node_gpus)
        if layout.sequence_parallel:
            yield StepCall("tp", "all_gather", groups, near, stream, calls)
            yield StepCall("tp", "reduce_scatter", groups, near, stream, calls)
        else:
            yield StepCall("tp", "all_reduce", groups, near, stream, calls)
    if layout.ep > 1 and model.moe is not None:
        groups = ranks.transpose(0, 3, 1, 2).reshape(-1, layout.ep)
        size = stream * model.moe.experts_per_token / (layout.tp if layout.sequence_parallel else 1)
        near = max(1, min(layout.ep, node_gpus // layout.tp))
        yield StepCall("ep", "all_to_all", groups, near, size, 4 * m * layers)
    if layout.cp > 1:
        groups = ranks.transpose(0, 1, 3, 2).reshape(-1, layout.cp)
        size = job.key_value_bytes / layout.tp
        near = max(1, min(layout.cp, node_gpus // layout.tp))
        yield StepCall("cp", "all_gather", groups, near, float(size * layout.cp), 3 * m * layers)
    if layout.pp > 1:
        groups = ranks.transpose(1, 2, 3, 0).reshape(-1, layout.pp)
        sent = messages_of_stage(layout.pp, m, job.chunks_per_stage)
        size = stream / (layout.tp if layout.sequence_parallel else 1)
        yield StepCall("pp", "neighbours", groups, 1, size, sent // 2)
    yield from _data_calls(job, ranks, node_gpus)


def _data_calls(job: TrainJob, ranks: Ints, node_gpus: int) -> Iterator[StepCall]:
    layout = job.layout
    if layout.data_ranks == 1:
        return
    groups = ranks.transpose(0, 3, 1, 2).reshape(-1, layout.data_ranks)
    near = max(1, min(layout.data_ranks, node_gpus // layout.tp))
    if np.any(groups[:, :near] // node_gpus != groups[:, :1] // node_gpus):
        near = 1
    elements = heaviest_stage(job).total
    gradients = float(elements * DTYPE_BYTES[job.gradient_dtype])
    if layout.zero == 0:
        yield StepCall("dp", "all_reduce", groups, near, gradients, 1)
        return
    often = job.micro_batches if layout.zero == 3 else 1
    yield StepCall("dp", "reduce_scatter", groups, near, gradients, often)
    gathers = 2 * often if layout.zero == 3 else 1
    yield StepCall("dp", "all_gather", groups, near, float(elements * job.weight_bytes_each), gathers)


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
    """Of messages to the next member: how many pass the highest tier of links."""
    source, target = groups.ravel(), np.roll(groups, -1, axis=1).ravel()
    if call.collective == "neighbours":
        source, target = groups[:, :-1].ravel(), groups[:, 1:].ravel()
    paths = graph.paths(source, target, np.zeros(len(source), np.int64), Routing())
    top = len(graph.links.tiers) - 1
    return float(((paths >= 0) & (graph.links.tier[paths] == top)).any(axis=1).mean())
