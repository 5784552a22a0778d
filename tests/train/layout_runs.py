"""Small models and configurations for tests that hold a layout against one process."""

from dataclasses import replace
from typing import Any

from cumulo.layout.layout import Layout
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec
from cumulo.train.decide.config import DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from cumulo.train.run.verify import Outcome, train_rank
from tests import thorough
from tests.train.pool import run_ranks

VOCABULARY, LENGTH = 32, 16
DENSE = ModelSpec(
    "llama", VOCABULARY, hidden=16, layers=4, heads=4, kv_heads=2, head_dim=4, ffn_hidden=24, max_context=64,
    tied_embeddings=True, qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
EXPERTS = replace(
    DENSE, tied_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=True,
    moe=MoESpec(4, 2, 8, shared_hidden=8, dense_layers=(0,)),
)  # fmt: skip
LATENT = replace(
    EXPERTS, qk_norm=False, kv_heads=4, tied_embeddings=True, mla=MLASpec(8, 8, 4, 4, 4),
    moe=MoESpec(4, 2, 8, scoring="sigmoid", selection_bias=True, dense_layers=(0,)),
)  # fmt: skip
SPECS = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT}


def train_config(
    layout: Layout, rows: int, micro: int = 1, steps: int | None = None, short: int = 3, **changes: Any
) -> TrainConfig:
    """Any spec goes with it: the configuration says nothing of the model. `short`: how many steps there are without
    `--thorough`, with which there are 20."""
    return TrainConfig(
        steps=steps or (20 if thorough.chosen else short), batch_sequences=rows, micro_batch=micro,
        dtype="float64", balance_loss=0.1, seed=3,
        device="cpu", data=DataConfig(sequence_length=LENGTH), model=ModelConfig(start_from="the test's spec"),
        schedule=ScheduleConfig("constant", warmup_steps=0),
        optimizer=OptimizerConfig(learning_rate=1e-2, clip_norm=0.5), layout=layout, **changes,
    )  # fmt: skip


def train_parallel(spec: ModelSpec, config: TrainConfig) -> list[Outcome]:
    return run_ranks(train_rank, config.layout.world, spec, config, timeout_s=600)
