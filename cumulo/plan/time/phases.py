"""Every collective of a training step, one by one: its bytes, its seconds, the computation beside it, and which of
the two takes longer. `cumulo plan train --phases` shows it; the seconds are those of the cost model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cumulo.plan.job import DTYPE_BYTES, TrainJob
from cumulo.plan.network.collectives import Group, collective_s
from cumulo.plan.network.lines import Kind
from cumulo.plan.time.chunks import chunks_of, layer_kinds, network_of
from cumulo.plan.time.compute import BlockSeconds, LayerWork, block_seconds
from cumulo.plan.time.compute_profile import Profile
from cumulo.plan.time.data_parallel import data_groups, heaviest_stage
from cumulo.plan.time.experts import exchanged_s
from cumulo.plan.time.pipeline import messages_of_stage
from cumulo.spec.cluster import Cluster

When = Literal["forward", "backward", "step"]
_SENT = {"all_reduce": 2.0, "send_recv": 1.0}  # times the buffer; others: what is not a rank's own, once


@dataclass(frozen=True, slots=True)
class CommunicationPhase:
    """One kind of collective, as one rank of an average stage takes part in it."""

    when: When
    where: str  # the block that it is a part of
    axis: str
    collective: Kind
    ranks: int
    leaves_domain: bool  # over the network, not over scale-up links alone
    size_bytes: float  # of the buffer, as nccl-tests counts
    calls: int  # of one rank in one step
    call_s: float  # with links and cards to itself
    latency_s: float  # of that, what no byte takes
    compute_s: float  # computation of the block, which the collectives of the block stand beside
    together_s: float  # one call of each collective of the block

    @property
    def sent_bytes(self) -> float:
        """By one rank in one call."""
        own = (self.ranks - 1) / self.ranks if self.collective != "send_recv" else 1.0
        return self.size_bytes * _SENT.get(self.collective, 1.0) * own

    @property
    def bound(self) -> Literal["compute", "bandwidth", "latency"]:
        """What the block takes longer for."""
        if self.compute_s >= self.together_s:
            return "compute"
        return "latency" if self.latency_s > self.call_s / 2 else "bandwidth"


@dataclass(frozen=True, slots=True)
class _Call:
    axis: str
    collective: Kind
    group: Group
    size_bytes: float
    times: int = 1  # in the block
    call_s: float | None = None  # None: as the network says


def phases_of(job: TrainJob, cluster: Cluster, profile: Profile) -> tuple[CommunicationPhase, ...]:
    """Of one forward and one backward of a layer of each kind, of messages between stages, and of a step."""
    found: list[CommunicationPhase] = []
    layers = -(-job.model.layers // job.layout.pp)
    kinds = layer_kinds(job.model)
    for moe in sorted({moe for moe, _ in kinds}):
        share = sum(kind[0] == moe for kind in kinds) / len(kinds)
        window = next(kind[1] for kind in kinds if kind[0] == moe)
        calls = job.micro_batches * max(1, round(layers * share))
        for block in _blocks(job, cluster, profile, moe, window):
            for name, seconds in (("forward", block.forward_s), ("backward", block.backward_s)):
                # Whole layers that are computed again communicate again.
                again = 2 if name == "forward" and job.recompute == "full" else 1
                what = f"{block.name}{' with experts' if moe and block.name == 'feed-forward' else ''}"
                made = list(_layer_calls(job, cluster, moe, block.name, name == "backward"))
                found += _phases(name, what, made, calls * again, seconds)  # type: ignore[arg-type]
    found += _messages(job, cluster, profile)
    found += _data(job, cluster, profile)
    return tuple(found)


def _blocks(
    job: TrainJob, cluster: Cluster, profile: Profile, moe: bool, window: int | None
) -> tuple[BlockSeconds, ...]:
    layout = job.layout
    work = LayerWork(
        job.tokens_per_rank, job.sequence_length, layout.tp, layout.sequence_parallel, layout.ep,
        job.whole_experts, window, job.flash_attention,
    )  # fmt: skip
    return block_seconds(job.split_model, moe, work, profile, cluster.device)


def _layer_calls(job: TrainJob, cluster: Cluster, moe: bool, block: str, backward: bool) -> Iterator[_Call]:
    layout, model, network = job.layout, job.split_model, network_of(cluster)
    stream = float(job.stream_bytes)
    feed_forward = block == "feed-forward"
    if layout.tp > 1 and not (feed_forward and moe and job.whole_experts):
        group = network.group(layout.tp, 1)
        if layout.sequence_parallel:
            yield _Call("tp", "all_gather", group, stream)
            yield _Call("tp", "reduce_scatter", group, stream)
        else:
            yield _Call("tp", "all_reduce", group, stream)
    if layout.cp > 1 and not feed_forward:
        ring = network.group(layout.cp, layout.tp)
        yield _Call(
            "cp", "send_recv", ring, job.key_value_bytes / layout.tp, (layout.cp - 1) * (2 if backward else 1)
        )
    if feed_forward and moe and job.expert_ranks > 1 and model.moe is not None:
        stride = 1 if job.whole_experts else layout.tp
        own = stream / (layout.tp if layout.sequence_parallel else 1)
        group = network.group(job.expert_ranks, stride)
        once = job.expert_exchange == "once"
        seconds = exchanged_s(own, model.moe, network, job.expert_ranks, stride, once)
        yield _Call("ep", "all_to_all", group, own * model.moe.experts_per_token, 2, seconds)


def _messages(job: TrainJob, cluster: Cluster, profile: Profile) -> list[CommunicationPhase]:
    layout = job.layout
    if layout.pp == 1:
        return []
    chunks = chunks_of(job, cluster, profile)
    group = network_of(cluster).group(2, layout.world // layout.pp)
    calls = messages_of_stage(layout.pp, job.micro_batches, job.chunks_per_stage) // 2
    number = len(chunks.costs)
    found = []
    for when, seconds in (
        ("forward", sum(cost.forward_s for cost in chunks.costs) / number),
        ("backward", sum(cost.backward_s for cost in chunks.costs) / number),
    ):
        message = _Call("pp", "send_recv", group, chunks.message_bytes)
        found += _phases(when, "between stages", [message], calls, seconds)  # type: ignore[arg-type]
    return found


def _data(job: TrainJob, cluster: Cluster, profile: Profile) -> list[CommunicationPhase]:
    layout = job.layout
    costs = chunks_of(job, cluster, profile).costs
    forward_s = sum(cost.forward_s for cost in costs) / layout.pp
    backward_s = sum(cost.backward_s for cost in costs) / layout.pp
    hidden = 1.0 if job.overlap_data else 0.0
    times = job.micro_batches if layout.zero == 3 else 1
    found: list[CommunicationPhase] = []
    for some in data_groups(job, cluster, heaviest_stage(job), profile.bucket_bytes):
        name, group, pieces = " of experts" if some.experts else "", some.group, some.pieces
        gradients = some.parameters * DTYPE_BYTES[job.gradient_dtype] / pieces
        weights = some.parameters * job.weight_bytes_each / pieces
        reduced: Kind = "reduce_scatter" if layout.zero else "all_reduce"
        seconds = collective_s(reduced, gradients, group) / profile.data_rate
        calls = [_Call("dp", reduced, group, gradients, call_s=seconds)]
        if some.copies is not None:
            share = gradients / group.ranks
            seconds = collective_s("all_reduce", share, some.copies) / profile.data_rate
            calls.append(_Call("dp", "all_reduce", some.copies, share, call_s=seconds))
        # All pieces together stand beside one backward, whatever their number.
        found += _phases("step", f"gradients{name}", calls, times * pieces, hidden * backward_s / pieces)
        if layout.zero:
            gathers = 2 if layout.zero == 3 else 1
            seconds = collective_s("all_gather", weights, group) / profile.data_rate
            call = _Call("dp", "all_gather", group, weights, call_s=seconds)
            beside_s = hidden * (forward_s + backward_s if gathers == 2 else forward_s)
            found += _phases(
                "step", f"weights{name}", [call], times * gathers * pieces, beside_s / gathers / pieces
            )
    return found


def _phases(
    when: When, where: str, calls: list[_Call], times: int, compute_s: float
) -> list[CommunicationPhase]:
    seconds = [
        collective_s(call.collective, call.size_bytes, call.group) if call.call_s is None else call.call_s
        for call in calls
    ]
    together_s = sum(each * call.times for each, call in zip(seconds, calls, strict=True))
    return [
        CommunicationPhase(
            when,
            where,
            call.axis,
            call.collective,
            call.group.ranks,
            call.group.reach.domains > 1,
            call.size_bytes,
            times * call.times,
            each,
            min(each, collective_s(call.collective, 0.0, call.group)),
            compute_s,
            together_s,
        )
        for each, call in zip(seconds, calls, strict=True)
    ]
