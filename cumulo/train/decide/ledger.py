"""The run's ledger: memory and step time as the planner predicts them before the first step, and as they turn out.
Pure; the trainer fills it, the command shows it, and `ledger.json` keeps it."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from cumulo.base.quantities import LedgerLine
from cumulo.errors import ConfigError, OutOfMemory
from cumulo.layout.layout import Place, splits_backward
from cumulo.layout.pieces import adapter_shapes, pieces
from cumulo.plan.job import Recompute, TrainJob
from cumulo.plan.memory.ledger import MemoryLedger
from cumulo.plan.memory.peak import peak_memory, stage_loads_of, stage_memory
from cumulo.plan.time.compute_profile import shipped_for
from cumulo.plan.time.step import estimate
from cumulo.spec.catalog import cluster, shipped
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.spec.operations import Operation, Share, layer_operations
from cumulo.train.decide.config import TrainConfig


@dataclass(frozen=True, slots=True)
class RunPrediction:
    memory: MemoryLedger  # of the stage that needs most
    first: MemoryLedger  # of rank 0's stage
    step_s: float
    step_basis: str
    # By one rank in a step, by axis; empty: not known for this device.
    sent_bytes: tuple[tuple[str, float], ...]
    is_least: bool = False  # `step_s` is a bound from below, not an estimate


def predict(
    config: TrainConfig, spec: ModelSpec, device_name: str | None, step_flops: float, peak_flops: float
) -> RunPrediction | None:
    """`device_name`: of the GPU; None: a CPU. `peak_flops`: of all ranks. None: the planner knows no such job."""
    if config.dtype == "float64":
        return None
    on_gpu = device_name is not None  # otherwise the host's memory is the only one
    try:
        job = TrainJob(
            spec, config.layout, config.batch_sequences, config.data.sequence_length, config.micro_batch,
            recompute=_recompute(config, spec, on_gpu),
            dtype=config.dtype if config.products == "wide" else "float8",
            gradient_dtype="float32" if config.dtype == "float32" or config.master_weights else config.dtype,
            optimizer=config.optimizer.kind, offload_optimizer=on_gpu and config.optimizer.offload,
            offload_activations=on_gpu and config.offload_activations, master_weights=config.master_weights,
        )  # fmt: skip
    except ConfigError:
        return None
    memory, first = (
        _as_trained(ledger, job, config, on_gpu) for ledger in (peak_memory(job), stage_memory(job, 0))
    )
    if (known := _catalogued(device_name)) is None:
        basis = "all FLOPs at the rate of a matrix product timed here: the least it can take"
        return RunPrediction(memory, first, step_flops / peak_flops, basis, (), is_least=True)
    machines = cluster(config.layout.world, device=known)
    profile, _ = shipped_for(machines.node.device, job.dtype, "cumulo-2026")
    found = estimate(job, machines, profile, explain=False)
    basis = f"cost model of {known}, {found.interval.low:.3g} to {found.interval.high:.3g} s"
    return RunPrediction(memory, first, found.step_s, basis, found.link_bytes)


def _recompute(config: TrainConfig, spec: ModelSpec, on_gpu: bool) -> Recompute:
    if config.recompute:
        return "full"
    names: tuple[Recompute, ...] = get_args(Recompute)
    asked = set(config.recompute_operations)
    if on_gpu and config.dtype == "bfloat16" and _joined(config, spec):
        # `train/model/fused.py` computes both again, or keeps them in 8 bits, whatever was asked for.
        asked = (
            asked | {"norm", "activation"} if config.products == "wide" else asked - {"norm", "activation"}
        )
    return next((name for name in names if asked and set(name.split("+")) == asked), "none")


def _joined(config: TrainConfig, spec: ModelSpec) -> bool:
    """Whether all of a layer is: grouped heads and a dense feed-forward, without biases and adapters."""
    plain = spec.moe is None and spec.mla is None and not (spec.qkv_bias or spec.output_bias or spec.mlp_bias)
    alone = config.layout.tp == 1 and not config.compile and not splits_backward(config.layout)
    return plain and alone and config.lora is None


def _as_trained(memory: MemoryLedger, job: TrainJob, config: TrainConfig, on_gpu: bool) -> MemoryLedger:
    """The planner's ledger, with what it does not know of: torch's operations on a CPU, and adapters."""
    if not on_gpu:
        memory = replace(memory, activations=cpu_activation_bytes(job, memory.stage))
    if config.lora is None:
        return memory
    rank = job.layout.rank(Place(memory.stage, 0, 0, 0))
    plain, adapters = (
        sum(math.prod(piece.shape) for piece in pieces(job.model, job.layout, rank, shapes).values())
        for shapes in (None, adapter_shapes(job.model, config.lora.rank, config.lora.targets))
    )
    share = adapters / plain  # of what would have gradients and states without them
    return replace(
        memory,
        weights=round(memory.weights * (1 + share)),
        gradients=round(memory.gradients * share),
        optimizer=round(memory.optimizer * share),
    )


def refuse_if_too_large(
    memory: MemoryLedger, available_bytes: int, on_gpu: bool, config: TrainConfig
) -> None:
    """Before anything is allocated."""
    needed = memory.total if on_gpu else memory.peak - memory.temporary
    if needed <= available_bytes:
        return
    largest = max(memory.lines[:4], key=lambda line: line.predicted)
    advice = "layout.zero 1 to 3 or more tp or pp"
    if largest.name == "activations":
        advice = (
            "a smaller micro_batch" + ("" if config.recompute else ", recompute: true") + ", or layout.cp"
        )
    raise OutOfMemory(
        f"a rank needs {needed / 2**30:.1f} GiB and {available_bytes / 2**30:.1f} GiB are free: {_words(memory)}; "
        f"try {advice}"
    )


def entries(
    prediction: RunPrediction,
    step_s: float,
    weights_bytes: int | None,
    optimizer_bytes: int | None,
    kept_bytes: int | None,
    peak_bytes: int,
    on_gpu: bool,
) -> list[LedgerLine]:
    """`kept_bytes`: for backward, where it was measured."""
    memory = prediction.first
    exact, counted = "counted from the spec and the layout", "counted tensor by tensor"
    # A bound from below that the run went below was measured wrongly: it is not shown.
    wrong = prediction.is_least and step_s < prediction.step_s
    step = [] if wrong else [LedgerLine("step", prediction.step_s, step_s, prediction.step_basis, "s")]
    found = [
        *step,
        LedgerLine("weights", memory.weights, weights_bytes, exact),
        LedgerLine("gradients", memory.gradients, None, exact),
        LedgerLine("optimizer", memory.optimizer, optimizer_bytes, exact),
        LedgerLine("activations", memory.activations, kept_bytes, counted),
        LedgerLine("logits", memory.logits, None, counted),
    ]
    if on_gpu:
        found.append(LedgerLine("peak memory", memory.peak, peak_bytes, counted))
    return [
        *found,
        *(
            LedgerLine(f"sent over {axis}", size, None, "collectives' own volumes")
            for axis, size in prediction.sent_bytes
        ),
    ]


def write_ledger(path: Path, found: Iterable[LedgerLine]) -> None:
    entries = [
        {"name": line.name, "unit": line.unit, "predicted": line.predicted, "measured": line.measured,
         "basis": line.how}
        for line in found
    ]  # fmt: skip
    path.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")


def _catalogued(device_name: str | None) -> str | None:
    """The catalogue's name of a GPU that torch calls `NVIDIA H200`."""
    if device_name is None:
        return None
    words = device_name.lower().replace("-", " ").split()
    return next((name for name in shipped().tables["devices"] if name.split("-")[0] in words), None)


