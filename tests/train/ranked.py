"""Whole runs of a tiny model in processes of the pool: one `Trainer` per rank."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from cumulo.layout.layout import Layout
from cumulo.ranks.groups import Groups, control_group
from cumulo.ranks.team import Team
from cumulo.spec.model import MoESpec
from cumulo.train.decide.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
)
from cumulo.train.run.log import TrainRecord, read_log
from cumulo.train.run.trainer import Ranks, Silent, Trainer
from tests.train.pool import run_ranks

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "had", "hat", "of")


def write_texts(path: Path) -> Path:
    drawn = random.Random(0)
    texts = [" ".join(drawn.choices(WORDS, k=drawn.randint(5, 40))) for _ in range(150)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tiny(folder: Path, source: Path, layout: Layout, experts: bool = False, **changes: Any) -> TrainConfig:
    """Float64, so that runs can be held against each other; sizes that any axis of 2 or 4 divides."""
    moe = MoESpec(4, 2, 8) if experts else None
    config = TrainConfig(
        folder=str(folder),
        steps=8,
        batch_sequences=16,
        micro_batch=1,
        device="cpu",
        dtype="float64",
        model=ModelConfig(
            family="qwen3_moe" if experts else "llama", hidden=16, layers=4, heads=4, ffn_hidden=32, moe=moe,
            vocab_multiple=4,
        ),
        data=DataConfig((str(source),), sequence_length=16, workers=1, tokenizer=TokenizerConfig("bytes")),
        optimizer=OptimizerConfig(learning_rate=0.02),
        schedule=ScheduleConfig("wsd", warmup_steps=2),
        checkpoint=CheckpointConfig(every_steps=3, keep=2),
        evaluate_sequences=16,
        layout=layout,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


class Hearing(Silent):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def tell(self, message: str) -> None:
        self.heard.append(message)


def train_rank(
    rank: int, config: TrainConfig, resume: bool, stop_after: int
) -> tuple[list[str], float | None]:
    watcher = Hearing()
    ranks = Ranks(Groups(config.layout, rank), Team(control_group()))
    trainer = Trainer(config, resume=resume, watcher=watcher, ranks=ranks)
    result = trainer.run(lambda step: step == stop_after and rank == config.layout.world - 1)
    return watcher.heard, result.held_out_loss


def train(
    config: TrainConfig, *, resume: bool = False, stop_after: int = -1
) -> tuple[list[str], list[TrainRecord], float | None]:
    """What rank 0 heard, the log, and the loss on held-out data. One rank alone runs here."""
    if config.layout.world == 1:
        watcher = Hearing()
        result = Trainer(config, resume=resume, watcher=watcher).run(lambda step: step == stop_after)
        heard, held_out = watcher.heard, result.held_out_loss
    else:
        heard, held_out = run_ranks(
            train_rank, config.layout.world, config, resume, stop_after, timeout_s=600
        )[0]
    return heard, read_log(Path(config.folder) / "log.csv"), held_out
