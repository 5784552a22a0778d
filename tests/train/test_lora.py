"""Adapters over several ranks: cut like the matrices they adapt, and trained as one process trains them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

import torch
from torch import Tensor

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout, pipeline_chunks
from cumulo.layout.pieces import adapter_shapes, is_adapter, pieces
from cumulo.models.files.load import load_model
from cumulo.ranks.groups import Groups
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.train.decide.config import LoraConfig, ModelConfig, OptimizerConfig, TrainConfig
from cumulo.train.model.lora import merged
from cumulo.train.run.model_run import ModelRun
from cumulo.train.run.verify import TOLERANCE, largest_difference, random_batch, start_weights, train_alone
from tests.thorough import rare
from tests.train.layout_runs import DENSE, EXPERTS, LATENT, train_config, train_parallel
from tests.train.pool import run_ranks
from tests.train.ranked import tiny, train, write_texts
from tests.train.test_resume import difference

ALL = LoraConfig(rank=3, alpha=5.0)
LATENT_TARGETS = LoraConfig(rank=3, alpha=5.0, targets=("q_a", "q_b", "kv_a", "kv_b", "output", "gate_up"))
# Its first layer has experts only: nothing there is adapted.
LATE = replace(EXPERTS, layers=2, moe=MoESpec(4, 2, 8, dense_layers=(1,)))
CASES: dict[str, tuple[ModelSpec, LoraConfig, Layout]] = {
    "data parallel": (DENSE, ALL, Layout(dp=2)),
    "zero 1": (DENSE, ALL, Layout(dp=2, zero=1)),
    "zero 2": (EXPERTS, ALL, Layout(dp=2, zero=2)),
    "zero 3, sliced": (LATENT, LATENT_TARGETS, Layout(dp=2, tp=2, zero=3)),
    "sequence parallel": (DENSE, ALL, Layout(tp=2, sequence_parallel=True)),
    "tensor and expert parallel": (EXPERTS, ALL, Layout(dp=2, tp=2, ep=2)),
    "weight gradients apart": (LATENT, LATENT_TARGETS, Layout(tp=2, pp=2, schedule="zb-v")),
    "two copies": (DENSE, ALL, Layout(pp=2, schedule="dualpipe", dp=2, zero=1)),
    "zero 3 and a tied embedding at both ends": (DENSE, ALL, Layout(pp=2, dp=2, zero=3, schedule="zb-v")),
    "a frozen first stage, zero 2": (LATE, LoraConfig(targets=("gate_up",)), Layout(pp=2, dp=2, zero=2)),
    "ring attention": (DENSE, ALL, Layout(cp=2)),
    "a frozen first stage": (LATE, LoraConfig(targets=("gate_up",)), Layout(pp=2)),
    "a frozen first stage, in halves": (LATE, LoraConfig(targets=("down",)), Layout(pp=2, schedule="zb-h1")),
}


RARE = (
    "data parallel", "zero 1", "zero 2", "zero 3, sliced", "two copies", "ring attention", "a frozen first stage",
    "weight gradients apart", "a frozen first stage, zero 2", "zero 3 and a tied embedding at both ends",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in RARE else []) for name in CASES]
)
def test_adapters_learn_what_they_learn_in_one_process(name: str) -> None:
    spec, lora, layout = CASES[name]
    spec = replace(spec, layers=max(2, pipeline_chunks(layout)))
    expected = train_alone(spec, train_config(Layout(), 8, 4, lora=lora))
    start = start_weights(spec, seed=3)
    frozen = [name for name, (_, weight) in expected.weights.items() if not is_adapter(name)]
    assert all(torch.equal(expected.weights[name][1], start[name]) for name in frozen)
    assert all(weight.any() for name, (_, weight) in expected.weights.items() if is_adapter(name))
    ranks = train_parallel(spec, train_config(layout, 8, lora=lora))
    found, where = largest_difference(expected, ranks)
    assert found < TOLERANCE, f"{name}: {found:.1e} at {where}"


@pytest.mark.long
def test_muon_moves_whole_adapters() -> None:
    spec = replace(DENSE, layers=2)
    changes = {"lora": ALL, "optimizer": OptimizerConfig("muon", clip_norm=0.5), "steps": 3}
    expected = train_alone(spec, replace(train_config(Layout(), 4, 2), **changes))  # type: ignore[arg-type]
    config = replace(train_config(Layout(dp=2, tp=2, zero=1), 4), **changes)  # type: ignore[arg-type]
    found, where = largest_difference(expected, train_parallel(spec, config))
    assert found < TOLERANCE, where


def test_an_adapter_is_cut_like_its_matrix() -> None:
    shapes = adapter_shapes(DENSE, ALL.rank, ALL.targets)
    first, second = (pieces(DENSE, Layout(tp=2), rank, shapes) for rank in range(2))
    for one, other in zip(first.values(), second.values(), strict=True):
        by_rows = one.name.split(".")[-2] in ("qkv", "gate_up")
        assert one.sliced == (by_rows == one.name.endswith("lora_b")) and one.partial_over_tp != one.sliced
        assert (one.boxes == other.boxes) != one.sliced
    weight = pieces(DENSE, Layout(tp=2), 1)["layers.0.attention.qkv.weight"]
    adapter = second["layers.0.attention.qkv.lora_b"]
    assert [(box.offset[0], box.size[0]) for box in adapter.boxes] == [
        (box.offset[0], box.size[0]) for box in weight.boxes
    ]


def half_precision_state(rank: int, config: TrainConfig) -> dict[str, tuple[torch.dtype, torch.dtype | None]]:
    """Types of what a rank keeps of each parameter, and of its optimizer's master copy."""
    groups = Groups(config.layout, rank)
    run = ModelRun(DENSE, config, groups, torch.device("cpu"), start_weights(DENSE, config.seed))
    rows = config.batch_sequences // config.layout.dp
    first = groups.place.dp * rows
    batch = random_batch(DENSE, config, 0)
    run.gradients(batch.rows(first, first + rows), batch.loss_tokens)
    assert 0 < run.clip() < float("inf")
    run.step(1.0)
    weights, state = run.optimizer.weights(), run.optimizer.state()
    assert {name.rpartition(".")[0] for name in state} <= {name for name in weights if is_adapter(name)}
    return {
        name: (shard.tensor.dtype, state[f"{name}.master"].dtype if f"{name}.master" in state else None)
        for name, shard in run.shards.items()
        if shard.tensor.numel()
    }


