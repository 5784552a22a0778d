"""Training step time: the cost model. `cumulo plan train`, the search and `cumulo plan validate` call it.

    estimate(job, cluster).step_s      # plays the job's pipeline schedule
    lower_bound_s(job, cluster)        # microseconds, never above the estimate: for pruning a search

One micro-batch's seconds on each chunk come from per-operation rooflines (`compute`) and the collectives inside a
layer (`chunks`); the schedule itself is played with them (`pipeline`); what surrounds the
layers is added (`data_parallel`). How the constants were fitted is in docs/plan-validation.md.
"""

from dataclasses import dataclass, replace

from cumulo.errors import ConfigError
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.costs import ChunkCost, Costs, Link
from cumulo.pipeline.simulate.timeline import Timeline, simulate
from cumulo.plan.evidence import weights as evidence
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.ledger import Interval, TrainEstimate
from cumulo.plan.memory.live import enough_micro_batches
from cumulo.plan.time import compute_profile
from cumulo.plan.time.chunks import Chunks, chunks_of, network_of
from cumulo.plan.time.communication import layer_calls, layer_counts, message_call, recomputed_share
from cumulo.plan.time.compute import Seconds, add
from cumulo.plan.time.compute_profile import Profile, shipped
from cumulo.plan.time.data_parallel import AroundTime, around
from cumulo.plan.time.flops import model_flops
from cumulo.plan.time.pipeline_bounds import bound_s, played_s
from cumulo.spec.cluster import Cluster


@dataclass(frozen=True, slots=True)
class TrainStepTime:
    """The parts of a step's time before anything is summed up for people."""

    chunks: Chunks
    pipeline_s: float  # played, or its bound
    around: AroundTime
    step_s: float
    profile: Profile


def estimate(
    job: TrainJob, cluster: Cluster, profile: Profile | None = None, explain: bool = True
) -> TrainEstimate:
    """What one step takes, by playing the schedule; `explain` False leaves the published rows near it out."""
    profile, borrowed = _profile(job, cluster, profile)
    time = step_time(job, cluster, profile, play=True)
    flops = model_flops(job.model, job.sequence_length, ahead=job.predict_ahead) * job.tokens_per_step
    if job.lora_rank is not None:  # frozen weights have no gradients: two products of three are left
        flops *= 2 / 3
    peak = cluster.device.flops(job.dtype) * job.layout.world
    recomputed = 1 + _recomputed_share(time)
    found = evidence.judge(job, cluster, profile, borrowed) if explain else evidence.UNJUDGED
    return TrainEstimate(
        step_s=time.step_s,
        breakdown=_breakdown(job, time),
        tokens_per_s=job.tokens_per_step / time.step_s,
        mfu=flops / (time.step_s * peak),
        hfu=recomputed * flops / (time.step_s * peak),
        interval=Interval(time.step_s * found.low, time.step_s * found.high),
        evidence=found.sentences,
        link_bytes=_link_bytes(job, time),
    )


def lower_bound_s(job: TrainJob, cluster: Cluster, profile: Profile | None = None) -> float:
    """Never above `estimate(job, cluster).step_s`; equal to it without a pipeline, and close to it with most."""
    profile, _ = _profile(job, cluster, profile)
    return step_time(job, cluster, profile, play=False).step_s


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
    surrounding = around(job, cluster, profile, micro_batch_s)
    step_s = (
        pipeline_s + surrounding.data_s + surrounding.optimizer_s + surrounding.weights_s + profile.step_s
    )
    return TrainStepTime(chunks, pipeline_s, surrounding, step_s, profile)


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


def _profile(job: TrainJob, cluster: Cluster, profile: Profile | None) -> tuple[Profile, tuple[str, ...]]:
    if profile is not None:
        return profile, ()
    return compute_profile.shipped_for(cluster.device, job.dtype, job.software)


def _breakdown(job: TrainJob, time: TrainStepTime) -> tuple[tuple[str, float], ...]:
    """Of an average stage: causes of its busy time, then what it waits for."""
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
        ("data parallel", time.around.data_s),
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
    """Of one data-parallel rank; a long step is shown until its pattern repeats."""
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
