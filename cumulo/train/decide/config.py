"""TrainConfig: everything a training run is told, from YAML or Python. Read by `Trainer` and `cumulo train`.

Every setting is documented where it is defined. `check` refuses what cannot be before anything is allocated.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import yaml

from cumulo.base import strict
from cumulo.collectives.decide.measured import parse_choices, read_collective_profile
from cumulo.errors import ConfigError
from cumulo.layout.check import batch_problem, layout_problems
from cumulo.layout.layout import Layout, nearest_divisor
from cumulo.spec.model import ModelSpec, MoESpec


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model: sizes of a new one, or `start_from` an existing one (its sizes and tokenizer are then used)."""

    start_from: str | None = None  # a folder, a GGUF file or a Hugging Face name
    family: Literal["llama", "qwen3", "mixtral", "qwen3_moe"] = "llama"
    hidden: int = 192  # numbers that stand for a token between the layers
    layers: int = 4
    heads: int = 6  # attention heads that ask
    kv_heads: int | None = None  # heads of keys and values; null: as many as heads
    head_dim: int | None = None  # null: hidden / heads
    ffn_hidden: int | None = None  # null: 8/3 of hidden, up to a multiple of 64 (Shazeer 2020)
    rope_theta: float = 10000.0  # base of the rotary positions
    norm_eps: float = 1e-5
    tied_embeddings: bool = True  # one matrix reads tokens and writes them
    # The vocabulary is filled up to a multiple of this, so that tensor parallelism divides it.
    vocab_multiple: int = 1
    moe: MoESpec | None = None  # Only families with experts have it.


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The tokenizer: trained on the data, or the one of an existing model."""

    kind: Literal["bytes", "bpe"] = "bpe"  # byte-pair encoding, or plain bytes
    vocab_size: int = 2048  # size of a BPE vocabulary, special tokens included
    start_from: str | None = None  # a folder with tokenizer.json to use instead


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is read. Sources are text, .jsonl, .json or .parquet files, folders of these, or `python-stdlib`."""

    sources: tuple[str, ...] = ("python-stdlib",)
    # chat: rows with messages, prompt and completion, instruction and output (Alpaca) or conversations (ShareGPT);
    # only the answers are learned.
    format: Literal["text", "chat"] = "text"
    text_field: str = "text"  # the field of a row that contains its text
    sequence_length: int = 256  # tokens of a row of a batch
    workers: int = 2  # processes that tokenize
    prefetch_batches: int = 4  # batches that are read in advance
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW for everything, or Muon for the matrices inside layers and AdamW for the rest.

    adamw8bit keeps AdamW's state in 8 bits a number, those of the embedding and of small tensors excepted.
    """

    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    offload: bool = False  # keep state and master weights in the host's memory, and compute the step there
    learning_rate: float = 1e-3  # the highest one of AdamW
    muon_learning_rate: float = 0.02  # the highest one of Muon
    muon_momentum: float = 0.95
    weight_decay: float = 0.1  # for matrices; norms and biases have none
    beta1: float = 0.9  # AdamW's decay of the mean of gradients
    beta2: float = 0.95  # AdamW's decay of the mean of their squares
    epsilon: float = 1e-8
    clip_norm: float = 1.0  # the largest norm of a step's gradients; 0: gradients are not clipped


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """The learning rate over the run: warm-up, then a cosine, or level and then down (warm-up-stable-decay)."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 20  # steps in which the learning rate rises
    decay_share: float = 0.2  # wsd: the share of all steps, at the end, in which it falls
    final_share: float = 0.1  # the share of the learning rate that is left at the end


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Checkpoints: what a run resumes from."""

    every_steps: int = 100  # 0: only at the end
    keep: int = 2  # number of the latest checkpoints that are kept
    asynchronous: bool = True  # checkpoints are written while training goes on
    memory_every_steps: int = 0  # copies in the memory of the node and of another node; 0: none
    memory_folder: str = "/dev/shm"  # a folder that is memory


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """When a loss is no number or jumps: stop, or go back to the last checkpoint and past the data that did it."""

    action: Literal["stop", "rollback", "ignore"] = "stop"
    spike_deviations: float = 8.0  # a jump is so many standard deviations above the mean; 0: only NaN counts
    window_steps: int = 50  # steps that the mean is taken of
    most_rollbacks: int = 3


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): the model is frozen, two thin matrices next to each projection learn."""

    rank: int = 8
    alpha: float = 16.0  # adapters are scaled by alpha / rank
    targets: tuple[str, ...] = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Faults of a run in several processes: what happens when one of them dies or waits for ever."""

    most_restarts: int = 3  # restarts from the latest checkpoint; then the run ends
    # A step that takes longer counts as a hang: the ranks that did not arrive are named, and all are restarted.
    # Without it, the run learns it from its steps: six times the longest of the last 50, at least 10 s.
    hang_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrainConfig:
    folder: str = "runs/train"  # checkpoints, log, plot and the finished model go here
    steps: int = 300  # optimizer steps
    batch_sequences: int = 16  # sequences of an optimizer step, on all ranks together
    micro_batch: int = 16  # sequences that a rank computes at once; gradients of the others are added up
    seed: int = 0  # of the first weights and of the order of the data
    device: str = "auto"  # cpu or cuda; auto: the GPU if there is one
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of weights and computation
    master_weights: bool = True  # with bfloat16, the optimizer keeps a float32 copy of the weights
    # Matrix products inside layers, those of experts excepted: as dtype says (wide), or in 8 bits where a GPU has
    # them, with one scale for each matrix (fp8) or for each 128 numbers (fp8_blocks).
    products: Literal["wide", "fp8", "fp8_blocks"] = "wide"
    compile: bool = False  # compute layers by torch.compile instead of our own fused operations
    recompute: bool = False  # activation checkpointing: compute layers again in backward, to save memory
    # Compute only these operations again instead of whole layers: they are cheap to compute and large to keep.
    recompute_operations: tuple[Literal["norm", "activation", "attention"], ...] = ()
    offload_activations: bool = False  # keep what backward needs in the host's memory (GPU only)
    balance_loss: float = 0.01  # weight of the loss that balances experts
    # Routers with a selection bias: how far it moves against the load in a step (DeepSeek-V3: 0.001); 0: not.
    expert_bias_rate: float = 0.0
    # With layout.ep: every so many steps experts move to even out the load of the ranks; 0: they stay.
    expert_rebalance_every_steps: int = 0
    # The held-out loss is measured every so many steps; 0: only at the end. Held out: 1% of the documents.
    evaluate_every_steps: int = 0
    evaluate_sequences: int = 64  # sequences that a held-out loss is measured on; 0: nothing is held out
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    lora: LoraConfig | None = None
    layout: Layout = field(default_factory=Layout)
    # With the schedules dualpipe and dualpipe-v: a forward and the backward it is paired with run at the same time,
    # so that one computes while the other waits for messages of experts or of tensor parallelism.
    overlap_passes: bool = False
    # Gradients are summed over ranks in pieces of this size, while backward runs.
    gradient_bucket_mib: float = 25.0
    # With layout.zero 2 and 3: a layer's weights are gathered while the layer before it computes (pre), or when it
    # has ended (post), which holds the weights of one layer less.
    fsdp_prefetch: Literal["pre", "post"] = "pre"
    # Which of our schedules carry out collectives of CPU ranks: all_reduce=ring,all_gather=bruck; auto: the tuner's
    # choice; empty: torch.distributed's.
    collective: str = ""
    # A file of `cumulo bench collectives --profile`, which decides where `collective` does not.
    collective_profile: str = ""
    # The first rank answers Prometheus at http://metrics_host:metrics_port/metrics; 0: nowhere.
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        # Only numbers that are right by themselves can be held against each other.
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))
        if (spec := known_spec(self)) is not None:
            check_layout(self, spec)


def load_config(path: Path, changes: Mapping[str, str] | None = None) -> TrainConfig:
    """From a YAML file, with settings such as {"optimizer.learning_rate": "1e-3"} on top. Data and models that are
    not in the working directory are looked for next to the file."""
    data = strict.read_yaml(path)
    config = config_from(data or {}, str(path), changes)

    def found(name: str | None) -> str | None:
        beside = path.parent / (name or "")
        return str(beside) if name and not Path(name).expanduser().exists() and beside.exists() else name

    tokenizer = replace(config.data.tokenizer, start_from=found(config.data.tokenizer.start_from))
    sources = tuple(found(one) or one for one in config.data.sources)
    return replace(
        config,
        data=replace(config.data, sources=sources, tokenizer=tokenizer),
        model=replace(config.model, start_from=found(config.model.start_from)),
    )


def config_from(
    data: Mapping[str, Any], where: str = "config", changes: Mapping[str, str] | None = None
) -> TrainConfig:
    table: dict[str, Any] = dict(data) if isinstance(data, Mapping) else data
    for name, text in (changes or {}).items() if isinstance(data, Mapping) else ():
        _set(table, name, strict.set_value(name, text))
    return strict.build(TrainConfig, table, where)


def config_text(config: TrainConfig) -> str:
    """YAML that `load_config` reads back."""
    return yaml.safe_dump(_plain(config), sort_keys=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        inner = table.get(part) or {}
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{name!r} cannot be set: {part!r} is a value, not a table")
        table[part] = dict(inner)
        table = table[part]
    table[last] = value


def known_spec(config: TrainConfig) -> ModelSpec | None:
    """The model as far as the configuration says: a vocabulary of 0 is not known yet, and an existing model is not
    opened."""
    if config.model.start_from is not None:
        return None
    tokenizer = config.data.tokenizer
    known = tokenizer.kind == "bpe" and tokenizer.start_from is None
    return new_spec(config, tokenizer.vocab_size if known else 0, ())


def new_spec(config: TrainConfig, vocabulary: int, eos_ids: tuple[int, ...]) -> ModelSpec:
    """The spec of a new model. `vocabulary`: the tokenizer's size, before it is filled up."""
    model = config.model
    ffn_hidden = model.ffn_hidden
    if ffn_hidden is None:
        ffn_hidden = -(-model.hidden * 8 // 3 // 64) * 64
    return ModelSpec(
        family=model.family,
        vocab_size=-(-vocabulary // model.vocab_multiple) * model.vocab_multiple,
        hidden=model.hidden,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        head_dim=model.head_dim or model.hidden // model.heads,
        ffn_hidden=model.moe.expert_hidden if model.family == "mixtral" and model.moe else ffn_hidden,
        max_context=config.data.sequence_length,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        tied_embeddings=model.tied_embeddings,
        qk_norm=model.family.startswith("qwen3"),
        moe=model.moe,
        bos_token_id=None,
        eos_token_ids=eos_ids,
        dtype=config.dtype,
    )


def check_layout(config: TrainConfig, spec: ModelSpec) -> None:
    if problems := list(config_layout_problems(config, spec)):
        raise ConfigError("; ".join(problems))


def config_layout_problems(config: TrainConfig, spec: ModelSpec) -> Iterator[str]:
    """Why this model cannot be trained so. A vocabulary of 0 is one that is not known yet."""
    layout, length = config.layout, config.data.sequence_length
    yield from layout_problems(spec, layout, length, config.batch_sequences, config.micro_batch)
    if spec.vocab_size % layout.tp:
        yield (
            f"tp {layout.tp} cannot share the vocabulary of {spec.vocab_size} evenly; fill it up with "
            f"model.vocab_multiple: {layout.tp}, or take tp {nearest_divisor(spec.vocab_size, layout.tp)}"
        )


_WHOLE = (
    "steps", "batch_sequences", "micro_batch", "data.sequence_length", "data.workers", "data.prefetch_batches",
    "model.hidden", "model.layers", "model.heads", "model.vocab_multiple", "checkpoint.keep", "guard.window_steps",
)  # fmt: skip
_POSITIVE = ("gradient_bucket_mib", "optimizer.learning_rate", "optimizer.epsilon")
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "optimizer.muon_momentum")
_SHARES = ("schedule.decay_share", "schedule.final_share")
_NOT_NEGATIVE = (
    "optimizer.clip_norm", "optimizer.weight_decay", "checkpoint.every_steps", "checkpoint.memory_every_steps",
    "balance_loss", "expert_bias_rate", "expert_rebalance_every_steps", "evaluate_every_steps",
    "evaluate_sequences", "faults.most_restarts", "metrics_port",
)  # fmt: skip
_BOUNDS: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (_WHOLE, "1 or more", lambda value: value >= 1),
    (_POSITIVE, "more than 0", lambda value: value > 0),
    (_BELOW_ONE, "from 0 to below 1", lambda value: 0 <= value < 1),
    (_SHARES, "from 0 to 1", lambda value: 0 <= value <= 1),
    (_NOT_NEGATIVE, "0 or more", lambda value: value >= 0),
)


