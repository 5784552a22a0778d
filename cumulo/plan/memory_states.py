"""Weights, gradients and optimizer states of a rank, to the byte, under every layout. The memory ledger asks.

Symbols: P parameters of a rank before sharing, N ranks that share (ZeRO), w, g, o bytes of a weight, of a gradient
and of the optimizer's states for it. Rajbhandari et al. 2020, section 5 (w = g = 2, o = 12):

    0: (w + g + o) P      1: (w + g + o/N) P      2: (w + (g + o)/N) P      3: (w + g + o) P/N
"""

import math
from dataclasses import dataclass
from functools import cache

from cumulo.plan.job import DTYPE_BYTES, TrainJob
from cumulo.plan.memory_live import Place
from cumulo.spec.model import ModelSpec
from cumulo.spec.parameters import layer_shapes


@dataclass(frozen=True, slots=True)
class Elements:
    """Parameters of a rank, by what is done with them."""

    matrices: int = 0  # inside layers, experts apart: what Muon takes
    experts: int = 0  # matrices that the expert-parallel ranks hold different ones of
    rest: int = 0  # embedding, head, norms, biases

    @property
    def total(self) -> int:
        return self.matrices + self.experts + self.rest

    def plus(self, other: "Elements", times: int = 1) -> "Elements":
        return Elements(
            self.matrices + times * other.matrices,
            self.experts + times * other.experts,
            self.rest + times * other.rest,
        )


@dataclass(frozen=True, slots=True)
class StateBytes:
    weights: int
    gradients: int
    optimizer: int


# Parameters that every tensor-parallel rank holds whole: the router, the way into the latents, and all vectors
# that are added to or scale the full width.
_WHOLE = ("router", "q_a", "kv_a", "norm", "output.bias", "down.bias", "selection_bias")


@cache
def layer_elements(model: ModelSpec, layer_has_experts: bool, tp: int, ep: int) -> Elements:
    """Of one layer on one rank."""
    matrices = experts = rest = 0
    for name, shape in layer_shapes(model, layer_has_experts).items():
        count = math.prod(shape)
        if ".experts." in name:
            experts += count // (tp * ep)
            continue
        if not any(part in name for part in _WHOLE):
            count //= tp
        if len(shape) > 1:
            matrices += count
        else:
            rest += count
    return Elements(matrices, experts, rest)


def chunk_elements(job: TrainJob, chunk: int) -> Elements:
    """Of one chunk on one rank, without embedding and head."""
    found = Elements()
    for has_experts, layers in enumerate(job.chunk_kinds[chunk]):
        if layers:
            each = layer_elements(job.model, bool(has_experts), job.layout.tp, job.layout.ep)
            found = found.plus(each, layers)
    return found


def stage_elements(job: TrainJob, places: tuple[Place, ...]) -> Elements:
    """Of all the chunks of a stage. A tied embedding is held where the model begins and where it ends."""
    model = job.model
    found = Elements()
    for chunk, _ in places:
        found = found.plus(chunk_elements(job, chunk))
    begins = sum(chunk == 0 for chunk, _ in places)
    ends = sum(chunk == job.chunks - 1 for chunk, _ in places)
    tables = max(begins, ends) if model.tied_embeddings else begins + ends
    rest = tables * (job.padded_vocabulary // job.layout.tp * model.hidden)
    if model.learned_positions:
        rest += begins * model.max_context * model.hidden
    rest += ends * model.hidden * (2 if model.norm_bias else 1)
    return found.plus(Elements(rest=rest))


def state_bytes(job: TrainJob, elements: Elements) -> StateBytes:
    """Of a rank with `elements` before sharing."""
    layout = job.layout
    shared_by = (layout.shard or layout.dp) * layout.cp if layout.zero else 1
    # Ranks with the same experts: of those that share the rest, one in every ep.
    experts_shared_by = max(1, shared_by // layout.ep)
    weights = gradients = optimizer = 0
    for count, ranks, moments in (
        (elements.matrices, shared_by, 1 if job.optimizer == "muon" else 2),
        (elements.experts, experts_shared_by, 1 if job.optimizer == "muon" else 2),
        (elements.rest, shared_by, 2),
    ):
        whole, share = count, -(-count // ranks)
        weights += job.weight_bytes_each * (share if layout.zero >= 3 else whole)
        gradients += DTYPE_BYTES[job.gradient_dtype] * (share if layout.zero >= 2 else whole)
        optimizer += optimizer_bytes_each(job, moments) * (share if layout.zero >= 1 else whole)
    return StateBytes(weights, gradients, optimizer)


def optimizer_bytes_each(job: TrainJob, moments: int) -> int:
    """Moments are as wide as the weights that are updated: the float32 copy where there is one."""
    if job.dtype != "float32" and job.master_weights:
        return 4 + 4 * moments
    return job.weight_bytes_each * moments
