"""Training step time: the cost model. `cumulo plan train`, the search and `cumulo plan validate` call it.

    estimate(job, cluster).step_s      # plays the job's pipeline schedule
    step_time(job, cluster, profile, play=False).step_s    # never above it: for pruning a search

One micro-batch's seconds on each chunk come from per-operation rooflines (`compute`) and the collectives inside a
layer (`chunks`); the schedule itself is played with them (`pipeline`); what surrounds the
layers is added (`data_parallel`). How the constants were fitted is in docs/plan-validation.md.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cumulo.errors import ConfigError
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.costs import ChunkCost, Costs, Link
from cumulo.pipeline.simulate.timeline import Timeline, simulate
from cumulo.plan.evidence import weights as evidence
from cumulo.plan.job import DTYPE_BYTES, TrainJob
from cumulo.plan.memory.ledger import Interval, TrainEstimate
from cumulo.plan.memory.live import enough_micro_batches
from cumulo.plan.memory.peak import chunk_activation_bytes
from cumulo.plan.memory.states import heaviest_stage, state_bytes, updated_elements
from cumulo.plan.time import compute_profile
from cumulo.plan.time.chunks import Chunks, chunks_of, network_of
from cumulo.plan.time.communication import (
    data_exchanges,
    data_rounds,
    layer_calls,
    layer_counts,
    message_call,
    recomputed_share,
    trained_elements,
)
from cumulo.plan.time.compute import Seconds, add, model_flops, rates
from cumulo.plan.time.compute_profile import Profile, shipped
from cumulo.plan.time.pipeline_bounds import bound_s, played_s
from cumulo.spec.cluster import Cluster


class Surroundings(NamedTuple):
    """What is around the layers of a step, before computation hides some of it: alike under all schedules and
    recomputations."""

    travel_s: float  # of the collectives, of one micro-batch with ZeRO-3, else of a step
    optimizer_s: float
    weights_s: float
    sent_bytes: float

    def data_s(self, job: TrainJob, profile: Profile, micro_batch_s: float) -> float:
        """Of the collectives, what computation does not hide: gradients travel behind the last micro-batch's
        backward, weights behind the next step's first forward; with ZeRO-3, behind every micro-batch.
        `micro_batch_s`: forward and backward of one on a stage."""
        travel_s = self.travel_s / profile.data_rate
        if job.overlap_data:
            # A share is always waited for; the rest only where it takes longer than the computation beside it. Of v
            # chunks in a stage, those of one are behind them all, and those of the others travel while as many
            # micro-batches as there are stages pass the chunks that are left.
            chunks = 1 if job.layout.zero == 3 else job.chunks_per_stage
            share, beside_s = profile.data_exposed / chunks, micro_batch_s / chunks
            beside_s += job.layout.pp * (1 - 1 / chunks) * micro_batch_s
            travel_s = share * travel_s + max(0.0, (1 - share) * travel_s - beside_s)
        return data_rounds(job) * travel_s


def surroundings(job: TrainJob, cluster: Cluster, profile: Profile) -> Surroundings:
    byte_s = rates(profile, cluster.device).byte_s
    elements = trained_elements(job)  # frozen weights are neither accumulated nor updated
    travel_s = sent_bytes = 0.0  # of one micro-batch with ZeRO-3, else of a step
    network = network_of(cluster)
    for exchange in data_exchanges(job, elements):
        pieces = exchange.pieces(job, profile.bucket_bytes)
        for call in exchange.calls:
            times = call.forward + call.backward
            travel_s += pieces * times * call.seconds(network, pieces)
            sent_bytes += times * call.sent_bytes
    return Surroundings(
        travel_s=travel_s,
        optimizer_s=updated_elements(job.layout, elements) * profile.optimizer_bytes * byte_s,
        weights_s=job.micro_batches * elements.total * profile.weight_bytes * byte_s,
        sent_bytes=data_rounds(job) * sent_bytes,
    )


@dataclass(frozen=True, slots=True)
class TrainStepTime:
    """The parts of a step's time before anything is summed up for people."""

    chunks: Chunks
    pipeline_s: float  # played, or its bound
    around: Surroundings
    data_s: float  # of the collectives around the layers, what computation does not hide
    step_s: float
    profile: Profile


