"""HeadConfig: what the training of a draft head is told, from a YAML file with `kind: eagle`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from cumulo.base import strict
from cumulo.errors import ConfigError

KIND = "eagle"
OWN_QUESTIONS = "own"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    folder: str = "runs/head"  # where answers, the trained head and its log go
    kind: str = KIND
    model: str | None = None  # that is drafted for; None: the built-in one
    # A text file with one prompt per line; None: built-in conversations; "own": half of them what the model itself
    # expects to be asked.
    prompts: str | None = None
    # Text files with prompts that are not trained on: the report tells how often it is right.
    judge: tuple[str, ...] = ()
    answers: int = 320  # that the model gives itself; the head learns from them
    answer_tokens: int = 96
    draft_vocabulary: int = 4096  # tokens the head can propose: the most frequent of the answers
    ffn_hidden: int | None = None  # of the head's feed-forward layer; None: as wide as the model's
    steps: int = 400
    minutes: float | None = None  # of training, instead of steps
    batch_tokens: int = 512  # of answers with their prompts, in one step
    unroll: int = 2  # tokens that are proposed behind each other, each trained
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    device: str = "auto"  # cpu or cuda; auto: a GPU if there is one
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind != KIND:
            raise ConfigError(f"kind must be {KIND}, got {self.kind!r}")
        for name in ("answers", "answer_tokens", "draft_vocabulary", "steps", "batch_tokens", "unroll"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("ffn_hidden", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate must be more than 0, got {self.learning_rate}")


def read_head_config(path: Path | None, changes: Mapping[str, str]) -> HeadConfig | None:
    """From a YAML file with `kind: eagle`, with settings on top; None if it is not one."""
    try:
        fields = yaml.safe_load(path.read_text("utf-8")) if path is not None else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None  # who reads it as a model's configuration says why
    if not isinstance(fields, Mapping) or fields.get("kind") != KIND:
        return None
    changed = {name: strict.set_value(name, text) for name, text in changes.items()}
    return strict.build(HeadConfig, {**fields, **changed}, str(path))
