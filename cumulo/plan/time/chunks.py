"""Seconds of each chunk of the model for one micro-batch: arithmetic, recomputation, and the collectives inside a
layer. `step` plays the pipeline with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cumulo.layout.layout import split_layers
from cumulo.pipeline.decide.catalog import family
from cumulo.pipeline.decide.costs import ChunkCost
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.states import has_adapter
from cumulo.plan.network.collectives import Network
from cumulo.plan.time.communication import CommunicationCall, layer_calls
from cumulo.plan.time.compute import (
    LayerWork,
    Passes,
    Seconds,
    add,
    between_s,
    embedding,
    head,
    layer,
    moved_numbers,
    product_s,
    rates,
    scale,
)
from cumulo.plan.time.compute_profile import Profile
from cumulo.spec.cluster import Cluster
from cumulo.spec.device import Device
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import Share, layer_operations


@lru_cache(64)
def network_of(cluster: Cluster) -> Network:
    return Network(cluster)


@dataclass(frozen=True, slots=True)
class Chunks:
    """One micro-batch through each chunk, in the order it passes them. Chunks that are alike share one object."""

    passes: tuple[Passes, ...]
    costs: tuple[ChunkCost, ...]  # the same, as the pipeline's schedules take it
    recomputed: tuple[Seconds, ...]  # part of their backward passes


LayerKind = tuple[bool, int | None]  # whether it has experts, and the window of its attention


@lru_cache(256)
def layer_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    return tuple((model.is_moe_layer(index), model.window_of_layer(index)) for index in range(model.layers))


@dataclass(frozen=True, slots=True)
class Pieces:
    """What chunks are made of, whatever their number."""

    layers: Mapping[LayerKind, tuple[Passes, Seconds]]
    first: Passes
    ends: list[Passes]  # the loss, and what predicts further tokens


def pieces_of(job: TrainJob, cluster: Cluster, profile: Profile) -> Pieces:
    model, tokens = job.model, job.tokens_per_rank
    kinds = layer_kinds(model)
    layers = {kind: _layer(job, cluster, profile, *kind) for kind in set(kinds)}
    loss = head(model, job.padded_vocabulary, tokens, job.layout.tp, profile, cluster.device)
    first = embedding(model, tokens, profile, cluster.device)
    if job.lora_rank is not None:
        loss, first = frozen(loss), frozen(first)
    ends = [loss, *_ahead(job, profile, cluster, layers[kinds[-1]], loss)]
    return Pieces(layers, first, ends)


def is_paired(job: TrainJob) -> bool:
    """Whether the schedule runs a forward beside a backward."""
    return job.layout.pp > 1 and family(job.layout.schedule).overlaps


def chunks_of(job: TrainJob, cluster: Cluster, profile: Profile, pieces: Pieces | None = None) -> Chunks:
    """One micro-batch through every chunk. `pieces`: of a job that differs in dp and in its pipeline only."""
    model, last = job.model, job.chunks - 1
    kinds = layer_kinds(model)
    found_pieces = pieces or pieces_of(job, cluster, profile)
    costs, ends = found_pieces.layers, found_pieces.ends
    counts = job.chunk_layers
    if last and (profile.balances_stages or job.predict_ahead):
        mean = sum(costs[kind][0].total for kind in kinds) / len(kinds)
        counts = split_layers(model.layers, job.chunks, sum(part.total for part in ends) / mean)
    made: dict[tuple[tuple[LayerKind, ...], bool, bool], tuple[Passes, ChunkCost, Seconds]] = {}
    found: list[tuple[Passes, ChunkCost, Seconds]] = []
    begin = 0
    for chunk, count in enumerate(counts):
        mine = kinds[begin : begin + count]
        begin += count
        look = (mine, chunk == 0, chunk == last)
        if look not in made:
            extra = [found_pieces.first] if chunk == 0 else []
            if any(moe for moe, _ in mine):
                extra += _taken_up(job, profile)
            made[look] = _chunk(job, mine, costs, extra + ends * (chunk == last))
        found.append(made[look])
    passes, chunk_costs, again = zip(*found, strict=True)
    return Chunks(passes, chunk_costs, again)


def _chunk(
    job: TrainJob,
    kinds: tuple[LayerKind, ...],
    costs: Mapping[LayerKind, tuple[Passes, Seconds]],
    parts: list[Passes],
) -> tuple[Passes, ChunkCost, Seconds]:
    """Layers of some kinds, and what a chunk at the model's ends has beside them."""
    share = 1.0
    if job.recompute == "full" and job.recompute_layers is not None:
        share = min(1.0, job.recompute_layers / len(kinds))
    forward = [part.forward for part in parts]
    inputs = [part.backward_input for part in parts]
    weights = [part.backward_weight for part in parts]
    again = []
    for kind in set(kinds):
        layer_cost, repeated = costs[kind]
        times = kinds.count(kind)
        forward.append(scale(layer_cost.forward, times))
        inputs.append(scale(layer_cost.backward_input, times))
        weights.append(scale(layer_cost.backward_weight, times))
        again.append(scale(repeated, times * share))
    recomputed = add(*again) if again else Seconds()
    passes = Passes(add(*forward), add(*inputs, recomputed), add(*weights))
    cost = ChunkCost(passes.forward.total, passes.backward_input.total, passes.backward_weight.total)
    return passes, cost, recomputed


