"""The memory ledger of a training job: every byte of a rank, by component. Search prunes with it, reports show
it.

    peak_memory(job)            # the stage that needs most
    stage_memory(job, stage=0)  # one of them

States are exact (`states`). Activations are counted tensor by tensor (`activations`), times the
micro-batches that the job's own pipeline schedule keeps alive (`live`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cumulo.base.quantities import MIB
from cumulo.layout.layout import held_chunks
from cumulo.plan.job import DTYPE_BYTES, TrainJob
from cumulo.plan.memory.ledger import MemoryLedger
from cumulo.plan.memory.live import (
    StageLoad,
    layer_bytes_per_token,
    least_alive,
    stage_loads,
    working_bytes_per_token,
)
from cumulo.plan.memory.states import StateBytes, layer_elements, stage_elements, state_bytes
from cumulo.plan.time.efficiency import shipped_efficiency

# What a framework needs beside a job's own tensors: buffers, its allocator's fragments, its context. The ledger
# asks.
#
# DeepSpeed's, with a pipeline: 16-bit gradients are kept beside the float32 sums (BF16_Optimizer; float16 is summed
# as it comes), the gradients of the shard that a rank updates are copied to float32, two buckets of 5e8 elements
# travel (`reduce_bucket_size`, `allgather_bucket_size`), and a stage keeps its outputs until backward. CUDA 11
# loaded all kernels at start, 1,573 MiB on an A100 (BigScience, chronicles-prequel.md).
_BUCKETS, _BUCKET_ELEMENTS = 2, 500_000_000
# Of all it hands out, what the allocator of 2022 held beside it under DeepSpeed: fitted to 14 figures in float16
# of BLOOM's trials; the 17 in bfloat16 were seen, not fitted (docs/plan-memory.md).
_DEEPSPEED_FRAGMENTS = 0.155
_FRAGMENTS = 0.03  # of what is allocated and freed again in a step


@dataclass(frozen=True, slots=True)
class FrameworkMemory:
    gradients: int = 0  # beside those that are summed
    buffers: int = 0
    fragment_share: float = _FRAGMENTS  # of what is allocated and freed again
    fragment_share_of_states: float = 0.0
    context: int = 700 * MIB
    communicator: int = 200 * MIB  # of each kind of group a rank is in
    more_groups: int = 0


_PLAIN = FrameworkMemory()


def framework_memory(job: TrainJob, parameters: int, updated: int, live: int) -> FrameworkMemory:
    """`parameters` of a rank, of which it updates some; `live`: micro-batches that its stage keeps at once."""
    if not runs_deepspeed(job.software):
        return _PLAIN
    each = job.weight_bytes_each
    beside = each * parameters if job.dtype == "bfloat16" and job.gradient_dtype == "float32" else 0
    outputs = live * job.stream_bytes
    return FrameworkMemory(
        gradients=beside,
        buffers=_BUCKETS * _BUCKET_ELEMENTS * each + 4 * updated + (outputs if job.layout.pp > 1 else 0),
        fragment_share=_DEEPSPEED_FRAGMENTS,
        fragment_share_of_states=_DEEPSPEED_FRAGMENTS,
        context=1573 * MIB,
        communicator=300 * MIB,
        more_groups=2,  # of all model-parallel ranks, and of both ends of the pipeline
    )


def runs_deepspeed(software: str) -> bool:
    traits = shipped_efficiency().software.get(software)
    return traits is not None and traits.deepspeed_collectives


LOSS_PIECE_BYTES = 512 * 2**20  # of the logits at a time, where the loss is fused with the product before it
WORKSPACE_BYTES = 64 * 2**20  # of the matrix libraries, inside the allocator


def peak_memory(job: TrainJob) -> MemoryLedger:
    """The peak of a rank of the stage that needs most."""
    return max(_ledgers(job), key=lambda ledger: ledger.total)


def fits_into(job: TrainJob, limit_bytes: int) -> bool:
    """Whether no stage needs more: the first that does answers."""
    return all(ledger.total <= limit_bytes for ledger in _ledgers(job))


def _ledgers(job: TrainJob) -> Iterator[MemoryLedger]:
    ledgers = _Ledgers(job)
    return (ledgers.ledger_of(stage) for stage in range(job.layout.pp))


def least_memory_bytes(job: TrainJob) -> float:
    """Never above `peak_memory(job).total`, and close to it; no schedule is played. Of stages at both ends."""
    layer, last = layer_memory(job), job.layout.pp - 1
    return max(
        least_state_bytes(job, stage) + least_activation_bytes(layer, stage_layers(job, stage))
        for stage in {0, min(1, last), last}
    )


def least_state_bytes(job: TrainJob, stage: int) -> int:
    """What a stage holds apart from activations and logits."""
    states = state_bytes(job, stage_elements(job, held_chunks(job.layout, stage)))
    held = states.weights + states.gradients + states.optimizer
    return held + _largest(job, _gathered_bytes) + _context_bytes(job, _framework(job, states, 1))


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What one micro-batch of a rank takes, whatever the stages."""

    kept: tuple[int, int]  # by a layer without experts, and with them; nothing where it is offloaded
    working: int  # in backward, beside what is kept


