"""Reads an adapter's folder as PEFT and `cumulo train` write it. Called by the engine, for a start or while it
serves.

The folder is somebody else's: its header is checked against the model before a number is read, and what does not
belong to a low-rank adapter of this model is refused by name.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ModelError
from cumulo.layout.adapters import SERVED_SECTIONS
from cumulo.layout.serving import RankPart, held_parameters
from cumulo.models.files.json_file import read_json, shown
from cumulo.models.files.names_huggingface import placements
from cumulo.models.files.placement import placed_parts
from cumulo.models.files.weights_safetensors import FileTensor, read_header
from cumulo.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class AdapterSection:
    """Rows [start, stop) of a matrix of the decoder: rows `own_rows` and columns `own_columns` of a file's
    matrix."""

    source: str  # the file's module, such as model.layers.0.self_attn.q_proj
    start: int
    stop: int
    own_rows: slice
    own_columns: slice
    whole: tuple[int, int]  # outputs and inputs of the file's matrix


@dataclass(frozen=True, slots=True)
class AdaptableMatrix:
    """A matrix of the decoder that adapters can change."""

    name: str  # of the module in the decoder, such as layers.0.attention.qkv
    outputs: int
    inputs: int
    sections: tuple[AdapterSection, ...]  # in the order of their rows


def adaptable_matrices(spec: ModelSpec, part: RankPart | None = None) -> tuple[AdaptableMatrix, ...]:
    """Of a whole decoder or, by `part`, of a rank's."""
    found: dict[str, list[AdapterSection]] = {}
    inputs: dict[str, int] = {}
    held = None if part is None else held_parameters(part)
    wanted = [one for one in placements(spec) if why_not_adapted(one.target) is None]
    for one in placed_parts(wanted, held):
        (rows, columns), (into, across) = one.source_slices, one.target_slices
        module = one.target.removesuffix(".weight")
        section = AdapterSection(
            one.source.removesuffix(".weight"),
            into.start,
            into.stop,
            rows,
            columns,
            (one.placement.shape[0], one.placement.shape[1]),
        )
        found.setdefault(module, []).append(section)
        inputs[module] = across.stop - across.start
    return tuple(
        AdaptableMatrix(
            name,
            max(section.stop for section in sections),
            inputs[name],
            tuple(sorted(sections, key=lambda section: section.start)),
        )
        for name, sections in found.items()
    )


def why_not_adapted(target: str) -> str | None:
    """Why adapters of a parameter of the decoder cannot be served; None: they can."""
    if not target.startswith("layers."):
        return "the embedding and the head are served as they are"
    if ".experts." in target:
        return "routed experts are served as they are"
    if target.endswith("router.weight"):
        return "the router of experts is served as it is"
    if target.endswith("kv_b.weight"):
        return "latent attention absorbs this matrix into its queries"
    if not target.endswith(".weight") or target.split(".")[-2] not in SERVED_SECTIONS:
        return "only the matrices of attention and feed-forward can be adapted"
    return None