def _host_waits(job: TrainJob) -> bool:
    """In a layer with experts, for their sizes, and with nothing else for the device to do meanwhile."""
    return job.expert_exchange == "all-to-all" and not job.overlap_expert


def _taken_up(job: TrainJob, profile: Profile) -> list[Passes]:
    """What the host does for each expert when a stage takes up another chunk."""
    if job.model.moe is None or job.chunks_per_stage == 1 or not _host_waits(job):
        return []
    once = Seconds(launch=profile.chunk_launch_s * job.model.moe.experts / job.expert_ranks)
    return [Passes(once, once, once)]


def _ahead(
    job: TrainJob, profile: Profile, cluster: Cluster, layer_cost: tuple[Passes, Seconds], loss: Passes
) -> list[Passes]:
    """What predicts further tokens, each with a layer, the loss again, and a product that joins the layer's input
    with the next token's embedding (DeepSeek-AI 2024, equations 21 to 23)."""
    if not job.predict_ahead:
        return []
    once, again = layer_cost
    further = replace(once, backward_input=add(once.backward_input, again))
    rate = rates(profile, cluster.device)
    hidden = job.model.hidden
    product = Seconds(matmul=product_s(rate, job.tokens_per_rank, hidden / job.layout.tp, 2 * hidden))
    return [further, loss, Passes(product, product, product)] * job.predict_ahead


def layer_work(job: TrainJob, moe: bool, window: int | None) -> LayerWork:
    layout = job.layout
    return LayerWork(
        tokens=job.tokens_per_rank,
        sequence=job.sequence_length,
        tensor=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        expert_ranks=layout.ep,
        whole_experts=job.whole_experts,
        window=window,
        flash=job.flash_attention,
        host_waits=moe and _host_waits(job),
    )


def _layer(
    job: TrainJob, cluster: Cluster, profile: Profile, moe: bool, window: int | None
) -> tuple[Passes, Seconds]:
    """One layer with its collectives, and what recomputation adds to its backward."""
    work = layer_work(job, moe, window)
    plain = layer(job.split_model, moe, work, profile, cluster.device)
    if job.lora_rank is not None:
        plain = with_adapters(plain, job.split_model, moe, job.lora_targets, work, profile, cluster.device)
    waits = waits_of(
        layer_calls(job, moe), job.overlap_tensor, job.overlap_expert, is_paired(job), cluster, profile
    )
    forward = add(plain.forward, waits.forward)
    backward = add(plain.backward_input, waits.backward)
    if job.recompute == "full":
        again = add(plain.forward, waits.again)
    elif job.recompute == "selective":
        share = profile.selective_products
        again = Seconds(
            matmul=share * plain.forward.matmul,
            # What flash attention repeats is in its backward already.
            attention=plain.forward.attention
            if profile.selective_attention and not job.flash_attention
            else 0.0,
            elementwise=plain.forward.elementwise if share else 0.0,
            launch=share * plain.forward.launch,
        )
    elif job.recomputed_operations:
        between = between_s(job.split_model, moe, work, profile, cluster.device)
        once = replace(plain, forward=plain.forward._replace(elementwise=between))
        again = add(operations_again(job, moe, once), waits.again)
    else:
        again = Seconds()
    return Passes(forward, backward, plain.backward_weight), again


class LayerWaits(NamedTuple):
    """What a rank waits for others in one layer."""

    forward: Seconds
    backward: Seconds
    again: Seconds  # in what backward computes again


