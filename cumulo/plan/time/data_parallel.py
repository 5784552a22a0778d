"""Seconds of what happens around the layers: gradients and weights that travel between data-parallel ranks, the
optimizer, and memory traffic of weights. `step` adds them to the pipeline's time.

Symbols: P parameters of a rank before sharing, w and g bytes of a weight and a gradient, m micro-batches.

    ZeRO-0      all-reduce of g·P once
    ZeRO-1, 2   reduce-scatter of g·P and all-gather of w·P once
    ZeRO-3      for each micro-batch, two all-gathers of w·P and a reduce-scatter of g·P
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cumulo.plan.job import DTYPE_BYTES, TrainJob
from cumulo.plan.memory.states import Elements, adapter_elements, layer_elements
from cumulo.plan.network.collectives import Group, collective_s
from cumulo.plan.time.chunks import layer_kinds, network_of
from cumulo.plan.time.compute import rates
from cumulo.plan.time.compute_profile import Profile
from cumulo.spec.cluster import Cluster


@dataclass(frozen=True, slots=True)
class AroundTime:
    data_s: float  # of the collectives, what computation does not hide
    optimizer_s: float
    weights_s: float  # accumulation, casts and copies, in all micro-batches
    sent_bytes: float  # by one rank to its data-parallel peers


class Surroundings(NamedTuple):
    """What `around` counts, before computation hides some of it: alike under all schedules and recomputations."""

    travel_s: float  # of the collectives, of one micro-batch with ZeRO-3, else of a step
    optimizer_s: float
    weights_s: float
    sent_bytes: float

    def data_s(self, job: TrainJob, profile: Profile, micro_batch_s: float) -> float:
        """Gradients travel behind the last micro-batch's backward, weights behind the next step's first forward;
        with ZeRO-3, behind every micro-batch."""
        exposed_s = _exposed(job, profile, self.travel_s, micro_batch_s)
        return job.micro_batches * exposed_s if job.layout.zero == 3 else exposed_s


def around(job: TrainJob, cluster: Cluster, profile: Profile, micro_batch_s: float) -> AroundTime:
    """`micro_batch_s`: forward and backward of one micro-batch on a stage, behind which data can travel."""
    found = surroundings(job, cluster, profile)
    data_s = found.data_s(job, profile, micro_batch_s)
    return AroundTime(data_s, found.optimizer_s, found.weights_s, found.sent_bytes)


def surroundings(job: TrainJob, cluster: Cluster, profile: Profile) -> Surroundings:
    byte_s = rates(profile, cluster.device).byte_s
    whole = elements = heaviest_stage(job)
    if job.lora_rank is not None:  # frozen weights are neither accumulated nor updated
        elements = Elements(matrices=adapter_elements(job, whole))
    layout, m = job.layout, job.micro_batches
    shared_by = (layout.shard or layout.dp) * layout.cp if layout.zero else 1
    updated = (elements.matrices + elements.rest) / shared_by + elements.experts / max(
        1, shared_by // layout.ep
    )
    travel_s, sent_bytes = _travel(job, cluster, elements, profile.bucket_bytes)
    if layout.zero == 3 and job.lora_rank is not None:
        gathered_s, gathered_bytes = _frozen_gathers(job, cluster, whole, profile.bucket_bytes)
        travel_s, sent_bytes = travel_s + gathered_s, sent_bytes + gathered_bytes
    return Surroundings(
        travel_s=travel_s,
        optimizer_s=updated * profile.optimizer_bytes * byte_s,
        weights_s=m * elements.total * profile.weight_bytes * byte_s,
        sent_bytes=sent_bytes * (m if layout.zero == 3 else 1),
    )


def heaviest_stage(job: TrainJob) -> Elements:
    """Parameters of a rank of the stage that has most: the first, which embeds, or the last, which has the head."""
    model, layout = job.split_model, job.layout
    per_stage = -(-model.layers // layout.pp)
    experts = min(per_stage, sum(moe for moe, _ in layer_kinds(model)))
    table = job.padded_vocabulary * model.hidden // layout.tp
    tables = 1 if layout.pp > 1 or model.tied_embeddings else 2
    found = Elements(rest=tables * table, wide=table)  # of an embedding, moments are never in 8 bits
    if experts:
        found = found.plus(layer_elements(model, True, layout.tp, layout.ep), experts)
    if experts < per_stage:
        found = found.plus(layer_elements(model, False, layout.tp, layout.ep), per_stage - experts)
    return found


def _travel(job: TrainJob, cluster: Cluster, elements: Elements, bucket_bytes: float) -> tuple[float, float]:
    """Seconds of all collectives, of one micro-batch with ZeRO-3, else of a step; and the bytes a rank sends."""
    seconds = sent = 0.0
    for some in data_groups(job, cluster, elements, bucket_bytes):
        seconds += some.pieces * _collectives_s(job, some.parameters / some.pieces, some.group)
        if some.copies is not None:
            gradient_bytes = some.parameters * DTYPE_BYTES[job.gradient_dtype]
            each = gradient_bytes / some.pieces / some.group.ranks
            seconds += some.pieces * collective_s("all_reduce", each, some.copies)
        ranks = some.group.ranks * (some.copies.ranks if some.copies else 1)
        sent += some.parameters * _sent_each(job) * (ranks - 1) / ranks
    return seconds, sent


def _frozen_gathers(
    job: TrainJob, cluster: Cluster, elements: Elements, bucket_bytes: float
) -> tuple[float, float]:
    """Of one micro-batch: frozen weights that are shared out come together in forward and again in backward."""
    seconds = sent = 0.0
    for some in data_groups(job, cluster, elements, bucket_bytes):
        held = some.parameters * job.frozen_bits / 8
        seconds += 2 * some.pieces * collective_s("all_gather", held / some.pieces, some.group)
        sent += 2 * held * (some.group.ranks - 1) / some.group.ranks
    return seconds, sent


class DataGroup(NamedTuple):
    """Parameters that the same data-parallel ranks share out."""

    experts: bool
    parameters: float
    pieces: int  # in which they travel
    group: Group
    copies: Group | None  # of what the group shares; gradients are summed over them, too


def data_groups(
    job: TrainJob, cluster: Cluster, elements: Elements, bucket_bytes: float
) -> Iterator[DataGroup]:
    layout, network = job.layout, network_of(cluster)
    plain = float(elements.matrices + elements.rest)
    layers = -(-job.model.layers // layout.pp)
    for experts, count, ranks, stride in (
        (False, plain, layout.data_ranks, layout.tp),
        (True, float(elements.experts), layout.data_ranks // layout.ep, layout.tp * layout.ep),
    ):
        if not count or ranks == 1:
            continue
        gradient_bytes = count * DTYPE_BYTES[job.gradient_dtype]
        pieces = math.ceil(gradient_bytes / bucket_bytes) if bucket_bytes else layers
        shard = ranks
        if layout.zero and layout.shard:  # hybrid: shared inside, summed over the copies
            shard = max(1, min(ranks, layout.shard * layout.cp))
        copies = network.group(ranks // shard, stride * shard) if shard < ranks else None
        yield DataGroup(experts, count, pieces, network.group(shard, stride), copies)


def _collectives_s(job: TrainJob, count: float, group: Group) -> float:
    gradients = count * DTYPE_BYTES[job.gradient_dtype]
    weights = count * job.weight_bytes_each
    if job.layout.zero == 0:
        return collective_s("all_reduce", gradients, group)
    gathers = 2 if job.layout.zero == 3 else 1
    gathered_s = gathers * collective_s("all_gather", weights, group)
    return gathered_s + collective_s("reduce_scatter", gradients, group)


def _sent_each(job: TrainJob) -> int:
    gradient = DTYPE_BYTES[job.gradient_dtype]
    if job.layout.zero == 0:
        return 2 * gradient
    return gradient + job.weight_bytes_each * (2 if job.layout.zero == 3 else 1)


def _exposed(job: TrainJob, profile: Profile, travel_s: float, hidden_behind_s: float) -> float:
    """A share is always waited for; the rest only where it takes longer than the computation beside it."""
    travel_s /= profile.data_rate
    if not job.overlap_data:
        return travel_s
    share = profile.data_exposed
    return share * travel_s + max(0.0, (1 - share) * travel_s - hidden_behind_s)
