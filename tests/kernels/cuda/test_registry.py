"""Measured winners are used on the device they were measured on."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cumulo.kernels.cuda import registry
from cumulo.kernels.cuda.attention import config as attention_config
from cumulo.kernels.cuda.linear import linear
from cumulo.kernels.cuda.linear.linear import Choice
from cumulo.kernels.cuda.linear.small_linear import SmallConfig
from cumulo.kernels.cuda.moe import moe
from cumulo.kernels.cuda.moe.moe import GroupedConfig


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with empty tables and leaves none behind."""
    monkeypatch.setattr(linear, "WINNERS", {})
    monkeypatch.setattr(attention_config, "TUNED", {})
    monkeypatch.setattr(moe, "TUNED", {})
    monkeypatch.setattr(registry, "_loaded", set())


def test_a_devices_file_is_named_after_it(tmp_path: Path) -> None:
    assert registry.winners_file("NVIDIA H200", tmp_path).name == "nvidia-h200.json"
    assert registry.device_name("cpu") == "cpu"


def test_what_was_measured_on_a_device_is_used_on_its_like_and_nowhere_else(tmp_path: Path) -> None:
    pair = [GroupedConfig(16, 64, 128, 8, 2), GroupedConfig(16, 128, 128, 8, 2)]
    config = SmallConfig(2, 256, 8)
    tables = {
        "moe": {"up to 8 each": [asdict(one) for one in pair]},
        "paged_attention": {"decode group=4 dim=128 bfloat16 many": {"key_tile": 32, "num_warps": 8}},
        "linear": {
            "bf16 m1 n64 k32": {
                "kernel": "small",
                "config": asdict(config),
            }
        },
    }
    (tmp_path / "nvidia-h200.json").write_text(json.dumps({"tables": tables}))
    default = moe.grouped_configs(64, 128)
    invariant = [moe.grouped_configs(rows, 128, invariant=True) for rows in (64, 9999)]
    assert registry.load_for("NVIDIA A100", tmp_path) == []
    assert moe.grouped_configs(64, 128) == default
    assert set(registry.load_for("NVIDIA H200", tmp_path)) == set(tables)
    assert moe.grouped_configs(64, 128) == tuple(pair) != default
    # Tiles of the batch-invariant mode come from no table: a device's own could add up in another order.
    assert [moe.grouped_configs(rows, 128, invariant=True) for rows in (64, 9999)] == invariant
    assert len({config.depth for both in invariant for config in both}) == 1
    assert linear.choose(1, torch.empty(64, 32, dtype=torch.bfloat16)) == Choice("small", config)
    found = attention_config.decode_config(4, 128, torch.bfloat16, 10_000, 132)
    assert (found.key_tile, found.num_warps) == (32, 8)
    assert registry.load_for("NVIDIA H200", tmp_path) == []  # once is enough


def test_in_invariant_mode_prompts_have_the_same_tiles_on_pages_of_any_size() -> None:
    key = attention_config.chunk_key(4, 128, torch.bfloat16, 64)
    attention_config.use({key: {"key_tile": 128, "overlap": 2}})
    chosen = [attention_config.chunk_config(4, 128, torch.bfloat16, page, True) for page in (16, 64)]
    assert chosen[0] == chosen[1] and not chosen[1].overlap
    assert attention_config.chunk_config(4, 128, torch.bfloat16, 64, False).overlap == 2


def test_a_table_for_other_kernels_is_passed_over_and_the_rest_is_used(tmp_path: Path) -> None:
    tables = {
        "linear": {"bf16 m1 n64 k32": {"kernel": "forgotten", "config": {"option": 1}}},
        "paged_attention": {"decode group=4 dim=128 bfloat16 many": {"key_tile": 32}},
    }
    (tmp_path / "some-gpu.json").write_text(json.dumps({"tables": tables}))
    assert registry.load_for("Some GPU", tmp_path) == ["paged_attention"]
