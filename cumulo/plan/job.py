"""TrainJob: one training step to be planned: a model, how it is split, and how a batch is cut. The memory ledger,
the cost model and the search all take one.

    job = TrainJob(model("gpt-175b"), Layout(dp=16, tp=8, pp=8), global_batch=1536, sequence_length=2048)
    job.micro_batches       # 96 of each data-parallel rank
    job.chunk_layers        # (12, 12, 12, 12, 12, 12, 12, 12)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from cumulo.errors import ConfigError
from cumulo.layout.check import layout_problems
from cumulo.layout.layout import Layout, chunks_per_stage, pipeline_chunks, split_layers
from cumulo.spec.model import ModelSpec

# What backward computes again. full: whole layers, of which only the input is kept. selective: the attention
# between its projections (Korthikanti et al. 2022; with flash attention it is what the kernel does anyway). Joined
# by +: the operations that cumulo.train can compute again by themselves, under its names.
Recompute = Literal[
    "none", "selective", "full",
    "norm", "activation", "attention", "norm+activation", "norm+attention", "activation+attention",
    "norm+activation+attention",
]  # fmt: skip
OPERATIONS = ("norm", "activation", "attention")
LORA_TARGETS = (
    "qkv",
    "output",
    "gate_up",
    "down",
)  # projections that adapters can stand beside, as in cumulo.train
OptimizerKind = Literal["adamw", "adamw8bit", "muon"]  # as cumulo.train names them
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What is alike in a goal and in every job that is tried for it."""

    dtype: Literal["bfloat16", "float16", "float32", "float8"] = "bfloat16"  # of the matrix products
    optimizer: OptimizerKind = "adamw"
    offload_optimizer: bool = False  # its states and its step are in the host's memory
    offload_activations: bool = False  # what backward needs waits in the host's memory
    narrow_activations: bool = False  # ... or is kept in 8 bits (DeepSeek-V3, section 3.3.3)
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of the optimizer's, beside a float32 copy
    predict_ahead: int = 0  # further tokens that extra layers predict (DeepSeek-V3, section 2.2)
    # Only adapters of this rank are trained (Hu et al. 2021), beside these projections; the weights are frozen.
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = LORA_TARGETS
    frozen_bits: Literal[4, 8, 16] = 16  # of a frozen weight (Dettmers et al. 2023: 4)
    software: str = "current"  # the generation of software whose efficiency curves hold