@pytest.mark.long
@pytest.mark.parametrize("zero", [3, *rare(0, 1)])
def test_only_adapters_have_state_and_master_copies(zero: int) -> None:
    layout = Layout(dp=2, zero=zero)  # type: ignore[arg-type]
    config = replace(train_config(layout, 4, lora=ALL), dtype="bfloat16")
    for found in run_ranks(half_precision_state, 2, config):
        for name, (kept, master) in found.items():
            if is_adapter(name):
                assert master == torch.float32
            else:
                assert (kept, master) == (torch.bfloat16, None)


def test_a_merged_weight_computes_what_weight_and_adapter_do() -> None:
    random_of = torch.Generator().manual_seed(0)
    weight, lora_a, lora_b, x = (
        torch.randn(shape, generator=random_of, dtype=torch.float64)
        for shape in ((6, 5), (3, 5), (6, 3), (4, 5))
    )
    name = "layers.0.ffn.down"
    tensors: dict[str, Tensor] = {
        f"{name}.weight": weight, f"{name}.lora_a": lora_a, f"{name}.lora_b": lora_b
    }  # fmt: skip
    found = merged(tensors, ALL)
    assert list(found) == [f"{name}.weight"]
    torch.testing.assert_close(x @ found[f"{name}.weight"].T, x @ weight.T + 5 / 3 * x @ lora_a.T @ lora_b.T)


def test_targets_that_a_model_has_not_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no projection 'kv_c'; did you mean 'kv_"):
        adapter_shapes(LATENT, 8, ("kv_c",))


@pytest.mark.thorough
def test_an_adapted_run_goes_on_under_other_layouts(tmp_path: Path) -> None:
    """Four layouts one after the other, and the exported model, against one process that never stopped."""
    source = write_texts(tmp_path / "texts.jsonl")
    base = tiny(tmp_path / "base", source, Layout(), steps=4)
    train(base)
    start, lora = ModelConfig(start_from=str(tmp_path / "base/model")), LoraConfig(rank=2)
    common: dict[str, Any] = {"model": start, "lora": lora, "steps": 4}
    _, expected, _ = train(tiny(tmp_path / "whole", source, Layout(), **common))
    layouts = [Layout(dp=2, tp=2, zero=3), Layout(pp=2, schedule="zb-v"), Layout(), Layout(dp=2, zero=1)]
    for leg, layout in enumerate(layouts):
        config = tiny(tmp_path / "broken", source, layout, **common)
        _, found, _ = train(config, resume=leg > 0, stop_after=leg + 1)
        assert difference(found, expected[: leg + 1]) < 1e-9, layouts[: leg + 1]
    plain, whole, broken = (
        dict(load_model(tmp_path / name / "model").decoder.named_parameters())
        for name in ("base", "whole", "broken")
    )
    for name, weight in whole.items():
        torch.testing.assert_close(broken[name], weight, rtol=0, atol=1e-9 * float(weight.abs().max()))
    assert not torch.equal(whole["layers.0.attention.qkv.weight"], plain["layers.0.attention.qkv.weight"])
