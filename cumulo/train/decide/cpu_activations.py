"""What torch's own operations on a CPU keep for backward, tensor by tensor. The run's ledger asks; pure.

The planner counts what operations joined for a GPU must keep (plan/memory/activations.py). One by one they keep
more: a norm its input's normed copy (of half types both in float32), a gate its sigmoid's, attention the mask of
packed documents, and values that are a view of a projection the whole of it. train/run/kept.py measures the same.
"""

from cumulo.plan.job import TrainJob
from cumulo.plan.memory.peak import stage_loads_of
from cumulo.spec.model import MoESpec
from cumulo.spec.operations import Operation, Share, layer_operations

INDEX_BYTES = 8


def cpu_activation_bytes(job: TrainJob, stage: int) -> int:
    """Kept by a rank of a pipeline stage, of all micro-batches that are under way at once."""
    load = stage_loads_of(job)[stage]
    return load.peak({place: _chunk_bytes(job, place[0]) for place in load.places})


def _chunk_bytes(job: TrainJob, chunk: int) -> int:
    each = job.activation_bytes_each
    layers = sum(
        count * _layer_bytes(job, bool(has_experts))
        for has_experts, count in enumerate(job.chunk_kinds[chunk])
    )
    tokens = job.tokens_per_rank
    if chunk < job.chunks - 1:
        return round(tokens * layers)
    # The final norm; the loss has both gradients ready.
    ending, vocabulary = _norm_bytes(job), job.padded_vocabulary // job.layout.tp
    return round(tokens * (layers + ending)) + max(4, each) * vocabulary * job.model.hidden


def _layer_bytes(job: TrainJob, has_experts: bool) -> float:
    """Of one token."""
    model, each, share = job.model, job.activation_bytes_each, _share(job)
    taken = each * model.hidden / share.stream  # this rank's part of the stream
    if job.recompute == "full":
        return taken
    operations = layer_operations(model, has_experts)
    again = job.recomputed_operations
    found = _attention_bytes(job, [one for one in operations if one.name.startswith("attention.")])
    for operation in operations:
        if operation.name.startswith("attention."):
            continue
        if operation.family == "norm":
            if operation.again in again:
                found += taken
            elif operation.again is not None:
                found += _norm_bytes(job)
            else:  # the router takes this rank's tokens, shared experts all of them
                found += _norm_bytes(job) - each * model.hidden + taken
                if share.stream > 1 and model.moe is not None and model.moe.shared_hidden:
                    found += each * model.hidden
        elif operation.again == "activation":  # what the gate takes; what it gives, and its sigmoid's
            given = 0 if "activation" in again else 2 * operation.writes
            found += each * (operation.reads + given) / share.tensor
        elif operation.family != "routing":
            found += _kept_bytes(operation, each, share)
    return found + (_routing(model.moe, each, model.hidden, share.stream) if model.moe and has_experts else 0)


def _norm_bytes(job: TrainJob) -> float:
    """Its input, normed copy and scale are of this rank's tokens; what a slice takes of it is of all of them."""
    hidden, each = job.model.hidden, job.activation_bytes_each
    return max(4, each) * (2 * hidden + 1) / _share(job).stream + each * hidden


def _kept_bytes(operation: Operation, each: int, share: Share) -> float:
    """Where torch keeps what a joined kernel does."""
    return sum(
        (kept.bytes_each or each) * kept.numbers / share.ranks(kept.cut)
        for kept in operation.kept
        if not (kept.dropout or kept.per_key)
    )


def _attention_bytes(job: TrainJob, operations: list[Operation]) -> float:
    """Between the norm before attention and the sum after it."""
    each, tp, ring = job.activation_bytes_each, job.layout.tp, job.layout.cp > 1
    wide = max(4, each)
    found = 0.0
    if "attention" in job.recomputed_operations:  # what the first products give is all that is kept
        for operation in operations:
            product = operation.product
            if product is not None and operation.again is None and product.sliced != "inputs":
                found += each * product.outputs / (tp if product.sliced else 1)
        return found
    scores = next(operation.scores for operation in operations if operation.scores is not None)
    query, key = scores.heads * scores.key_width, scores.kv_heads * scores.key_width
    projected = query + 2 * key
    values_are_a_view = scores.joined and not ring and key == query
    # Turned queries and keys, values, the result.
    kept = float(query + key + (scores.heads + scores.kv_heads) * scores.value_width)
    if values_are_a_view:
        kept += projected - key
    elif scores.joined and not ring:
        kept += 2 * (query - key)  # each head gets keys and values of its own
    if scores.joined and job.layout.ulysses > 1:
        kept += projected  # the queries are a view of what was exchanged, and the result is, too
    if ring or scores.key_width == scores.value_width:
        kept += wide / each * scores.heads  # the logarithm of a query's sum of scores
        found += 0 if ring else each * job.sequence_length  # the mask
    else:  # keys and values of unlike width: torch keeps all scores
        kept += scores.heads * job.sequence_length
    for operation in operations:
        if operation.name == "attention.qk_norm":
            # Normed copies and scales, and their inputs: views of the projection, or float32 copies.
            kept += wide / each * (query + key + scores.heads + scores.kv_heads)
            if each < 4:
                kept += wide / each * (query + key)
            elif not values_are_a_view:
                kept += projected
        elif operation.family == "norm":  # of a latent: input, normed copy, scale, result
            found += each * (3 * operation.kept[0].numbers + 1)
        elif operation.scores is None:
            found += _kept_bytes(operation, each, Share(tp))
    return each * kept / tp + found


def _routing(moe: MoESpec, each: int, hidden: int, between: int) -> float:
    """Of this rank's tokens: scores and their sum, chosen experts and their weights. Of all: what experts take and
    give, the weights, and the order of (token, expert) pairs, there and back."""
    wide, chosen = max(4, each), moe.experts_per_token
    own = wide * (moe.experts + 1 + chosen) + INDEX_BYTES * chosen
    return own / between + chosen * (2 * each * hidden + each + 2 * INDEX_BYTES)


def _share(job: TrainJob) -> Share:
    """Between its matrices a rank has all tokens, or under sequence parallelism a part of them."""
    return Share(job.layout.tp, job.layout.tp if job.layout.sequence_parallel else 1)
