"""Bytes a layer keeps for backward, tensor by tensor, under every recompute choice. The memory ledger asks.

Counted for one token of a rank, in the manner of Korthikanti et al. 2022 (section 4): what each operation must see
again in backward. h is the width, f the feed-forward's, s the sequence's length, e the bytes of an activation, t
the tensor-parallel ranks. For GPT with 16-bit activations and dropout this is their equation 1, 34 + 5 a s/h bytes
for each of h, and with t and sequence parallelism their table 2.
"""

from dataclasses import dataclass
from functools import cache

from cumulo.plan.job import Recompute, TrainJob
from cumulo.spec.model import ModelSpec, MoESpec


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Of one token in one layer: sums over tensors, before they are divided over tensor-parallel ranks."""

    split: float  # inside attention and feed-forward: always divided by t
    whole: float  # between them: divided by t only with sequence parallelism
    scores: float  # of the attention between its projections: s numbers for each head; divided by t
    input: float  # what full recomputation keeps, itself part of `whole`
    # What need not be kept where one operation is computed again.
    norm: float  # the norms' outputs, of `whole`
    activation: float  # what it gives, of `split`
    attention: float  # its result, its statistics, what lies between it and the projections; of `split`
    latents: float  # the same of `whole`: normed latents
    working: float  # beside what is kept, the most that backward holds at once; divided by t


def layer_bytes_per_token(job: TrainJob, layer_has_experts: bool, recompute: Recompute) -> float:
    """Kept for backward by one layer of a rank, for each of its tokens (`TrainJob.tokens_per_rank`)."""
    layer = _layer(job, layer_has_experts)
    tp = job.layout.tp
    between = tp if job.layout.sequence_parallel else 1
    if recompute == "full":
        return layer.input / between
    again = recompute.split("+")
    kept = layer.split / tp + layer.whole / between
    if "norm" in again:
        kept -= layer.norm / between
    if "activation" in again:
        kept -= layer.activation / tp
    if "attention" in again:
        return kept - layer.attention / tp - layer.latents / between
    return kept if recompute == "selective" else kept + layer.scores / tp


def working_bytes_per_token(job: TrainJob, layer_has_experts: bool) -> float:
    """What backward of one layer needs beside what is kept; a recomputed layer's own activations are not in it."""
    return _layer(job, layer_has_experts).working / job.layout.tp


def _layer(job: TrainJob, layer_has_experts: bool) -> LayerBytes:
    return _count(
        job.model,
        layer_has_experts,
        job.activation_bytes_each,
        0 if job.flash_attention else job.sequence_length,
        job.dropout,
    )


@cache
def _count(
    model: ModelSpec, layer_has_experts: bool, each: int, scores_length: int, dropout: bool
) -> LayerBytes:
    norms = 2 * each * model.hidden  # the inputs of both
    into = 2 * each * model.hidden  # what attention and feed-forward take: the norms' outputs
    masks = 2 * model.hidden if dropout else 0  # a byte each, after attention and after the feed-forward
    attention, latents = _attention(model, each)
    normed = into
    moe = model.moe
    if moe is not None and layer_has_experts:
        forward, routed = _experts(model, moe, each)
        normed //= 2  # the router and the experts are no one operation with the norm before them
        widest = moe.experts_per_token * moe.expert_hidden + moe.shared_hidden
    else:
        forward, routed = _feed_forward(model, model.ffn_hidden, each), 0
        widest = model.ffn_hidden
    # Softmax's output, and with dropout its mask and what it leaves.
    of_score = 2 * each + 1 if dropout else each
    return LayerBytes(
        split=attention + forward,
        whole=norms + into + masks + latents + routed,
        scores=of_score * model.heads * scores_length,
        input=each * model.hidden,
        norm=normed,
        activation=each * widest,
        attention=_attention_again(model, each),
        latents=0 if model.mla is None else each * ((model.mla.q_rank or 0) + model.mla.kv_rank),
        # Gradients of the widest pair of tensors: the feed-forward's inner ones, or the scores'.
        working=max(each * widest * (3 if model.gated_ffn else 2), 2 * each * model.heads * scores_length),
    )


def _attention(model: ModelSpec, each: int) -> tuple[int, int]:
    """(divided over tensor-parallel ranks, not divided): queries, keys, values, and what the output takes."""
    statistics = 4 * model.heads  # flash attention's log-sum-exp, in float32
    if model.mla is None:
        query_key = (model.heads + model.kv_heads) * model.head_dim
        value = model.kv_heads * model.head_dim
        before_norm = query_key if model.qk_norm else 0
        return each * (query_key + before_norm + value + model.heads * model.head_dim) + statistics, 0
    mla = model.mla
    query_key = 2 * model.heads * (mla.nope_head_dim + mla.rope_head_dim)
    value = 2 * model.heads * mla.value_head_dim  # and as much for what the output takes
    # Each latent before and after its norm; the rotated part of the key, which all heads share.
    latents = 2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_head_dim
    return each * (query_key + value) + statistics, each * latents


def _attention_again(model: ModelSpec, each: int) -> int:
    """What is made again of what the projections gave, which is kept in place of turned queries and keys."""
    if model.mla is None:
        before_norm = (model.heads + model.kv_heads) * model.head_dim if model.qk_norm else 0
        return each * (before_norm + model.heads * model.head_dim) + 4 * model.heads
    all_of_it, _ = _attention(model, each)
    projected = 0 if model.mla.q_rank else model.heads * (model.mla.nope_head_dim + model.mla.rope_head_dim)
    return all_of_it - each * projected


def _feed_forward(model: ModelSpec, width: int, each: int) -> int:
    """Gate and up, and their product; without a gate, before and after the activation function."""
    return each * width * (3 if model.gated_ffn else 2)


def _experts(model: ModelSpec, moe: MoESpec, each: int) -> tuple[int, int]:
    """(divided, not divided). Routing is taken as balanced: a rank gets as many tokens as it sends."""
    inner = moe.experts_per_token * _feed_forward(model, moe.expert_hidden, each)
    shared = _feed_forward(model, moe.shared_hidden, each)
    # Of each chosen expert what it takes and what it gives (whose weight needs a gradient); float32 router scores.
    routed = 2 * each * moe.experts_per_token * model.hidden + 4 * moe.experts
    return inner + shared, routed