def unadapted_modules(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """The file's modules that adapters could name and that cannot be served, each with why."""
    for one in placements(spec):
        if one.source.endswith(".weight") and (why := why_not_adapted(one.target)) is not None:
            yield one.source.removesuffix(".weight"), why


CONFIG_NAME = "adapter_config.json"
_MOST_CONFIG_BYTES = 1 << 20
# What tells of training or of its origin, and leaves the product as it is. target_modules is what the tensors say
# too.
_HARMLESS = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora",
    "rank_pattern", "alpha_pattern", "init_lora_weights", "layers_to_transform", "layers_pattern",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "runtime_config", "qalora_group_size", "ensure_weight_tying",
})  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules saved beside the adapter (modules_to_save)",
    "lora_bias": "a bias inside the adapter (lora_bias)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "layer_replication": "replicated layers (layer_replication)",
    "trainable_token_indices": "trained embeddings of single tokens (trainable_token_indices)",
    "target_parameters": "adapted parameters outside linear layers (target_parameters)",
    "alora_invocation_tokens": "adapters that begin in mid-text (aLoRA, alora_invocation_tokens)",
    "use_qalora": "QA-LoRA",
}
# These move a part of the base model's weights into the adapter, so that it fits a changed base only.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MOST_PATTERNS = 64  # that are regular expressions; plain names are looked up
_MOST_NAMES = 100_000
_LONGEST_PATTERN = 200
_PLAIN = re.compile(r"[\w.-]+")
_REPEATED_GROUP = re.compile(r"\)[*+?{]|[*+}][*+{]")


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """PEFT's rank_pattern or alpha_pattern: another number for modules whose name ends so, or matches."""

    # Each with its number and its place in the file: as in PEFT, the first that matches counts.
    names: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    expressions: tuple[tuple[re.Pattern[str], tuple[int, float]], ...] = ()

    def value_for(self, module: str, usual: float) -> float:
        parts = module.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        found = [self.names[end] for end in ends if end in self.names]
        found += [entry for pattern, entry in self.expressions if pattern.match(module)]
        return min(found)[1] if found else usual

    @property
    def numbers(self) -> list[float]:
        return [number for _, number in (*self.names.values(), *(entry for _, entry in self.expressions))]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    rank: int
    alpha: float
    rslora: bool = False  # Kalajdzievski 2023: the scale is alpha / sqrt(rank)
    ranks: ModulePattern = field(default_factory=ModulePattern)
    alphas: ModulePattern = field(default_factory=ModulePattern)
    base_model: str | None = None  # as whoever trained it called it

    def rank_of(self, module: str) -> int:
        return int(self.ranks.value_for(module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return self.alphas.value_for(module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Of an adapter's folder, or a ModelError that says what it is instead."""
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder} with an adapter in it")
    if not path.is_file():
        raise ModelError(
            f"{folder} is not an adapter: it has no {CONFIG_NAME}, which PEFT and cumulo train write"
        )
    told = read_json(path, _MOST_CONFIG_BYTES)
    if (kind := told.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"{path} describes an adapter of type {shown(kind)}; only LORA can be served")
    for name, value in told.items():
        if name in _REFUSED and value:
            raise ModelError(f"{path} asks for {_REFUSED[name]}, which cannot be served: train without it")
        if name == "bias" and value not in (None, "none"):
            raise ModelError(
                f"{path} has bias={shown(value)}: changed biases cannot be served: train with bias=none"
            )
        if name not in _HARMLESS and name not in _REFUSED and name != "bias" and value:
            raise ModelError(
                f"{path} sets {shown(name)}, which is not known here, so the adapter is not served"
            )
    began = told.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{path} was started with init_lora_weights={shown(began)}, which changes the base model: convert it "
            "to a plain LoRA when saving (path_initial_model_for_weight_conversion)"
        )
    base = told.get("base_model_name_or_path")
    return AdapterConfig(
        int(_number(path, "r", told.get("r"))),
        _number(path, "lora_alpha", told.get("lora_alpha")),
        told.get("use_rslora") is True,
        _patterns(path, "rank_pattern", told.get("rank_pattern")),
        _patterns(path, "alpha_pattern", told.get("alpha_pattern")),
        base if isinstance(base, str) else None,
    )


def greatest_rank(folder: Path) -> int:
    """What an engine must have room for, from the configuration alone."""
    config = read_config(folder)
    return int(max([config.rank, *config.ranks.numbers]))


def _number(path: Path, name: str, value: Any) -> float:
    whole = name in ("r", "rank_pattern")
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or abs(value) > 1e9 or (whole and value < 1):
        wanted = "a whole number from 1" if whole else "a number"
        raise ModelError(f"{path}: {name} must be {wanted}, got {shown(value)}")
    return float(value)


def _patterns(path: Path, name: str, told: Any) -> ModulePattern:
    if not told:
        return ModulePattern()
    if not isinstance(told, dict) or len(told) > _MOST_NAMES:
        raise ModelError(f"{path}: {name} must be a table of module names, got {shown(told)}")
    names: dict[str, tuple[int, float]] = {}
    expressions: list[tuple[re.Pattern[str], tuple[int, float]]] = []
    for place, (key, value) in enumerate(told.items()):
        entry = place, _number(path, name, value)
        if _PLAIN.fullmatch(key):
            names[key] = entry
            continue
        # Someone else's regular expression: one that could take for ever is not tried.
        if len(key) > _LONGEST_PATTERN or len(expressions) >= _MOST_PATTERNS or _REPEATED_GROUP.search(key):
            raise ModelError(f"{path}: {name} has a pattern that is too complicated to try: {shown(key)}")
        if sum(key.count(sign) for sign in "*+{") > 3:
            raise ModelError(f"{path}: {name} has a pattern with more than three repetitions: {shown(key)}")
        try:
            expressions.append((re.compile(rf"(.*\.)?({key})$"), entry))
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(
                f"{path}: {name} has the pattern {shown(key)}, which is wrong: {error}"
            ) from None
    return ModulePattern(names, tuple(expressions))


WEIGHTS_NAME = "adapter_model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """y += scale · B (A x), for one of the file's matrices."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter in host memory, in the file's own types."""

    folder: Path
    pairs: Mapping[str, LowRankPair]  # by the file's module
    fingerprint: str  # of all that decides its results: equal ones answer alike
    base_model: str | None = None

    @property
    def rank(self) -> int:
        """The greatest."""
        return max((pair.rank for pair in self.pairs.values()), default=0)


def read_adapter(folder: Path | str, spec: ModelSpec, max_rank: int) -> AdapterWeights:
    """An adapter of the whole model `spec`, checked; ModelError if it is not one, or of a higher rank."""
    folder = Path(folder)
    config = read_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        old = (
            " (only adapter_model.bin: save it as safetensors)"
            if (folder / "adapter_model.bin").exists()
            else ""
        )
        raise ModelError(f"{folder} lacks {WEIGHTS_NAME}{old}")
    header = read_header(path)
    ranks = _checked(path, header, config, spec, max_rank)
    pairs: dict[str, LowRankPair] = {}
    digest = blake2b(digest_size=16, person=b"cumulo-adapter")
    names = {(m["module"], m["side"]): name for name in header if (m := _NAME.fullmatch(name)) is not None}
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            for module in sorted(ranks):
                a, b = (handle.get_tensor(names[module, side]).clone() for side in "AB")
                if not (a.isfinite().all() and b.isfinite().all()):
                    raise ModelError(
                        f"{path}: the adapter of {module} contains infinite or undefined numbers"
                    )
                pairs[module] = LowRankPair(a, b, config.scale_of(module))
                digest.update(f"{module} {a.dtype} {b.dtype} {pairs[module].scale!r}".encode())
                for tensor in (a, b):
                    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return AdapterWeights(folder, pairs, digest.hexdigest(), config.base_model)


def _checked(
    path: Path, header: Mapping[str, FileTensor], config: AdapterConfig, spec: ModelSpec, max_rank: int
) -> dict[str, int]:
    """The rank of every adapted module, once all tensors are known to be what they should."""
    known = {
        section.source: section.whole for matrix in adaptable_matrices(spec) for section in matrix.sections
    }
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for name, tensor in header.items():
        match = _NAME.fullmatch(name)
        if match is None:
            _refuse_tensor(path, name)
        module = match["module"]
        if module not in known:
            _refuse_module(path, module, spec, known)
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{path}: {name} has the type {tensor.dtype}; adapters are {', '.join(sorted(_FLOATS))}"
            )
        if len(tensor.shape) != 2 or (module, match["side"]) in shapes:
            raise ModelError(
                f"{path}: {name} is {list(tensor.shape)}, or there twice: it should be one matrix"
            )
        shapes[module, match["side"]] = tensor.shape
    if not shapes:
        raise ModelError(f"{path} contains no adapter: it has no tensors")
    ranks: dict[str, int] = {}
    for module in sorted({module for module, _ in shapes}):
        rank, (outputs, inputs) = config.rank_of(module), known[module]
        a, b = shapes.get((module, "A")), shapes.get((module, "B"))
        if a != (rank, inputs) or b != (outputs, rank):
            raise ModelError(
                f"{path}: the adapter of {module} is A {list(a or ())} and B {list(b or ())}, but the model and "
                f"rank {rank} want A [{rank}, {inputs}] and B [{outputs}, {rank}]: it belongs to another model, "
                "or its configuration to another adapter"
            )
        if rank > max_rank:
            raise ModelError(
                f"{path}: {module} has rank {rank}, and this engine has room for rank {max_rank}: start it with "
                f"--max-lora-rank {rank}"
            )
        if not math.isfinite(config.scale_of(module)):
            raise ModelError(f"{path}: the scale of {module} is not a number")
        ranks[module] = rank
    return ranks


def _refuse_tensor(path: Path, name: str) -> NoReturn:
    what = (
        "DoRA's magnitudes"
        if "lora_magnitude" in name
        else "an adapted embedding"
        if "embedding" in name
        else ""
    )
    raise ModelError(
        f"{path} contains {name[:200]!r}, {what or 'which is no part of a plain LoRA adapter'}; it cannot be served"
    )


def _refuse_module(
    path: Path, module: str, spec: ModelSpec, known: Mapping[str, tuple[int, int]]
) -> NoReturn:
    for other, why in unadapted_modules(spec):
        if module == other:
            raise ModelError(f"{path} adapts {module}, which cannot be served: {why}")
    hint = did_you_mean(module[:200], known, otherwise="")
    raise ModelError(
        f"{path} adapts {module[:200]!r}, which this model does not have{hint}; it belongs to another model"
    )