def estimate(
    job: TrainJob, cluster: Cluster, profile: Profile | None = None, explain: bool = True
) -> TrainEstimate:
    """What one step takes, by playing the schedule, with what the job offloads; `explain` False leaves the
    published rows near it out."""
    borrowed: tuple[str, ...] = ()
    if profile is None:
        profile, borrowed = compute_profile.shipped_for(cluster.device, job.dtype, job.software)
    time = step_time(job, cluster, profile, play=True)
    parts, step_s = dict(_breakdown(job, time)), time.step_s
    if job.offload_optimizer:
        # A host is no faster than its devices: the search prunes by their time.
        parts["optimizer on the host"] = max(optimizer_s(job, cluster), parts.pop("optimizer", 0.0))
    if job.offload_activations:
        parts["activations to the host"] = activations_s(job, cluster, step_s)
    if job.offload_optimizer or job.offload_activations:
        step_s = sum(parts.values())
    flops = model_flops(job.model, job.sequence_length, ahead=job.predict_ahead) * job.tokens_per_step
    if job.lora_rank is not None:  # frozen weights have no gradients: two products of three are left
        flops *= 2 / 3
    peak = cluster.device.flops(job.dtype) * job.layout.world
    recomputed = 1 + _recomputed_share(time)
    found = evidence.judge(job, cluster, profile, borrowed) if explain else evidence.UNJUDGED
    return TrainEstimate(
        step_s=step_s,
        breakdown=tuple(parts.items()),
        tokens_per_s=job.tokens_per_step / step_s,
        mfu=flops / (step_s * peak),
        hfu=recomputed * flops / (step_s * peak),
        interval=Interval(step_s * found.low, step_s * found.high),
        evidence=found.sentences,
        link_bytes=_link_bytes(job, time),
    )


def step_time(job: TrainJob, cluster: Cluster, profile: Profile, play: bool) -> TrainStepTime:
    chunks = chunks_of(job, cluster, profile)
    layout = job.layout
    costs = chunks.costs
    if layout.pp == 1:
        pipeline_s = job.micro_batches * (costs[0].forward_s + costs[0].backward_s)
    elif play:
        costs, latency_s, transfer_s = messages_s(job, cluster, profile, costs)
        pipeline_s = played_s(
            layout.schedule, layout.pp, job.micro_batches, job.chunks_per_stage, costs, latency_s, transfer_s
        )
    else:
        pipeline_s = bound_s(layout.schedule, layout.pp, job.micro_batches, job.chunks_per_stage, costs)
    micro_batch_s = sum(cost.forward_s + cost.backward_s for cost in costs) / layout.pp
    around = surroundings(job, cluster, profile)
    data_s = around.data_s(job, profile, micro_batch_s)
    step_s = pipeline_s + data_s + around.optimizer_s + around.weights_s + profile.step_s
    return TrainStepTime(chunks, pipeline_s, around, data_s, step_s, profile)


def messages_s(
    job: TrainJob, cluster: Cluster, profile: Profile, costs: tuple[ChunkCost, ...]
) -> tuple[tuple[ChunkCost, ...], float, float]:
    """What chunks cost with the messages that they wait for, and a message's latency and transfer where they do
    not."""
    latency_s, transfer_s = message_s(job, cluster)
    if not profile.waits_for_messages:
        return costs, latency_s, transfer_s
    parts = job.layout.tp if profile.waits_for_messages == "whole" else 1
    return _with_messages(costs, latency_s + parts * transfer_s), 0.0, 0.0


def message_s(job: TrainJob, cluster: Cluster) -> tuple[float, float]:
    """Latency and transfer of a message to the next stage."""
    network, message = network_of(cluster), message_call(job)
    assert message is not None  # there are several stages
    latency_s = message._replace(size_bytes=0.0).seconds(network)
    return latency_s, message.seconds(network) - latency_s


def _with_messages(costs: tuple[ChunkCost, ...], message_s: float) -> tuple[ChunkCost, ...]:
    """Chunks that wait until what they pass on has arrived: both ends of a message are busy with it."""
    last = len(costs) - 1
    return tuple(
        replace(cost, forward_s=cost.forward_s + waited_s, backward_input_s=cost.backward_input_s + waited_s)
        for number, cost in enumerate(costs)
        for waited_s in [message_s * ((number > 0) + (number < last))]
    )


def _breakdown(job: TrainJob, time: TrainStepTime) -> tuple[tuple[str, float], ...]:
    """The breakdown of an average stage: causes of its busy time, then what it waits for."""
    parts = [
        part
        for passes in time.chunks.passes
        for part in (passes.forward, passes.backward_input, passes.backward_weight)
    ]
    each = Seconds(*(value * job.micro_batches / job.layout.pp for value in add(*parts)))
    rows = [
        ("matrix products", each.matmul),
        ("attention", each.attention),
        ("memory-bound", each.elementwise + time.around.weights_s),
        ("launches", each.launch),
        ("tensor parallel", each.tensor),
        ("context parallel", each.context),
        ("expert parallel", each.expert),
        ("pipeline bubble", time.pipeline_s - each.total),
        ("data parallel", time.data_s),
        ("optimizer", time.around.optimizer_s),
        ("host, each step", time.profile.step_s),
    ]
    return tuple((name, seconds) for name, seconds in rows if seconds > 1e-12 * time.step_s)