@dataclass(frozen=True, slots=True)
class TrainJob(TrainSettings):
    model: ModelSpec
    layout: Layout
    global_batch: int  # sequences of one optimizer step, over everything
    sequence_length: int
    micro_batch: int = 1  # sequences computed at once by one data-parallel rank
    recompute: Recompute = "none"
    recompute_layers: int | None = None  # with full: of each chunk only this many layers; None: all
    gradient_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # in which gradients are summed
    master_weights: bool = True  # below 32 bits: the optimizer keeps a float32 copy
    flash_attention: bool = True  # scores are never stored
    fused_loss: bool = True  # logits become the loss a piece at a time; False: all of a micro-batch's at once
    dropout: bool = False  # its masks are stored
    # How tokens reach their experts. once: a token travels once to each rank that wants it, in sizes only the
    # device knows (DeepEP, HybridEP). all-to-all: once for each expert, and the host waits for sizes in each layer.
    expert_exchange: Literal["all-to-all", "once"] = "all-to-all"
    # Experts are spread over the tensor-parallel ranks, too, each of them whole (Liu et al. 2025, MoE parallel
    # folding: an expert tensor parallelism of 1); else these share every expert.
    whole_experts: bool = False
    overlap_expert: bool = False  # ... behind the computation of another micro-batch
    overlap_data: bool = True  # gradients and weights travel while layers compute
    overlap_tensor: bool = False  # tensor-parallel collectives are cut up and hidden behind matrix products

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))

    # -- the batch --------------------------------------------------------------------------------------
    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one step."""
        return self.global_batch // (self.layout.dp * self.micro_batch)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one micro-batch on one rank: its sequences, over the context-parallel ranks."""
        return self.micro_batch * self.sequence_length // self.layout.cp

    @property
    def split_model(self) -> ModelSpec:
        """The model as its tensor-parallel ranks hold it: where these are more than its key/value heads, several
        ranks hold the same head, each for its own query heads."""
        model, tp = self.model, self.layout.tp
        return model if model.kv_heads >= tp or model.mla is not None else _with_repeated_heads(model, tp)

    # -- the model over stages --------------------------------------------------------------------------
    @property
    def chunks_per_stage(self) -> int:
        return chunks_per_stage(self.layout)

    @property
    def chunks(self) -> int:
        """Chunks a micro-batch passes."""
        return pipeline_chunks(self.layout)

    @property
    def chunk_layers(self) -> tuple[int, ...]:
        """Layers of each chunk, in the order a micro-batch passes them."""
        return split_layers(self.model.layers, self.chunks)

    @property
    def chunk_kinds(self) -> tuple[tuple[int, int], ...]:
        """For each chunk: its layers without and with experts."""
        return _chunk_kinds(self.model, self.chunks)

    @property
    def recomputed_operations(self) -> tuple[str, ...]:
        """Those that are computed again by themselves, not as part of a whole layer."""
        return tuple(name for name in OPERATIONS if name in self.recompute.split("+"))

    # -- bytes of a number ------------------------------------------------------------------------------
    @property
    def weight_bytes_each(self) -> int:
        """Bytes of a weight of the copy that computes. float8 products are made from 16-bit weights, as all
        recipes do."""
        return max(2, DTYPE_BYTES[self.dtype])

    @property
    def activation_bytes_each(self) -> int:
        return max(2, DTYPE_BYTES[self.dtype])

    # -- what one rank holds of a micro-batch, in bytes ---------------------------------------------------
    @property
    def stream_bytes(self) -> int:
        """The residual stream, as it enters a layer."""
        return self.tokens_per_rank * self.model.hidden * self.activation_bytes_each

    @property
    def key_value_bytes(self) -> int:
        """One layer's keys and values, of all heads: each tensor-parallel rank has an equal share."""
        numbers = 2 * self.split_model.kv_heads * self.model.head_dim
        return self.tokens_per_rank * numbers * self.activation_bytes_each

    @property
    def expert_ranks(self) -> int:
        """Ranks that experts are spread over, as publishers count them."""
        return self.layout.ep * (self.layout.tp if self.whole_experts else 1)

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Ranks and stride of each axis: the layout's, but for experts that tensor-parallel ranks hold whole."""
        axes = self.layout.axes
        return {**axes, "ep": (self.expert_ranks, 1)} if self.whole_experts else axes

    @property
    def padded_vocabulary(self) -> int:
        """Up to a multiple of 128 for each tensor-parallel rank, so that its slices are alike and aligned."""
        unit = 128 * self.layout.tp
        return -(-self.model.vocab_size // unit) * unit


@cache
def _with_repeated_heads(model: ModelSpec, tp: int) -> ModelSpec:
    return replace(model, kv_heads=tp)


@cache
def _chunk_kinds(model: ModelSpec, chunks: int) -> tuple[tuple[int, int], ...]:
    kinds, layer = [], 0
    for layers in split_layers(model.layers, chunks):
        with_experts = sum(model.is_moe_layer(number) for number in range(layer, layer + layers))
        kinds.append((layers - with_experts, with_experts))
        layer += layers
    return tuple(kinds)


def _problems(job: TrainJob) -> Iterator[str]:
    for name in ("global_batch", "sequence_length", "micro_batch"):
        if getattr(job, name) < 1:
            yield f"{name.replace('_', ' ')} must be 1 or more, got {getattr(job, name)}"
            return
    if job.recompute not in get_args(Recompute):
        yield f"recompute is none, full, selective, or some of {'+'.join(OPERATIONS)}, got {job.recompute!r}"
    # Stages may be cut as if embedding and head were layers, so that the first and the last chunk have none.
    yield from layout_problems(
        job.model,
        job.layout,
        job.sequence_length,
        job.global_batch,
        job.micro_batch,
        ends=2,
        repeats_heads=True,
    )
    if job.whole_experts and (job.model.moe is None or job.model.moe.experts % job.expert_ranks):
        yield f"whole experts over {job.expert_ranks} ranks (ep × tp) do not divide this model's experts"
    if job.whole_experts and job.layout.tp > 1 and not job.layout.sequence_parallel:
        yield "whole experts over tensor-parallel ranks need sequence parallelism: each rank sends its own tokens"
    if job.predict_ahead < 0:
        yield f"predict_ahead is the number of further tokens to predict, 0 or more; got {job.predict_ahead}"
    if job.lora_rank is not None and job.lora_rank < 1:
        yield f"lora_rank must be 1 or more, got {job.lora_rank}"
    if not job.lora_targets or set(job.lora_targets) - set(LORA_TARGETS):
        got = ", ".join(job.lora_targets) or "none"
        yield f"LoRA targets are one or more of {', '.join(LORA_TARGETS)}, got {got}"
    if job.recompute_layers is not None and (job.recompute != "full" or job.recompute_layers < 0):
        yield f"recompute_layers {job.recompute_layers} goes with full recomputation and is 0 or more"