def _problems(config: TrainConfig) -> Iterator[str]:
    for names, wanted, holds in _BOUNDS:
        for name in names:
            if not holds(value := attrgetter(name)(config)):
                yield f"{name} must be {wanted}, got {value}"
    if config.faults.hang_after_s is not None and config.faults.hang_after_s <= 0:
        yield f"faults.hang_after_s must be more than 0, got {config.faults.hang_after_s}"
    if config.batch_sequences > 0 and config.micro_batch > 0:
        problem = batch_problem(config.layout, config.batch_sequences, config.micro_batch)
        yield from [problem] if problem else []
    model = config.model
    if model.start_from is None:
        if model.heads > 0 and model.head_dim is None and model.hidden % model.heads:
            yield f"model.hidden {model.hidden} does not divide by model.heads {model.heads}; set head_dim"
        kv_heads = model.heads if model.kv_heads is None else model.kv_heads
        if kv_heads < 1 or model.heads % kv_heads:
            yield f"model.heads {model.heads} does not divide by model.kv_heads {kv_heads}"
        if (model.moe is None) == model.family.endswith(("mixtral", "moe")):
            wanted = "needs a table model.moe" if model.moe is None else "has no experts: remove model.moe"
            yield f"model.family {model.family!r} {wanted}, or take another family"
    if config.data.sequence_length > 1 << 20:
        yield f"data.sequence_length is at most {1 << 20:,}, got {config.data.sequence_length:,}"
    if config.data.tokenizer.kind == "bpe" and config.data.tokenizer.vocab_size < 300:
        yield f"a BPE vocabulary has 300 or more entries, got {config.data.tokenizer.vocab_size}"
    if config.overlap_passes and config.layout.zero >= 2:
        yield "overlap_passes needs layout.zero 0 or 1: sharded weights come and go for one pass at a time"
    try:
        parse_choices(config.collective)
        read_collective_profile(config.collective_profile)
    except ConfigError as error:
        yield str(error)
    schedule = config.schedule
    if not 0 <= schedule.warmup_steps < max(config.steps, 1):
        yield (
            f"schedule.warmup_steps {schedule.warmup_steps} must be fewer than steps {config.steps}; "
            "for a short run: --set schedule.warmup_steps=0"
        )
    if config.guard.action == "rollback" and not config.checkpoint.every_steps:
        yield "guard.action rollback needs checkpoints: set checkpoint.every_steps"
    if config.recompute and config.recompute_operations:
        yield "recompute computes whole layers again, recompute_operations parts of them: set one of the two"
    if config.lora is not None and config.model.start_from is None:
        yield "lora adapts an existing model: set model.start_from"
    if config.products != "wide" and config.dtype != "bfloat16":
        yield f"products: {config.products} goes with dtype: bfloat16, and dtype is {config.dtype}"
    if config.products != "wide" and config.lora is not None:
        yield f"products: {config.products} is not for matrices with adapters: leave it wide, or lora out"
    if config.compile and (config.layout.pp > 1 or config.layout.ep > 1):
        yield f"compile does not know pipelines and spread experts yet: leave out it, or them ({config.layout})"
    if config.expert_rebalance_every_steps and config.layout.ep == 1:
        yield "expert_rebalance_every_steps moves experts between ranks, and layout.ep is 1: set both or none"
    if config.lora is not None and config.lora.rank < 1:
        yield f"lora.rank must be 1 or more, got {config.lora.rank}"
    if not config.data.sources:
        yield "data.sources is empty: name files, folders or python-stdlib"
