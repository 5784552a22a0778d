"""`verify_layout`: small twins of any configuration, and a comparison that finds what is wrong."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.layout.pieces import whole_box
from cumulo.pipeline.decide.catalog import FAMILIES
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec
from cumulo.train.decide.config import (
    DataConfig,
    ModelConfig,
    TokenizerConfig,
    TrainConfig,
    config_from,
    config_layout_problems,
)
from cumulo.train.decide.shrink import MOST_PROCESSES, shrink
from cumulo.train.run.verify import Outcome, largest_difference, train_alone, train_rank, verify_layout
from tests import thorough
from tests.train.layout_runs import DENSE, SPECS, train_config

LLAMA = ModelSpec("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192)
QWEN_MOE = replace(LLAMA, qk_norm=True, moe=MoESpec(128, 8, 768))
DEEPSEEK = replace(
    LLAMA, layers=61, heads=128, kv_heads=128, mla=MLASpec(1536, 512, 128, 64, 128),
    moe=MoESpec(256, 8, 2048, 2048, "sigmoid", groups=8, top_groups=4, group_score="top2sum",
                selection_bias=True, dense_layers=(0, 1, 2)),
)  # fmt: skip
MISTRAL = replace(LLAMA, sliding_window=4096, windowed_layers=(0, 2, 4))


@given(
    spec=st.sampled_from([LLAMA, QWEN_MOE, DEEPSEEK, MISTRAL]),
    dp=st.sampled_from([1, 2, 3, 8, 64, 512]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 3, 4, 16]),
    cp=st.sampled_from([1, 2, 6, 8]),
    ulysses=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    zero=st.sampled_from([0, 1, 2, 3]),
    schedule=st.sampled_from(list(FAMILIES)),
)
@settings(deadline=None, max_examples=thorough.examples(150))
def test_a_shrunk_configuration_keeps_its_axes_and_can_be_run(
    spec: ModelSpec, dp: int, tp: int, pp: int, cp: int, ulysses: int, ep: int, zero: int, schedule: str
) -> None:
    try:
        layout = Layout(
            dp, tp, pp, cp, ep if spec.moe else 1, zero, tp > 1, ulysses, dp if zero else None, schedule  # type: ignore[arg-type]
        )  # fmt: skip
        config = train_config(layout, rows=dp)
    except ConfigError:
        return  # not a layout
    small = shrink(config, spec, steps=2)
    if any("stages must be even" in problem for problem in config_layout_problems(small.config, small.spec)):
        return  # nor is this one a schedule
    assert list(config_layout_problems(small.config, small.spec)) == []
    assert small.config.layout.world <= max(MOST_PROCESSES, 2**4)
    for axis in ("dp", "tp", "pp", "cp"):
        assert (getattr(small.config.layout, axis) > 1) == (getattr(layout, axis) > 1)
    assert (small.spec.moe is None) == (spec.moe is None) and (small.spec.mla is None) == (spec.mla is None)


@pytest.mark.long
def test_a_users_configuration_is_verified_in_processes_of_its_own() -> None:
    config = TrainConfig(
        batch_sequences=64, micro_batch=4, dtype="bfloat16",
        layout=Layout(dp=2, tp=2, zero=1),
        model=ModelConfig(hidden=768, layers=12, heads=12, vocab_multiple=2),
        data=DataConfig(sequence_length=1024, tokenizer=TokenizerConfig("bytes")),
    )  # fmt: skip
    verdict = verify_layout(config, steps=3)
    assert verdict.same and 0 < verdict.difference < 1e-9
    assert verdict.layout == config.layout
    assert len(verdict.losses) == 3


def test_the_pages_layout_can_be_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text("utf-8")
    table = yaml.safe_load(page.split("```yaml")[1].split("```")[0])
    config = config_from({**table, "micro_batch": 1})
    assert config.layout.world == 16


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"zero": 3}], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_one_process_is_a_layout_of_one_rank_with_the_same_bits(name: str, changes: dict[str, int]) -> None:
    config = train_config(Layout(**changes), rows=4, micro=2, steps=3, expert_bias_rate=0.01)  # type: ignore[arg-type]
    alone, rank = train_alone(SPECS[name], config), train_rank(0, SPECS[name], config)
    assert rank.norms == alone.norms
    assert rank.losses == pytest.approx(alone.losses, rel=1e-15)
    assert rank.balances == pytest.approx(alone.balances, rel=1e-15)
    for weight, (_, expected) in alone.weights.items():
        assert torch.equal(rank.weights[weight][1], expected), weight


def rank_of(alone: Outcome) -> Outcome:
    """A rank that holds everything and found the same."""
    parts = {
        name: ((whole_box(tensor.shape),), tensor.clone()) for name, (_, tensor) in alone.weights.items()
    }
    return Outcome(list(alone.losses), list(alone.balances), list(alone.norms), parts)


def test_the_comparison_names_what_differs() -> None:
    alone = train_alone(DENSE, train_config(Layout(), rows=2, steps=2))
    assert largest_difference(alone, [rank_of(alone)])[0] == 0
    one_weight = rank_of(alone)
    one_weight.weights["layers.2.ffn.down.weight"][1][3, 4] += 1e-6
    difference, where = largest_difference(alone, [rank_of(alone), one_weight])
    assert 1e-9 < difference < 1e-3 and where == "rank 1: layers.2.ffn.down.weight"
    no_number = rank_of(alone)
    no_number.losses[1] = math.nan
    assert largest_difference(alone, [no_number]) == (math.inf, "rank 0: losses of step 2")
    incomplete = rank_of(alone)
    del incomplete.weights["final_norm.weight"]
    assert largest_difference(alone, [incomplete]) == (
        math.inf,
        "no rank has all of final_norm.weight",
    )
    no_weight = rank_of(alone)
    no_weight.weights["embed.weight"][1].fill_(torch.nan)
    assert largest_difference(alone, [no_weight]) == (math.inf, "rank 0: embed.weight")