def _words(memory: MemoryLedger) -> str:
    return ", ".join(
        f"{line.name} {line.predicted / 2**30:.2g}"
        for line in memory.lines
        if line.predicted >= 0.01 * memory.total
    )


# What torch's own operations on a CPU keep for backward, tensor by tensor. The run's ledger asks; pure.
#
# The planner counts what operations joined for a GPU must keep (plan/memory/live.py). One by one they keep
# more: a norm its input's normed copy (of half types both in float32), a gate its sigmoid's, attention the mask
# of packed documents, and values that are a view of a projection the whole of it.
# train/run/forecast.py measures the same.

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
    """Bytes of one token in a layer."""
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
    """Routing of this rank's tokens: scores and their sum, chosen experts and their weights. Of all: what experts
    take and give, the weights, and the order of (token, expert) pairs, there and back."""
    wide, chosen = max(4, each), moe.experts_per_token
    own = wide * (moe.experts + 1 + chosen) + INDEX_BYTES * chosen
    return own / between + chosen * (2 * each * hidden + each + 2 * INDEX_BYTES)


def _share(job: TrainJob) -> Share:
    """Between its matrices a rank has all tokens, or under sequence parallelism a part of them."""
    return Share(job.layout.tp, job.layout.tp if job.layout.sequence_parallel else 1)
