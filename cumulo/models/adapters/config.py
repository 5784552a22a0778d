"""AdapterConfig: what an adapter_config.json of PEFT says, as far as serving needs it. Read by `read_adapter`.

Fields that would change the result in a way this decoder does not compute are refused by name, and so are fields
that nobody here knows: an adapter served wrongly looks like a bad model.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cumulo.errors import ModelError
from cumulo.models.files.json_file import read_json, shown

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
