"""Measured winners are used on the device they were measured on, and nothing measured is lost; the rows of
`cumulo bench kernels` say what they rest on."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cumulo.kernels.cuda import bench, registry
from cumulo.kernels.cuda.attention import config as attention_config
from cumulo.kernels.cuda.bench import Ceilings, as_dict
from cumulo.kernels.cuda.linear import linear
from cumulo.kernels.cuda.linear.linear import Choice
from cumulo.kernels.cuda.linear.small_linear import SmallConfig
from cumulo.kernels.cuda.moe import moe
from cumulo.kernels.cuda.moe.moe import GroupedConfig
from cumulo.kernels.cuda.work import KernelRow, Work

CEILINGS = Ceilings(4e12, 700e12, 1200e12)


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
    found = attention_config.decode_config(4, 128, torch.bfloat16, 10_000, 132, invariant=False)
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


def test_a_table_that_cannot_be_measured_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    linear.WINNERS["bf16 m1 n64 k32"] = Choice("library")
    failing = registry.Table("moe", "moe.moe:not_there", "moe.moe:use")
    working = registry.Table("linear", "linear.linear:winners", "linear.linear:use_winners")
    monkeypatch.setattr(registry, "TABLES", (failing, working))
    monkeypatch.setattr(registry, "device_name", lambda device: "Some GPU")
    path = tmp_path / "new" / "some-gpu.json"
    registry.tune_all(path)
    written = json.loads(path.read_text())
    assert written["device"] == "Some GPU" and written["tables"] == {"linear": linear.winners()}
    assert "moe failed: AttributeError" in capsys.readouterr().out
    written["tables"]["older"] = {"kept": 1}
    path.write_text(json.dumps(written))
    assert set(registry.tune_all(path, only=["linear"])["tables"]) == {"linear", "older"}


def test_a_row_says_its_rate_its_share_of_the_roofline_and_its_rivals() -> None:
    work = Work(bytes=400_000_000, flops=1_000_000)
    row = KernelRow("copy", "large", work, 125.0, {"torch": 250.0}, error=1e-3, must_us=130.0, aim_us=110.0)
    found = as_dict(row, CEILINGS)
    assert found["value"] == 125.0 and found["must"] == 130.0 and found["aim"] == 110.0
    assert found["note"] == "3.20 TB/s, 80% of roofline, 2.00x torch, error 0.001"
    assert found["more"]["bound"] == "memory" and found["more"]["roofline_share"] == 0.8
    fast = KernelRow("product", "large", Work(1000, 600_000_000), 1.0, dtype="float8_e4m3fn")
    assert as_dict(fast, CEILINGS)["note"] == "600 TFLOP/s, 50% of roofline"


@pytest.mark.parametrize("error", [0.3, float("nan")])
def test_a_wrong_result_is_no_result(error: float) -> None:
    found = as_dict(KernelRow("copy", "large", Work(1000), 1.0, error=error), CEILINGS)
    assert found["value"] is None and found["must"] is not None and "WRONG" in found["note"]
    json.dumps(found, allow_nan=False)


def test_every_operation_with_rows_is_found() -> None:
    names = bench.operations()
    assert {"attention.bench", "moe.bench", "sampling.sample_cuts_bench", "elementwise.swiglu"} <= set(names)
    assert bench.operations(["moe", "swi"]) == ["elementwise.swiglu", "moe.bench"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing fails here")
def test_an_operation_that_fails_is_a_row_with_its_error() -> None:
    (row,) = bench._guarded("elementwise.swiglu", CEILINGS)
    assert row["name"] == "elementwise.swiglu" and row["value"] is None and row["must"] == 0.0 and row["note"]
