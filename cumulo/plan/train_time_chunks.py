"""Seconds of each chunk of the model for one micro-batch: arithmetic, recomputation, and the collectives inside a
layer. `train_time` plays the pipeline with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cumulo.pipeline.costs import ChunkCost
from cumulo.plan.compute import LayerWork, Passes, Seconds, add, embedding, head, layer, scale
from cumulo.plan.compute_profile import Profile
from cumulo.plan.job import TrainJob
from cumulo.plan.network import Network, collective_s
from cumulo.spec.cluster import Cluster
from cumulo.spec.model import ModelSpec


@lru_cache(64)
def network_of(cluster: Cluster) -> Network:
    return Network(cluster)


@dataclass(frozen=True, slots=True)
class Chunks:
    """One micro-batch through each chunk, in the order it passes them. Chunks that are alike share one object."""

    passes: tuple[Passes, ...]
    costs: tuple[ChunkCost, ...]  # the same, as the pipeline's schedules take it
    recomputed: tuple[Seconds, ...]  # part of their backward passes
    message_bytes: float  # an activation between two chunks, of one rank


LayerKind = tuple[bool, int | None]  # whether it has experts, and the window of its attention


@lru_cache(256)
def layer_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    return tuple((model.is_moe_layer(index), model.window_of_layer(index)) for index in range(model.layers))


def chunks_of(job: TrainJob, cluster: Cluster, profile: Profile) -> Chunks:
    """One micro-batch through every chunk."""
    model, tokens, last = job.model, job.tokens_per_rank, job.chunks - 1
    kinds = layer_kinds(model)
    costs = {kind: _layer(job, cluster, profile, *kind) for kind in set(kinds)}
    loss = head(model, job.padded_vocabulary, tokens, job.layout.tp, profile, cluster.device)
    counts = job.chunk_layers
    if profile.balances_stages and last:
        mean = sum(costs[kind][0].total for kind in kinds) / len(kinds)
        counts = balanced_layers(model.layers, job.chunks, loss.total / mean)
    made: dict[tuple[tuple[LayerKind, ...], bool, bool], tuple[Passes, ChunkCost, Seconds]] = {}
    found: list[tuple[Passes, ChunkCost, Seconds]] = []
    begin = 0
    for chunk, count in enumerate(counts):
        mine = kinds[begin : begin + count]
        begin += count
        look = (mine, chunk == 0, chunk == last)
        if look not in made:
            extra = [embedding(model, tokens, profile, cluster.device)] if chunk == 0 else []
            made[look] = _chunk(job, mine, costs, extra + [loss] * (chunk == last))
        found.append(made[look])
    # Tensor-parallel ranks each send their part and gather on the other side (Narayanan et al. 2021, section 4.1).
    message = tokens * model.hidden * job.activation_bytes_each / job.layout.tp
    passes, chunk_costs, again = zip(*found, strict=True)
    return Chunks(passes, chunk_costs, again, message)


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
    recomputed = add(*again)
    passes = Passes(add(*forward), add(*inputs, recomputed), add(*weights))
    cost = ChunkCost(passes.forward.total, passes.backward_input.total, passes.backward_weight.total)
    return passes, cost, recomputed


def balanced_layers(layers: int, chunks: int, head_layers: float) -> tuple[int, ...]:
    """Layers of each chunk where the last one's loss counts as `head_layers` layers, one layer at least in each."""
    each = (layers + head_layers) / chunks
    last = max(1, round(each - head_layers))
    rest, more = divmod(layers - last, chunks - 1)
    return (*(rest + (chunk < more) for chunk in range(chunks - 1)), last)


def _layer(
    job: TrainJob, cluster: Cluster, profile: Profile, moe: bool, window: int | None
) -> tuple[Passes, Seconds]:
    """One layer with its collectives, and what recomputation adds to its backward."""
    layout = job.layout
    work = LayerWork(
        tokens=job.tokens_per_rank,
        sequence=job.sequence_length,
        tensor=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        expert_ranks=layout.ep,
        window=window,
        flash=job.flash_attention,
    )
    plain = layer(job.model, moe, work, profile, cluster.device)
    waits = _waits(job, cluster, profile, moe)
    forward = add(plain.forward, waits)
    # The ring of context parallelism brings keys and values again and takes their gradients along.
    backward = add(plain.backward_input, waits._replace(context=2 * waits.context))
    if job.recompute == "full":
        again = forward
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
    else:
        again = Seconds()
    return Passes(forward, backward, plain.backward_weight), again


def _waits(job: TrainJob, cluster: Cluster, profile: Profile, moe: bool) -> Seconds:
    """What a rank waits for others in one layer's forward."""
    return waits_of(
        job.layout.tp,
        job.layout.cp,
        job.layout.ep if moe else 1,
        job.layout.sequence_parallel,
        job.overlap_tensor,
        float(job.tokens_per_rank * job.model.hidden * job.activation_bytes_each),
        float(job.tokens_per_rank * 2 * job.model.kv_heads * job.model.head_dim * job.activation_bytes_each),
        job.model.moe.experts_per_token if job.model.moe is not None else 0,
        cluster,
        profile,
    )


@lru_cache(4096)
def waits_of(
    tp: int,
    cp: int,
    ep: int,
    sequence_parallel: bool,
    overlap_tensor: bool,
    stream_bytes: float,
    key_value_bytes: float,
    copies: int,
    cluster: Cluster,
    profile: Profile,
) -> Seconds:
    """`stream_bytes`: the residual stream of the rank's tokens; `key_value_bytes`: all their keys and values."""
    network = network_of(cluster)
    tensor_s = context_s = expert_s = 0.0
    if tp > 1:
        group = network.group(tp, 1)
        if sequence_parallel:  # gathered before, reduced and scattered after each of the two blocks
            each = collective_s("all_gather", stream_bytes, group) + collective_s(
                "reduce_scatter", stream_bytes, group
            )
        else:
            each = collective_s("all_reduce", stream_bytes, group)
        exposed = profile.tensor_overlapped_exposed if overlap_tensor else profile.tensor_exposed
        tensor_s = 2 * each * exposed
    if cp > 1:
        ring = network.group(cp, tp)
        context_s = (cp - 1) * collective_s("send_recv", key_value_bytes / tp, ring) * profile.context_exposed
    if ep > 1:
        sent = stream_bytes * copies / (tp if sequence_parallel else 1)
        expert_s = 2 * collective_s("all_to_all", sent, network.group(ep, tp)) * profile.expert_exposed
    return Seconds(tensor=tensor_s, context=context_s, expert=expert_s)
