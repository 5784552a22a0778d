"""Every collective of a training step, one by one: its bytes, its seconds, the computation beside it, and which of
the two takes longer. `cumulo plan train --phases` shows it; the seconds are those of the cost model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from cumulo.plan.job import TrainJob
from cumulo.plan.network.collectives import Network, collective_s
from cumulo.plan.network.lines import Kind
from cumulo.plan.time.chunks import chunks_of, layer_kinds, layer_work, network_of
from cumulo.plan.time.communication import (
    ATTENTION,
    FEED_FORWARD,
    CommunicationCall,
    data_exchanges,
    data_rounds,
    layer_calls,
    message_call,
    recomputed_share,
    stage_layers,
)
from cumulo.plan.time.compute import layer
from cumulo.plan.time.compute_profile import Profile
from cumulo.spec.cluster import Cluster

When = Literal["forward", "backward", "step"]


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
    sent_bytes: float  # by one rank in one call
    calls: int  # of one rank in one step
    call_s: float  # with links and cards to itself
    latency_s: float  # of that, what no byte takes
    compute_s: float  # computation of the block, which the collectives of the block stand beside
    together_s: float  # one call of each collective of the block

    @property
    def bound(self) -> Literal["compute", "bandwidth", "latency"]:
        """What the block takes longer for."""
        if self.compute_s >= self.together_s:
            return "compute"
        return "latency" if self.latency_s > self.call_s / 2 else "bandwidth"


def phases_of(job: TrainJob, cluster: Cluster, profile: Profile) -> tuple[CommunicationPhase, ...]:
    """Of one forward and one backward of a layer of each kind, of messages between stages, and of a step."""
    return (
        *_layers(job, cluster, profile),
        *_messages(job, cluster, profile),
        *_data(job, cluster, profile),
    )


def _layers(job: TrainJob, cluster: Cluster, profile: Profile) -> Iterator[CommunicationPhase]:
    network, share = network_of(cluster), recomputed_share(job)
    for moe, layers in stage_layers(job).items():
        window = next(window for kind, window in layer_kinds(job.model) if kind == moe)
        work = layer_work(job, moe, window)
        for block, begins in ((ATTENTION, "attention"), (FEED_FORWARD, "ffn")):
            passes = layer(job.split_model, moe, work, profile, cluster.device, begins)
            backward_s = passes.backward_input.computed + passes.backward_weight.computed
            calls = [call for call in layer_calls(job, moe) if call.place == block]
            where = f"{block} with experts" if moe and block == FEED_FORWARD else block
            often = job.micro_batches * layers
            forward, backward = [call.forward for call in calls], [call.backward for call in calls]
            # What is computed again communicates again.
            times = [round(often * (call.forward + share * call.again)) for call in calls]
            yield from _phases("forward", calls, network, times, passes.forward.computed, where, forward)
            times = [often * count for count in backward]
            yield from _phases("backward", calls, network, times, backward_s, where, backward)


def _messages(job: TrainJob, cluster: Cluster, profile: Profile) -> Iterator[CommunicationPhase]:
    message = message_call(job)
    if message is None:
        return
    costs = chunks_of(job, cluster, profile).costs
    forward_s = sum(cost.forward_s for cost in costs) / len(costs)
    backward_s = sum(cost.backward_s for cost in costs) / len(costs)
    network, m = network_of(cluster), job.micro_batches
    yield from _phases("forward", [message], network, [m * message.forward], forward_s)
    yield from _phases("backward", [message], network, [m * message.backward], backward_s)


def _data(job: TrainJob, cluster: Cluster, profile: Profile) -> Iterator[CommunicationPhase]:
    """All pieces together stand beside one pass, whatever their number."""
    costs, network = chunks_of(job, cluster, profile).costs, network_of(cluster)
    hidden = 1.0 / job.layout.pp if job.overlap_data else 0.0
    forward_s = hidden * sum(cost.forward_s for cost in costs)
    backward_s = hidden * sum(cost.backward_s for cost in costs)
    for exchange in data_exchanges(job):
        pieces = exchange.pieces(job, profile.bucket_bytes)
        for _, found in groupby(exchange.calls, key=lambda call: call.place):
            calls = list(found)
            passes = calls[0].forward + calls[0].backward  # in which the same travels
            beside_s = (calls[0].forward * forward_s + calls[0].backward * backward_s) / passes
            times = [data_rounds(job) * passes * pieces] * len(calls)
            yield from _phases(
                "step", calls, network, times, beside_s / pieces, pieces=pieces, rate=profile.data_rate
            )


def _phases(
    when: When,
    calls: Sequence[CommunicationCall],
    network: Network,
    times: Sequence[int],  # of each call, in a step
    compute_s: float,
    where: str | None = None,
    together: Sequence[int] | None = None,  # of each call beside the computation; None: one
    pieces: int = 1,
    rate: float = 1.0,
) -> Iterator[CommunicationPhase]:
    seconds = [call.seconds(network, pieces) / rate for call in calls]
    together_s = sum(each * count for each, count in zip(seconds, together or [1] * len(calls), strict=True))
    for call, each, count in zip(calls, seconds, times, strict=True):
        group = network.group(call.ranks, call.stride)
        yield CommunicationPhase(
            when,
            where or call.place,
            call.axis,
            call.collective,
            call.ranks,
            group.reach.domains > 1,
            call.size_bytes / pieces,
            call.sent_bytes / pieces,
            count,
            each,
            min(each, collective_s(call.collective, 0.0, group)),
            compute_s,
            together_s,
        )