def _recomputed_share(time: TrainStepTime) -> float:
    """Recomputed products and attention, over those of forward and backward without them."""
    again = sum(part.matmul + part.attention for part in time.chunks.recomputed)
    if not again:
        return 0.0
    first = sum(p.forward.matmul + p.forward.attention for p in time.chunks.passes)
    return again / (3 * first)


def _link_bytes(job: TrainJob, time: TrainStepTime) -> tuple[tuple[str, float], ...]:
    """Bytes one rank sends in a step, by axis."""
    sent: dict[str, float] = {}
    again = recomputed_share(job)
    for has_experts, layers in layer_counts(job).items():
        for call in layer_calls(job, has_experts):
            times = layers / job.layout.pp * (call.forward + call.backward + again * call.again)
            sent[call.axis] = sent.get(call.axis, 0.0) + job.micro_batches * times * call.sent_bytes
    if (message := message_call(job)) is not None:
        sent["pp"] = job.micro_batches * (message.forward + message.backward) * message.sent_bytes
    if time.around.sent_bytes:
        sent["dp"] = time.around.sent_bytes
    return tuple(sent.items())


def timeline(job: TrainJob, cluster: Cluster) -> Timeline:
    """The timeline of one data-parallel rank; a long step is shown until its pattern repeats."""
    layout = job.layout
    if layout.pp == 1:
        raise ConfigError(
            "this plan has one pipeline stage, so there is no pipeline to draw; omit --timeline"
        )
    profile, _ = shipped().find(cluster.device, job.dtype, job.software)
    time = step_time(job, cluster, profile, play=False)
    latency_s, transfer_s = message_s(job, cluster)
    message_bytes = job.stream_bytes / layout.tp
    link = Link(latency_s, message_bytes / max(transfer_s, 1e-12))
    shown = enough_micro_batches(layout.schedule, layout.pp, job.micro_batches)
    schedule = build(layout.schedule, layout.pp, shown, job.chunks_per_stage)
    return simulate(schedule, Costs(time.chunks.costs, link=link, message_bytes=message_bytes))


# What offloading to the host's memory costs a step.
#
# Symbols: P parameters that a rank updates, w and g bytes of a weight and a gradient, o of the optimizer's states
# for a parameter, H the rate between a device and its host, M a device's share of its host's memory bandwidth.
#
#     optimizer     g P / H down, (2 o + g) P / M for the step itself, w P / H back: nothing is hidden
#     activations   what each micro-batch keeps, down in forward and back in backward, each behind the arithmetic

# Of a node: two sockets of eight DDR5-4800 channels each, as the catalogue's cpu has them.
HOST_MEMORY_BYTES_PER_S = 2 * 307.2e9


def optimizer_s(job: TrainJob, cluster: Cluster) -> float:
    """Gradients down, the step on the host, weights back."""
    layout, elements = job.layout, heaviest_stage(job)
    gradient = DTYPE_BYTES[job.gradient_dtype]
    host_bytes = state_bytes(job, elements).host  # states and gradients of what the rank updates
    updated = updated_elements(layout, elements)
    down = gradient * updated
    if layout.world == 1:  # the gradients of every micro-batch, as wide as the weights
        down = job.micro_batches * job.weight_bytes_each * updated
    # Where weights are shared out, what comes back is their float32 copy.
    back = (max(4, job.weight_bytes_each) if layout.zero >= 2 else job.weight_bytes_each) * updated
    step = 2 * (host_bytes - gradient * updated) + gradient * updated
    share = HOST_MEMORY_BYTES_PER_S / cluster.node.gpus
    return (down + back) / cluster.device.host_bytes_per_s + step / share


def activations_s(job: TrainJob, cluster: Cluster, step_s: float) -> float:
    """What the arithmetic does not hide: a third of the step is forward, behind which activations leave; behind
    the rest they come back."""
    kept = sum(chunk_activation_bytes(job, chunk) for chunk in range(job.chunks)) / job.layout.pp
    moved_s = job.micro_batches * kept / cluster.device.host_bytes_per_s
    return max(0.0, moved_s - step_s / 3) + max(0.0, moved_s - 2 * step_s / 3)
