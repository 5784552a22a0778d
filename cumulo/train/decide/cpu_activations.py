"""What torch's own operations on a CPU keep for backward, tensor by tensor. The run's ledger asks; pure.

The planner counts what operations joined for a GPU must keep (plan/memory/activations.py). One by one they keep
more: a norm its input's normed copy (of half types both in float32), a gate its sigmoid's, attention the mask of
packed documents, and values that are a view of a projection the whole of it. train/run/kept.py measures the same.
"""

from dataclasses import dataclass

from cumulo.plan.job import TrainJob
from cumulo.plan.memory.peak import stage_loads_of
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec

INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes of one token, by what recomputation can do without."""

    input: float
    attention_norm: float  # the norm's input, its normed copy, and what it gives
    ffn_norm: float
    projected: (
        float  # what attention makes of its input, where it is computed again: the only thing kept of it
    )
    attention: float  # ... and what is kept where it is not
    hidden: float  # what the gate takes
    gated: float  # what it gives, and its sigmoid's
    routing: float  # tokens on their way to their experts and back, and who chose whom


def cpu_activation_bytes(job: TrainJob, stage: int) -> int:
    """Kept by a rank of a pipeline stage, of all micro-batches that are under way at once."""
    load = stage_loads_of(job)[stage]
    return load.peak({place: _chunk_bytes(job, place[0]) for place in load.places})


def _chunk_bytes(job: TrainJob, chunk: int) -> int:
    each, hidden, between = job.activation_bytes_each, job.model.hidden, _between(job)
    layers = sum(
        count * _layer_bytes(job, bool(has_experts))
        for has_experts, count in enumerate(job.chunk_kinds[chunk])
    )
    tokens = job.tokens_per_rank
    if chunk < job.chunks - 1:
        return round(tokens * layers)
    # The final norm's input and its normed copy; the loss has both gradients ready.
    ending = max(4, each) * (2 * hidden + 1) / between + each * hidden
    vocabulary = job.padded_vocabulary // job.layout.tp
    return round(tokens * (layers + ending)) + max(4, each) * vocabulary * hidden


def _layer_bytes(job: TrainJob, has_experts: bool) -> float:
    layer = _layer(job, has_experts)
    if job.recompute == "full":
        return layer.input
    again = job.recomputed_operations
    kept = layer.hidden + layer.routing
    kept += layer.input if "norm" in again else layer.attention_norm
    # Experts' router takes the norm's output, too: it is not computed again.
    kept += layer.input if "norm" in again and not has_experts else layer.ffn_norm
    if "activation" not in again:
        kept += layer.gated
    return kept + (layer.projected if "attention" in again else layer.attention)


def _layer(job: TrainJob, has_experts: bool) -> _Layer:
    model, each, tp, between = job.model, job.activation_bytes_each, job.layout.tp, _between(job)
    # Its input, normed copy and scale are of this rank's tokens; what a slice takes is of all of them.
    inside = max(4, each) * (2 * model.hidden + 1) / between
    norm = inside + each * model.hidden
    projected, attention = _attention(model, each, job)
    ffn_norm, routing = norm, 0.0
    width = model.ffn_hidden
    moe = model.moe
    if moe is not None and has_experts:
        width = moe.experts_per_token * moe.expert_hidden + moe.shared_hidden
        routing = _routing(moe, each, model.hidden, between)
        ffn_norm = inside + each * model.hidden / between  # the router takes this rank's tokens
        if between > 1 and moe.shared_hidden:
            ffn_norm += each * model.hidden
    return _Layer(
        input=each * model.hidden / between,
        attention_norm=norm,
        ffn_norm=ffn_norm,
        projected=projected,
        attention=attention,
        hidden=2 * each * width / tp,
        gated=2 * each * width / tp,
        routing=routing,
    )


def _attention(model: ModelSpec, each: int, job: TrainJob) -> tuple[float, float]:
    """(what its inner part takes, what all of it keeps)."""
    if model.mla is not None:
        return _latent_attention(model, model.mla, each, job)
    tp, ring = job.layout.tp, job.layout.cp > 1
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projected = query + 2 * key
    values_are_a_view = not ring and key == query
    kept = float(2 * query + 2 * key)  # turned queries and keys, values, the result
    if values_are_a_view:
        kept += projected - key
    elif not ring:
        kept += 2 * (query - key)  # each head gets keys and values of its own
    if job.layout.ulysses > 1:
        kept += query + 2 * key  # the queries are a view of what was exchanged, and the result is, too
    if (
        model.qk_norm
    ):  # normed copies and scales, and their inputs: views of the projection, or float32 copies
        kept += max(4, each) / each * (query + key + model.heads + model.kv_heads)
        if each < 4:
            kept += max(4, each) / each * (query + key)
        elif not values_are_a_view:
            kept += projected
    mask = 0 if ring else each * job.sequence_length
    return each * projected / tp, (each * kept + _statistics(model, each)) / tp + mask


def _latent_attention(model: ModelSpec, mla: MLASpec, each: int, job: TrainJob) -> tuple[float, float]:
    tp, heads, ring = job.layout.tp, model.heads, job.layout.cp > 1
    key, value = mla.nope_head_dim + mla.rope_head_dim, mla.value_head_dim
    kept = heads * (2 * key + 2 * value)
    if not ring:
        kept += heads * job.sequence_length  # keys and values of unlike width: torch keeps all scores
    compressed = mla.kv_rank + mla.rope_head_dim
    latents = compressed + 2 * mla.kv_rank + 1 + (3 * mla.q_rank + 1 if mla.q_rank else 0)
    query = mla.q_rank if mla.q_rank else heads * key / tp
    statistics = _statistics(model, each) if ring else 0
    return each * (query + compressed), (each * kept + statistics) / tp + each * latents


def _statistics(model: ModelSpec, each: int) -> int:
    """The logarithm of a query's sum of scores."""
    return max(4, each) * model.heads


def _routing(moe: MoESpec, each: int, hidden: int, between: int) -> float:
    """Of this rank's tokens: scores and their sum, chosen experts and their weights. Of all: what experts take and
    give, the weights, and the order of (token, expert) pairs, there and back."""
    wide, chosen = max(4, each), moe.experts_per_token
    own = wide * (moe.experts + 1 + chosen) + INDEX_BYTES * chosen
    return own / between + chosen * (2 * each * hidden + each + 2 * INDEX_BYTES)


def _between(job: TrainJob) -> int:
    """Between its matrices a rank has all tokens, or under sequence parallelism a part of them."""
    return job.layout.tp if job.layout.sequence_parallel else 1
