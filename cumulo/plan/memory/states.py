"""Weights, gradients and optimizer states of a rank, to the byte, under every layout. The memory ledger asks.

Symbols: P parameters of a rank before sharing, N ranks that share (ZeRO), w, g, o bytes of a weight, of a
gradient and of the optimizer's states for it. Rajbhandari et al. 2020, section 5 (w = g = 2, o = 12):

    0: (w + g + o) P      1: (w + g + o/N) P      2: (w + (g + o)/N) P      3: (w + g + o) P/N
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from cumulo.layout.layout import Layout
from cumulo.plan.job import DTYPE_BYTES, LORA_TARGETS, TrainJob
from cumulo.plan.memory.live import Place
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import layer_operations


class Elements(NamedTuple):
    """Parameters of a rank, by what is done with them."""

    matrices: int = 0  # inside layers, experts apart: what Muon takes
    experts: int = 0  # matrices that the expert-parallel ranks hold different ones of
    rest: int = 0  # embedding, head, norms, biases
    # Of matrices and rest, what keeps whole moments under adamw8bit: the embedding, and tensors of few elements.
    wide: int = 0

    @property
    def total(self) -> int:
        return self.matrices + self.experts + self.rest

    def plus(self, other: "Elements", times: int = 1) -> "Elements":
        return Elements(
            self.matrices + times * other.matrices,
            self.experts + times * other.experts,
            self.rest + times * other.rest,
            self.wide + times * other.wide,
        )


@dataclass(frozen=True, slots=True)
class StateBytes:
    weights: int
    gradients: int
    optimizer: int
    host: int = 0  # in the host's memory: what was offloaded, and the gradients that it takes


# As in cumulo.train: tensors that are smaller keep their moments in float32; the others in blocks of bytes, each
# with a float32 scale (Dettmers et al. 2021).
LEAST_FOR_8_BITS = 4096
BLOCK = 256


@cache
def layer_elements(model: ModelSpec, layer_has_experts: bool, tp: int, ep: int) -> Elements:
    """Elements of one layer on one rank."""
    matrices = experts = rest = wide = 0
    for weight in (
        weight for operation in layer_operations(model, layer_has_experts) for weight in operation.weights
    ):
        if weight.cut == "expert":
            experts += weight.size // (tp * ep)
            continue
        size = weight.size // tp if weight.cut == "tensor" else weight.size
        if len(weight.shape) > 1:
            matrices += size
        else:
            rest += size
        wide += size if size < LEAST_FOR_8_BITS else 0
    return Elements(matrices, experts, rest, wide)


def chunk_elements(job: TrainJob, chunk: int) -> Elements:
    """Of one chunk on one rank, without embedding and head."""
    found = Elements()
    for has_experts, layers in enumerate(job.chunk_kinds[chunk]):
        if layers:
            each = layer_elements(job.split_model, bool(has_experts), job.layout.tp, job.layout.ep)
            found = found.plus(each, layers)
    return found


def ahead_elements(job: TrainJob) -> Elements:
    """Of what predicts one further token, beside embedding and head: a layer like the last, the product that
    joins its input with the next token's embedding, a norm of each of the two and one before the head
    (DeepSeek-AI 2024, equations 21 to 23)."""
    model, layout = job.split_model, job.layout
    layer = layer_elements(model, model.is_moe_layer(model.layers - 1), layout.tp, layout.ep)
    norms = 3 * model.hidden * (2 if model.norm_bias else 1)
    wide = norms if model.hidden < LEAST_FOR_8_BITS else 0
    return layer.plus(Elements(matrices=2 * model.hidden * model.hidden // layout.tp, rest=norms, wide=wide))


def stage_elements(job: TrainJob, places: tuple[Place, ...]) -> Elements:
    """Elements of all the chunks of a stage. A tied embedding is held where the model begins and where it ends,
    and so is one from which further tokens are predicted."""
    model = job.model
    found = Elements()
    for chunk, _ in places:
        found = found.plus(chunk_elements(job, chunk))
    begins = sum(chunk == 0 for chunk, _ in places)
    ends = sum(chunk == job.chunks - 1 for chunk, _ in places)
    embeddings = max(begins, ends) if model.tied_embeddings or job.predict_ahead else begins
    tables = embeddings if model.tied_embeddings else embeddings + ends
    table = job.padded_vocabulary // job.layout.tp * model.hidden
    rest = tables * table
    wide = embeddings * table
    if model.learned_positions:
        rest += begins * model.max_context * model.hidden
    norm = ends * model.hidden * (2 if model.norm_bias else 1)
    wide += norm if model.hidden < LEAST_FOR_8_BITS else 0
    if job.predict_ahead:
        found = found.plus(ahead_elements(job), ends * job.predict_ahead)
    return found.plus(Elements(rest=rest + norm, wide=wide))


def heaviest_stage(job: TrainJob) -> Elements:
    """Parameters of a rank of the stage that has most: the first, which embeds, or the last, which has the
    head."""
    model, layout = job.split_model, job.layout
    per_stage = -(-model.layers // layout.pp)
    experts = min(per_stage, sum(found for _, found in job.chunk_kinds))
    table = job.padded_vocabulary * model.hidden // layout.tp
    tables = 1 if layout.pp > 1 or model.tied_embeddings else 2
    found = Elements(rest=tables * table, wide=table)  # of an embedding, moments are never in 8 bits
    if experts:
        found = found.plus(layer_elements(model, True, layout.tp, layout.ep), experts)
    if experts < per_stage:
        found = found.plus(layer_elements(model, False, layout.tp, layout.ep), per_stage - experts)
    return found


def updated_elements(layout: Layout, elements: Elements) -> float:
    """Of a rank's parameters before sharing, those that its optimizer updates."""
    plain = elements.matrices + elements.rest
    return plain / layout.zero_ranks + elements.experts / layout.expert_zero_ranks


