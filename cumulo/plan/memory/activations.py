"""Bytes a layer keeps for backward, tensor by tensor, under every recompute choice. The memory ledger asks.

Counted for one token of a rank, in the manner of Korthikanti et al. 2022 (section 4): what each operation must see
again in backward. h is the width, f the feed-forward's, s the sequence's length, e the bytes of an activation, t
the tensor-parallel ranks. For GPT with 16-bit activations and dropout this is their equation 1, 34 + 5 a s/h bytes
for each of h, and with t and sequence parallelism their table 2.
"""

from functools import cache

from cumulo.plan.job import Recompute, TrainJob
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import Cut, Share, layer_operations

# Outputs of norms and activations: what products take, and what can be computed again from its own input.
_PRODUCT_INPUTS = (("norm",), ("activation",))


def layer_bytes_per_token(job: TrainJob, layer_has_experts: bool, recompute: Recompute) -> float:
    """Kept for backward by one layer of a rank, for each of its tokens (`TrainJob.tokens_per_rank`)."""
    tp, between = job.layout.tp, job.layout.tp if job.layout.sequence_parallel else 1
    if recompute == "full":  # the first operation's input
        return job.activation_bytes_each * _input_numbers(job.split_model, layer_has_experts) / between
    each = 1 if job.narrow_activations else job.activation_bytes_each
    eight_bits = job.dtype == "float8"
    kept = _kept_bytes(
        job.split_model, layer_has_experts, each, eight_bits, _keys(job), job.dropout, recompute
    )
    return sum(size / Share(tp, between).ranks(cut) for cut, size in kept)


def working_bytes_per_token(job: TrainJob, layer_has_experts: bool) -> float:
    """What backward of one layer needs beside what is kept; a recomputed layer's own activations are not in it."""
    numbers = _working_numbers(job.split_model, layer_has_experts, _keys(job))
    return job.activation_bytes_each * numbers / job.layout.tp


def _keys(job: TrainJob) -> int:
    """For which scores are kept: flash attention computes them again."""
    return 0 if job.flash_attention else job.sequence_length


@cache
def _input_numbers(model: ModelSpec, layer_has_experts: bool) -> int:
    return layer_operations(model, layer_has_experts)[0].kept[0].numbers


@cache
def _kept_bytes(
    model: ModelSpec,
    layer_has_experts: bool,
    each: int,
    eight_bits: bool,
    keys: int,
    dropout: bool,
    recompute: Recompute,
) -> tuple[tuple[Cut, int], ...]:
    """Before they are divided over tensor-parallel ranks. `eight_bits`: products keep their inputs as they took
    them; those of norms and activations have no other reader."""
    again = recompute.split("+")
    found: dict[Cut, int] = {}
    for operation in layer_operations(model, layer_has_experts):
        for kept in operation.kept:
            if (dropout or not kept.dropout) and not any(name in again for name in kept.again):
                width = 1 if eight_bits and kept.again in _PRODUCT_INPUTS else kept.bytes_each or each
                size = width * kept.numbers * (keys if kept.per_key else 1)
                found[kept.cut] = found.get(kept.cut, 0) + size
    return tuple(found.items())


@cache
def _working_numbers(model: ModelSpec, layer_has_experts: bool, keys: int) -> int:
    """Gradients of the widest pair of tensors: the feed-forward's inner ones, or the scores'."""
    operations = layer_operations(model, layer_has_experts)
    inner = sum(found.moved for found in operations if found.again == "activation")
    return max(inner, 2 * keys * max((found.scores.heads for found in operations if found.scores), default=0))
