"""The configuration a run starts with: a file's, an earlier run's or the built-in one. `cumulo train` asks."""

import json
from collections.abc import Callable
from pathlib import Path

import yaml

from cumulo.errors import ConfigError
from cumulo.train.decide.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
    config_from,
    config_text,
    load_config,
)


def builtin_config(folder: str) -> TrainConfig:
    """A million parameters, half a million tokens of the standard library: what two cores do in two minutes."""
    return TrainConfig(
        folder=folder,
        steps=160,
        batch_sequences=12,
        micro_batch=12,
        model=ModelConfig(hidden=128, layers=4, heads=4, ffn_hidden=384),
        data=DataConfig(sequence_length=256, tokenizer=TokenizerConfig(kind="bpe", vocab_size=2048)),
        optimizer=OptimizerConfig(
            kind="muon", learning_rate=0.005, muon_learning_rate=0.02, weight_decay=0.01
        ),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=10, decay_share=0.4, final_share=0.0),
        checkpoint=CheckpointConfig(every_steps=50, keep=2),
        evaluate_sequences=32,
    )


def free_folder(name: str = "runs/python") -> str:
    """`name`, or with a number where earlier runs are."""
    folder, number = Path(name), 1
    while folder.exists():
        number += 1
        folder = Path(f"{name}-{number}")
    return str(folder)


def configuration(
    path: Path | None, changes: dict[str, str], resume: bool, tell: Callable[[str], None]
) -> TrainConfig:
    """From the file, from the folder of the run to resume, or the built-in one; then apply the changes."""
    folder = changes.get("folder")
    changes = {name: json.dumps(value) if name == "folder" else value for name, value in changes.items()}
    if path is not None:
        return load_config(path, _with_warmup(path, changes, tell))
    if resume:
        if folder is None:
            raise ConfigError("--resume needs a run to resume: give its --folder or its configuration file")
        earlier = Path(folder) / "config.yaml"
        if not earlier.is_file():
            raise ConfigError(f"{folder} contains no run to resume: there is no config.yaml in it")
        return load_config(earlier, changes)
    built_in = yaml.safe_load(config_text(builtin_config(folder or free_folder())))
    return config_from(built_in, "the built-in configuration", changes)


def _with_warmup(path: Path, changes: dict[str, str], tell: Callable[[str], None]) -> dict[str, str]:
    """`--steps` that leave no room for the file's warm-up shorten it, too: who tries ten steps means ten steps."""
    if "steps" not in changes or "schedule.warmup_steps" in changes or not changes["steps"].isdecimal():
        return changes
    steps = int(changes["steps"])
    try:
        planned = yaml.safe_load(path.read_text("utf-8"))["schedule"]["warmup_steps"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError):
        planned = ScheduleConfig().warmup_steps
    if not isinstance(planned, int) or planned < steps:
        return changes
    tell(f"warm-up shortened from {planned} to {steps // 10} steps, because the run has {steps}")
    return {**changes, "schedule.warmup_steps": str(steps // 10)}