@lru_cache(4096)
def waits_of(
    calls: tuple[CommunicationCall, ...],
    overlap_tensor: bool,
    overlap_expert: bool,
    paired: bool,
    cluster: Cluster,
    profile: Profile,
) -> LayerWaits:
    """`paired`: the schedule runs a forward beside a backward: twice as much hides an exchange."""
    network = network_of(cluster)
    forward, backward, again = (dict.fromkeys(_CAUSES, 0.0) for _ in range(3))
    for call in calls:
        exposed = _exposed(call, overlap_tensor, overlap_expert, paired, network, profile)
        waited_s = exposed * call.seconds(network)
        forward[call.axis] += call.forward * waited_s
        backward[call.axis] += call.backward * waited_s
        again[call.axis] += call.again * waited_s
    return LayerWaits(
        *(
            Seconds(**{_CAUSES[axis]: seconds for axis, seconds in waited.items()})
            for waited in (forward, backward, again)
        )
    )


_CAUSES = {"tp": "tensor", "cp": "context", "ep": "expert"}


def _exposed(
    call: CommunicationCall,
    overlap_tensor: bool,
    overlap_expert: bool,
    paired: bool,
    network: Network,
    profile: Profile,
) -> float:
    """Of a call, the share that computation does not hide."""
    if call.axis == "tp":
        return profile.tensor_overlapped_exposed if overlap_tensor else profile.tensor_exposed
    if call.axis == "cp":
        return profile.context_exposed
    if overlap_expert:
        return profile.expert_overlapped_exposed * (0.5 if paired else 1.0)
    near = network.group(call.ranks, call.stride).reach.domains == 1
    return profile.expert_exposed if near else 1.0  # nothing hides what crosses the network


# Seconds that computing single operations again adds to a layer's backward, without what is sent again. The cost
# model calls it.
#
# The operations are those of cumulo.train: the norm before a block's first product, the feed-forward's activation,
# and attention between its projections.
def operations_again(job: TrainJob, has_experts: bool, plain: Passes) -> Seconds:
    """`plain`: the layer without communication."""
    operations, forward = job.recomputed_operations, plain.forward
    layout = job.layout
    share = Share(layout.tp, layout.tp if layout.sequence_parallel else 1)
    numbers = moved_numbers(job.split_model, has_experts, share)
    moved = sum(numbers.get(name, 0.0) for name in operations) / sum(numbers.values())
    attention = "attention" in operations
    return Seconds(
        matmul=_product_share(job.split_model, has_experts) * forward.matmul if attention else 0.0,
        attention=forward.attention if attention else 0.0,
        elementwise=moved * forward.elementwise,
    )


def _product_share(model: ModelSpec, has_experts: bool) -> float:
    """Of a layer's products, those that are part of attention's recomputation: between latents and heads."""
    products = [found for found in layer_operations(model, has_experts) if found.family == "matmul"]
    again, every = (
        sum(found.product.weights_per_token for found in products if found.product and found.again in names)
        for names in (("attention",), ("attention", None))
    )
    return again / every


# What LoRA adapters add to a layer's passes, and frozen weights take away. `chunks` asks.
#
# An adapter of rank r beside a matrix of n × k is two products so thin that moving their operands takes the time:
#
#     forward            x is read for A (k), and the output read and written once more to add B's product (2 n)
#     gradient of x      the output's gradient is read for B (n), and x's read and written once more (2 k)
#     of the adapter     both are read again (n + k)
#
# Like everything between large products, it is counted as ideal fusion would move it, times the software's passes
# (how much more kernels really move: Zhu et al. 2025, LoRAFusion).
def with_adapters(
    plain: Passes,
    model: ModelSpec,
    moe: bool,
    targets: tuple[str, ...],
    work: LayerWork,
    profile: Profile,
    device: Device,
) -> Passes:
    """A layer whose matrices are frozen, with an adapter beside each that is one of `targets`."""
    rate = rates(profile, device)
    inputs = outputs = 0.0  # numbers of one token that the products read and write
    for operation in layer_operations(model, moe):
        product = operation.product
        if product is not None and has_adapter(operation.name, targets):
            inputs += product.choices * product.inputs / (work.tensor if product.sliced == "inputs" else 1)
            outputs += product.choices * product.outputs / (work.tensor if product.sliced == "outputs" else 1)
    number_s = work.tokens * rate.number_bytes * rate.elementwise_byte_s
    moved = Passes(
        Seconds(elementwise=number_s * (inputs + 2 * outputs)),
        Seconds(elementwise=number_s * (outputs + 2 * inputs)),
        Seconds(elementwise=number_s * (outputs + inputs)),
    )
    return Passes(
        add(plain.forward, moved.forward),
        add(plain.backward_input, moved.backward_input),
        moved.backward_weight._replace(launch=plain.backward_weight.launch),
    )


def frozen(end: Passes) -> Passes:
    """The embedding or the head: no gradient of its weights."""
    return Passes(end.forward, end.backward_input, Seconds())
