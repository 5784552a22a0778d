"""Seconds of what happens around the layers: gradients and weights that travel between data-parallel ranks, the
optimizer, and memory traffic of weights. `communication` says what travels, `step` adds them to the pipeline.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cumulo.plan.job import TrainJob
from cumulo.plan.memory.states import Elements, updated_elements
from cumulo.plan.time.chunks import network_of
from cumulo.plan.time.communication import data_exchanges, data_rounds, trained_elements
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
        return data_rounds(job) * exposed_s


def around(job: TrainJob, cluster: Cluster, profile: Profile, micro_batch_s: float) -> AroundTime:
    """`micro_batch_s`: forward and backward of one micro-batch on a stage, behind which data can travel."""
    found = surroundings(job, cluster, profile)
    data_s = found.data_s(job, profile, micro_batch_s)
    return AroundTime(data_s, found.optimizer_s, found.weights_s, found.sent_bytes)


def surroundings(job: TrainJob, cluster: Cluster, profile: Profile) -> Surroundings:
    byte_s = rates(profile, cluster.device).byte_s
    elements = trained_elements(job)  # frozen weights are neither accumulated nor updated
    travel_s, sent_bytes = _travel(job, cluster, elements, profile.bucket_bytes)
    return Surroundings(
        travel_s=travel_s,
        optimizer_s=updated_elements(job.layout, elements) * profile.optimizer_bytes * byte_s,
        weights_s=job.micro_batches * elements.total * profile.weight_bytes * byte_s,
        sent_bytes=data_rounds(job) * sent_bytes,
    )


def _travel(job: TrainJob, cluster: Cluster, elements: Elements, bucket_bytes: float) -> tuple[float, float]:
    """Seconds of all collectives, of one micro-batch with ZeRO-3, else of a step; and the bytes a rank sends."""
    seconds = sent = 0.0
    network = network_of(cluster)
    for exchange in data_exchanges(job, elements):
        pieces = exchange.pieces(job, bucket_bytes)
        each_s = 0.0
        for call in exchange.calls:
            times = call.forward + call.backward
            each_s += times * call.seconds(network, pieces)
            sent += times * call.sent_bytes
        seconds += pieces * each_s
    return seconds, sent


def _exposed(job: TrainJob, profile: Profile, travel_s: float, hidden_behind_s: float) -> float:
    """A share is always waited for; the rest only where it takes longer than the computation beside it."""
    travel_s /= profile.data_rate
    if not job.overlap_data:
        return travel_s
    share = profile.data_exposed
    return share * travel_s + max(0.0, (1 - share) * travel_s - hidden_behind_s)
