"""The configuration a run starts with: a file's, an earlier run's, the built-in one, or one for a user's own texts
or conversations. `cumulo train` asks."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from cumulo.errors import ConfigError
from cumulo.train.data.conversations import FORMS, is_conversation
from cumulo.train.data.dataset_build import ROWS, find_files, pieces_of, read_rows
from cumulo.train.decide.config import (
    CheckpointConfig,
    DataConfig,
    LoraConfig,
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


# A run on a user's own data reads it so often at most, and takes so many steps at least and at most.
MOST_PASSES = {"text": 20, "chat": 4}
LEAST_STEPS, MOST_STEPS = 20, 3000
# Bytes of a file for a token: English with 2,048 entries; conversations in JSON with a model's own tokenizer.
BYTES_PER_TOKEN = {"text": 2.9, "chat": 4.5}


def own_data_config(
    paths: Sequence[Path], model: str | None, folder: str | None, tell: Callable[[str], None]
) -> TrainConfig:
    """For files and folders of texts or conversations. Texts train a new small model, conversations the built-in
    one; `model` is another to start from. A model that is started from learns low-rank adapters."""
    files = find_files([str(path) for path in paths])
    kind, text_field = _kind_of_rows(files)
    size = sum(file.stat().st_size for file in files)
    config = builtin_config(folder or free_folder(paths))
    if kind == "chat" or model is not None:
        config = replace(
            config, batch_sequences=4, micro_batch=4, model=ModelConfig(start_from=model or "built-in"),
            lora=LoraConfig(), optimizer=OptimizerConfig(kind="adamw", learning_rate=5e-4, weight_decay=0.0),
        )  # fmt: skip
    data = replace(config.data, sources=tuple(map(str, paths)), format=kind, text_field=text_field)
    batch_tokens = config.batch_sequences * data.sequence_length
    one_pass = max(1, round(size / BYTES_PER_TOKEN[kind] / batch_tokens))
    usual = config.steps if kind == "text" else LEAST_STEPS
    steps = min(max(one_pass, min(usual, MOST_PASSES[kind] * one_pass), LEAST_STEPS), MOST_STEPS)
    what = "conversations" if kind == "chat" else "text"
    tell(f"{size:,} bytes of {what} in {len(files)} file{'s' if len(files) > 1 else ''}")
    schedule = replace(config.schedule, warmup_steps=max(1, min(20, steps // 10)))
    return replace(config, steps=steps, data=data, schedule=schedule)


def _kind_of_rows(files: Sequence[Path]) -> tuple[Literal["text", "chat"], str]:
    """Whether files contain texts or conversations, and the field of a row with its text."""
    kinds: dict[Literal["text", "chat"], Path] = {}
    field = "text"
    for file in files:
        rows = (row for piece in pieces_of([file])[:1] for _, row in read_rows(piece))
        row = next(rows, None) if file.suffix in ROWS else None
        kind: Literal["text", "chat"] = "chat" if is_conversation(row) else "text"
        kinds[kind] = file
        if isinstance(row, dict) and kind == "text" and field not in row:
            texts = [name for name, value in row.items() if isinstance(value, str)]
            if len(texts) != 1:
                raise ConfigError(
                    f"{file}: a row has the fields {', '.join(map(str, row))}. A text has a field 'text' (or "
                    f"data.text_field of a configuration), a conversation has {FORMS}"
                )
            (field,) = texts
    if len(kinds) > 1:
        raise ConfigError(
            f"{kinds['chat']} contains conversations and {kinds['text']} texts: train on one kind at a time"
        )
    return next(iter(kinds)), field


def free_folder(paths: Sequence[Path] = ()) -> str:
    """Where a run on this data goes."""
    return next(one for one in _folders(paths) if not Path(one).exists())


def _folders(paths: Sequence[Path]) -> Iterator[str]:
    """A name, then with a number, for the runs after the first."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", paths[0].resolve().stem) if paths else "python"
    return (f"runs/{name}-{number}" if number > 1 else f"runs/{name}" for number in itertools.count(1))


def _latest(paths: Sequence[Path]) -> str:
    made = itertools.takewhile(lambda one: Path(one).exists(), _folders(paths))
    begun = [one for one in made if (Path(one) / "config.yaml").is_file()]
    if not begun:
        raise ConfigError(f"--resume finds no run in {next(_folders(paths))}: give the run's --folder")
    return begun[-1]


def configuration(
    paths: Sequence[Path],
    changes: dict[str, str],
    resume: bool,
    tell: Callable[[str], None],
    model: str | None = None,
) -> TrainConfig:
    """From a YAML file, for own data, from the folder of the run to resume, or the built-in one; then apply the
    changes."""
    folder = changes.get("folder")
    changes = {name: json.dumps(value) if name == "folder" else value for name, value in changes.items()}
    if resume and (not paths or not is_configuration(paths[0])):
        if folder is None:
            tell(f"the run to resume: {(folder := _latest(paths))}")
        earlier = Path(folder) / "config.yaml"
        if not earlier.is_file():
            raise ConfigError(f"{folder} contains no run to resume: there is no config.yaml in it")
        return load_config(earlier, changes)
    if paths and is_configuration(paths[0]):
        if len(paths) > 1:
            raise ConfigError(f"{paths[0]} is a configuration: it names the data, so give it alone")
        if model is not None:
            raise ConfigError(f"{paths[0]} is a configuration: set model.start_from in it, or with --set")
        return load_config(paths[0], _with_warmup(_planned_warmup(paths[0]), changes, tell))
    if paths:
        start = own_data_config(paths, model, folder, tell)
    elif model is not None:
        raise ConfigError("--model needs data to train on: name files or folders, such as mytext.txt")
    else:
        start = builtin_config(folder or free_folder())
    changes = _with_warmup(start.schedule.warmup_steps, changes, tell)
    return config_from(yaml.safe_load(config_text(start)), changes=changes)


def is_configuration(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _planned_warmup(path: Path) -> Any:
    """What a configuration says of the warm-up; who reads the file next says what is wrong with it."""
    try:
        return yaml.safe_load(path.read_text("utf-8"))["schedule"]["warmup_steps"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError):
        return ScheduleConfig().warmup_steps


def _with_warmup(planned: Any, changes: dict[str, str], tell: Callable[[str], None]) -> dict[str, str]:
    """`--steps` that leave no room for the planned warm-up shorten it, too: who tries ten steps means ten steps."""
    if "steps" not in changes or "schedule.warmup_steps" in changes or not changes["steps"].isdecimal():
        return changes
    steps = int(changes["steps"])
    if not isinstance(planned, int) or planned < steps:
        return changes
    tell(f"warm-up shortened from {planned} to {steps // 10} steps, because the run has {steps}")
    return {**changes, "schedule.warmup_steps": str(steps // 10)}