def layer_memory(job: TrainJob) -> LayerMemory:
    kept = (0, 0) if job.offload_activations else (_layer_bytes(job, False), _layer_bytes(job, True))
    return LayerMemory(kept, WORKSPACE_BYTES + _largest(job, _working_bytes))


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What a stage holds at once at least."""

    alive: int  # micro-batches of its chunks, added up
    chunks: tuple[tuple[int, int], ...]  # of each, layers without experts and with them


def stage_layers(job: TrainJob, stage: int) -> StageLayers:
    layout, kinds = job.layout, job.chunk_kinds
    alive = least_alive(layout.schedule, layout.pp, job.micro_batches, job.chunks_per_stage, stage)
    return StageLayers(alive, tuple(kinds[chunk] for chunk, _ in held_chunks(layout, stage)))


def least_activation_bytes(layer: LayerMemory, held: StageLayers) -> float:
    """What a stage keeps and works with at least."""
    plain, experts = layer.kept
    kept = min(without * plain + having * experts for without, having in held.chunks)
    # The ledger rounds chunk by chunk, to whole bytes.
    return (1 - 1e-9) * (1 + _FRAGMENTS) * (held.alive * kept + layer.working)


def stage_memory(job: TrainJob, stage: int) -> MemoryLedger:
    """The memory of a rank of one pipeline stage."""
    return _Ledgers(job).ledger_of(stage)


class _Ledgers:
    """The stages of one job; what depends on the job alone, or is the same for many chunks, is worked out
    once."""

    def __init__(self, job: TrainJob) -> None:
        self.job, self.last, self.kinds = job, job.chunks - 1, job.chunk_kinds
        self.loads = stage_loads_of(job)
        self.logits = logits_bytes(job)
        self.working = _largest(job, _working_bytes)
        self.gathered = _largest(job, _gathered_bytes)
        self.layer = _largest(job, _layer_bytes)
        self.kept: dict[tuple[tuple[int, int], bool], int] = {}

    def ledger_of(self, stage: int) -> MemoryLedger:
        job, load = self.job, self.loads[stage]
        states = state_bytes(job, stage_elements(job, load.places))
        activations = load.peak({place: self._kept(place[0]) for place in load.places})
        away = 0
        if job.offload_activations:
            away, activations = activations, min(activations, self.layer)
        loss = self.logits if any(chunk == self.last for chunk, _ in load.places) else 0
        # The loss is over before backward enters the first layer, so the two never need their memory at once.
        temporary = WORKSPACE_BYTES + max(0, self.working - loss) + self.gathered
        live = max(map(max, load.peaks))
        frame = _framework(job, states, live)
        temporary += frame.buffers
        gradients = states.gradients + frame.gradients
        held = states.weights + gradients + states.optimizer
        return MemoryLedger(
            stage=stage,
            weights=states.weights,
            gradients=gradients,
            optimizer=states.optimizer,
            activations=activations,
            logits=loss,
            temporary=temporary,
            fragments=round(
                frame.fragment_share * (activations + loss + temporary)
                + frame.fragment_share_of_states * held
            ),
            context=_context_bytes(job, frame),
            host=states.host + away,
        )

    def _kept(self, chunk: int) -> int:
        look = (self.kinds[chunk], chunk == self.last)
        if look not in self.kept:
            self.kept[look] = chunk_activation_bytes(self.job, chunk)
        return self.kept[look]


def chunk_activation_bytes(job: TrainJob, chunk: int) -> int:
    """Kept for backward by one micro-batch on one chunk of a rank."""
    model = job.model
    kinds = job.chunk_kinds[chunk]
    layers = sum(kinds)
    again = layers if job.recompute_layers is None else min(job.recompute_layers, layers)
    per_token = 0.0
    for has_experts, count in enumerate(kinds):
        if count:  # where only some are recomputed, kinds take their share of them
            share = again / layers if job.recompute == "full" else 1.0
            chosen = layer_bytes_per_token(job, bool(has_experts), job.recompute)
            per_token += count * share * chosen
            if share < 1:
                per_token += count * (1 - share) * layer_bytes_per_token(job, bool(has_experts), "none")
    if chunk == job.chunks - 1:
        between = job.layout.tp if job.layout.sequence_parallel else 1
        stream = job.activation_bytes_each * model.hidden / between
        per_token += 2 * stream  # inputs of the final norm and of the head
        if job.predict_ahead:  # these once more, the next token's embedding, and the two that a product joins
            layer = layer_bytes_per_token(job, model.is_moe_layer(model.layers - 1), job.recompute)
            per_token += job.predict_ahead * (layer + 5 * stream)
    return round(per_token * job.tokens_per_rank)


def logits_bytes(job: TrainJob) -> int:
    """Logits as they come and the float32 softmax made of them, which in backward become their gradients."""
    each = job.activation_bytes_each + 4
    whole = each * job.tokens_per_rank * (job.padded_vocabulary // job.layout.tp)
    return min(whole, LOSS_PIECE_BYTES) if job.fused_loss else (1 + job.predict_ahead) * whole


def _largest(job: TrainJob, of_layer: Callable[[TrainJob, bool], int]) -> int:
    """Of the kinds of layers that the model has, without and with experts."""
    present = [
        has_experts for has_experts in (False, True) if any(kind[has_experts] for kind in job.chunk_kinds)
    ]
    return max(of_layer(job, has_experts) for has_experts in present)


def _layer_bytes(job: TrainJob, has_experts: bool) -> int:
    """What one layer keeps of one micro-batch. Offloaded, no more is on the device: what has just been computed
    is on its way to the host, or what backward needs next on its way back."""
    return round(layer_bytes_per_token(job, has_experts, job.recompute) * job.tokens_per_rank)


def _working_bytes(job: TrainJob, has_experts: bool) -> int:
    """What backward of one layer needs beside what is kept; a recomputed layer is alive as a whole."""
    per_token = working_bytes_per_token(job, has_experts)
    if job.recompute != "none":
        per_token += layer_bytes_per_token(job, has_experts, "none")
    if job.recompute not in ("none", "full"):
        per_token -= layer_bytes_per_token(job, has_experts, job.recompute)
    return round(per_token * job.tokens_per_rank)


def _gathered_bytes(job: TrainJob, has_experts: bool) -> int:
    """ZeRO-3: the layer that computes and the next, whole. ZeRO-2: gradients of a layer before they leave."""
    if job.layout.zero < 2:
        return 0
    elements = layer_elements(job.split_model, has_experts, job.layout.tp, job.layout.ep).total
    gathered = 2 * elements * job.weight_bytes_each if job.layout.zero == 3 else 0
    return gathered + elements * DTYPE_BYTES[job.gradient_dtype]


def stage_loads_of(job: TrainJob) -> tuple[StageLoad, ...]:
    """What every stage of the job holds."""
    return stage_loads(job.layout.schedule, job.layout.pp, job.micro_batches, job.chunks_per_stage)


def _framework(job: TrainJob, states: StateBytes, live: int) -> FrameworkMemory:
    parameters = states.weights // job.weight_bytes_each
    shared_by = job.layout.data_ranks if 1 <= job.layout.zero <= 2 else 1
    return framework_memory(job, parameters, parameters // shared_by, live)


def _context_bytes(job: TrainJob, frame: FrameworkMemory) -> int:
    layout = job.layout
    groups = sum(size > 1 for size in (layout.dp * layout.cp, layout.tp, layout.pp, layout.cp, layout.ep))
    return frame.context + (groups + (frame.more_groups if groups else 0)) * frame.communicator
