"""The run of `cumulo train` without a configuration: a small model of Python's own source, in about two minutes."""

from pathlib import Path

from cumulo.train.decide.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
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
