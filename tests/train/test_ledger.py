"""Predicted beside measured: what is counted exactly is exact, what does not fit is refused beforehand."""

import dataclasses
import json
from pathlib import Path

import pytest

from cumulo.errors import OutOfMemory
from cumulo.layout.layout import Layout
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import LoraConfig, ModelConfig, config_from, known_spec
from cumulo.train.decide.ledger import predict, refuse_if_too_large
from tests.train.ranked import tiny, train, write_texts

pytestmark = pytest.mark.long


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, tp=2, zero=1)], ids=str)
def test_weights_and_optimizer_are_as_large_as_predicted(layout: Layout, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts.jsonl")
    config = tiny(tmp_path / "run", source, layout, dtype="float32", steps=3, evaluate_sequences=0)
    # The planner pads a vocabulary to 128 for each slice, as GPUs like it: here it is one that needs none.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_multiple=256))
    train(config)
    found = {entry["name"]: entry for entry in json.loads((tmp_path / "run/ledger.json").read_text())}
    for name in ("weights", "optimizer", "activations"):
        assert found[name]["measured"] == pytest.approx(found[name]["predicted"], rel=0.02), name
    assert found["step"]["measured"] > 0


def test_adapters_alone_have_gradients_and_states(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts.jsonl")
    base = tiny(tmp_path / "base", source, Layout(), dtype="float32", steps=3, evaluate_sequences=0)
    base = dataclasses.replace(base, model=dataclasses.replace(base.model, vocab_multiple=256))
    train(base)
    start = ModelConfig(start_from=str(tmp_path / "base/model"))
    train(dataclasses.replace(base, folder=str(tmp_path / "run"), model=start, lora=LoraConfig(rank=2)))
    whole, found = (
        {entry["name"]: entry for entry in json.loads((tmp_path / name / "ledger.json").read_text())}
        for name in ("base", "run")
    )
    for name in ("weights", "optimizer"):
        assert found[name]["measured"] == pytest.approx(found[name]["predicted"], rel=0.02), name
    assert found["gradients"]["predicted"] < whole["gradients"]["predicted"] / 3


def test_what_does_not_fit_is_refused_with_what_to_change() -> None:
    config = config_from({"model": {"hidden": 1024, "heads": 8, "layers": 24}, "micro_batch": 1})
    spec = known_spec(config)
    assert spec is not None
    found = predict(config, spec, None, 1e12, 1e12)
    assert found is not None
    refuse_if_too_large(found.memory, found.memory.total, True, config)
    with pytest.raises(
        OutOfMemory, match=r"needs [\d.]+ GiB and 1\.0 GiB are free: .*optimizer .*; try layout\.zero"
    ):
        refuse_if_too_large(found.memory, 1 << 30, True, config)
    wide = dataclasses.replace(config, micro_batch=16)
    found = predict(wide, spec, None, 1e12, 1e12)
    assert found is not None
    with pytest.raises(OutOfMemory, match="try a smaller micro_batch, recompute: true"):
        refuse_if_too_large(found.memory, 1 << 30, True, wide)


def test_a_known_gpu_has_a_cost_model_and_an_interval() -> None:
    config = config_from({"dtype": "bfloat16", "layout": {"dp": 2}, "micro_batch": 8})
    spec = known_spec(config)
    assert spec is not None
    found = predict(config, spec, "NVIDIA H200", 1e12, 1e15)
    assert found is not None
    assert "cost model of h200" in found.step_basis
    assert dict(found.sent_bytes)["dp"] > 0
    unknown = predict(config, spec, "Some GPU 9000", 1e12, 1e15)
    assert unknown is not None
    assert unknown.step_s == 1e-3


@pytest.mark.parametrize("products", ["wide", "fp8"])
def test_a_run_on_an_h200_is_predicted(products: str) -> None:
    """The 1.24B model of benchmarks/train_speed.py, as measured (benchmarks/results/train.json)."""
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/train.json").read_text())["rows"]
    measured = {row["name"]: row for row in rows}["8" if products == "wide" else "8+fp8"]
    sizes = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "ffn_hidden": 8192}
    config = config_from({
        "batch_sequences": 8, "micro_batch": 8, "dtype": "bfloat16", "master_weights": False, "products": products,
        "data": {"sequence_length": 4096}, "model": sizes,
    })  # fmt: skip
    spec = ModelSpec("llama", vocab_size=128256, max_context=4096, tied_embeddings=True, **sizes)
    found = predict(config, spec, "NVIDIA H200", 1.0, 1.0)
    assert found is not None
    assert 1e3 * found.step_s == pytest.approx(measured["step_ms"], rel=0.05)
    assert found.memory.peak / 2**30 == pytest.approx(measured["memory_gib"], rel=0.12)