def state_bytes(job: TrainJob, elements: Elements) -> StateBytes:
    """Of a rank with `elements` before sharing, on the device and, where states are offloaded, beside it."""
    layout = job.layout
    if job.lora_rank is not None:
        return _adapter_bytes(job, elements)
    shared_by, experts_shared_by = layout.zero_ranks, layout.expert_zero_ranks
    muon, narrow = job.optimizer == "muon", job.optimizer == "adamw8bit"
    weights = gradients = optimizer = masters = updated = 0
    for count, ranks, each in (
        (elements.matrices, shared_by, _moment_bytes(job, 1 if muon else 2)),
        (elements.experts, experts_shared_by, _moment_bytes(job, 1 if muon else 2)),
        (elements.rest, shared_by, _moment_bytes(job, 2)),
    ):
        whole, share = count, -(-count // ranks)
        weights += job.weight_bytes_each * (share if layout.zero >= 3 else whole)
        gradients += DTYPE_BYTES[job.gradient_dtype] * (share if layout.zero >= 2 else whole)
        held = share if layout.zero >= 1 else whole
        updated += held
        masters += master_bytes_each(job) * held
        optimizer += 0 if narrow else each * held
    if narrow:
        wide = -(-elements.wide // shared_by) if layout.zero else elements.wide
        blocks = -(-(updated - wide) // BLOCK)
        optimizer = 2 * blocks * (BLOCK + 4) + _moment_bytes(job, 2) * wide
    if not job.offload_optimizer:
        return StateBytes(weights, gradients, masters + optimizer)
    # One process hands the gradients of each micro-batch over as they come; several sum them on the device first.
    if layout.world == 1:
        gradients = job.weight_bytes_each * elements.total
    # Where weights are shared out they are their own float32 copy, which stays.
    stays = masters if layout.zero >= 2 else 0
    host = masters + optimizer + DTYPE_BYTES[job.gradient_dtype] * updated
    return StateBytes(weights, gradients, stays, host)


def adapter_elements(job: TrainJob, elements: Elements) -> int:
    """Elements of adapters beside the matrices of a rank: r·(n + m) for one of n × m, with sides near the
    hidden size."""
    moe = job.model.is_moe_layer(job.model.layers - 1)
    beside = adapted_share(job.model, moe, job.lora_targets) * (elements.matrices + elements.experts)
    return round(2 * (job.lora_rank or 0) * beside / job.model.hidden)


@cache
def adapted_share(model: ModelSpec, moe: bool, targets: tuple[str, ...]) -> float:
    """Of a layer's projections, those with an adapter beside them."""
    if targets == LORA_TARGETS:
        return 1.0
    sizes = {
        found.name: sum(weight.size for weight in found.weights if len(weight.shape) > 1)
        for found in layer_operations(model, moe)
        if found.product is not None
    }
    beside = sum(size for name, size in sizes.items() if has_adapter(name, targets))
    return beside / sum(sizes.values())


def has_adapter(operation: str, targets: tuple[str, ...]) -> bool:
    """Whether a product is one of the projections that get adapters; a latent's products are those of qkv."""
    name = operation.rpartition(".")[2]
    if operation.startswith("attention.") and name != "output":
        name = "qkv"
    return targets == LORA_TARGETS or {"up": "gate_up"}.get(name, name) in targets


def _adapter_bytes(job: TrainJob, elements: Elements) -> StateBytes:
    """Frozen weights in their own width (4 and 8 bits come with a scale of a byte for each 64); adapters have
    gradients, a float32 copy and two moments."""
    each = {4: 0.5 + 1 / 64, 8: 1 + 1 / 64, 16: 2.0}[job.frozen_bits]
    layout = job.layout
    shared_by, experts_by = (layout.zero_ranks, layout.expert_zero_ranks) if layout.zero >= 3 else (1, 1)
    frozen = (each * elements.matrices + 2 * elements.rest) / shared_by + each * elements.experts / experts_by
    adapters = adapter_elements(job, elements)
    return StateBytes(round(frozen) + 2 * adapters, DTYPE_BYTES[job.gradient_dtype] * adapters, 12 * adapters)


def master_bytes_each(job: TrainJob) -> int:
    """Of the float32 copy that is updated, where weights are narrower."""
    return 4 if job.dtype != "float32" and job.master_weights else 0


def _moment_bytes(job: TrainJob, moments: int) -> int:
    """Moments are as wide as the weights that are updated: the float32 copy where there is one."""
    if job.moment_dtype == "bfloat16":
        return 2 * moments
    return moments * (master_bytes_each(job) or job.weight_bytes_each)


def optimizer_bytes_each(job: TrainJob, moments: int) -> int:
    """Of one parameter, moments in full width: what a checkpoint has of it."""
    return master_bytes_each(job) + _moment_bytes(job, moments)
