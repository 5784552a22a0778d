"""What is decided before an engine runs: the device, options that do not go together, and the first steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cumulo.engine import assembly
from cumulo.engine.assembly import compile_kernels, device_kind
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.play.player import refuse_kernel_options
from cumulo.errors import CumuloError
from cumulo.spec.gpu_kernels import obstacle_of
from cumulo.spec.model import MLASpec
from tests.engine.tiny_engine import SPECS, make_decoder, make_engine, run


def see_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, triton: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    monkeypatch.setattr(assembly, "find_spec", lambda name: object() if triton else None)


def test_a_gpu_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpu(monkeypatch, (9, 0))
    assert [device_kind(device) for device in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    see_gpu(monkeypatch, None)
    assert [device_kind(device) for device in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(CumuloError, match="sees no GPU"):
        device_kind("cuda")
    with pytest.raises(CumuloError, match="got 'tpu'"):
        device_kind("tpu")


def test_a_gpu_that_is_too_old_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpu(monkeypatch, (7, 5))
    assert device_kind("auto") == "cpu"
    with pytest.raises(CumuloError, match=r"an old GPU has compute capability 7\.5, and 8\.0 is needed"):
        device_kind("cuda")


def test_a_gpu_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpu(monkeypatch, (9, 0), triton=False)
    for device in ("auto", "cuda"):
        with pytest.raises(CumuloError, match="pip install triton"):
            device_kind(device)
    assert device_kind("cpu") == "cpu"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bf16"}, {"weights": "int3"}, {"kv_dtype": "float8"},
        {"max_context": 0}, {"threads": 0}, {"threads": 1_000_000}, {"kv_host_gib": -1}, {"kv_memory_gib": -0.5},
    ],
)  # fmt: skip
def test_a_setting_that_does_not_exist_is_named(options: dict) -> None:
    with pytest.raises(CumuloError, match=next(iter(options))):
        EngineConfig(**options)


@pytest.mark.parametrize("block_size", [8, 48])
def test_a_gpu_takes_blocks_that_its_attention_has_tiles_for(block_size: int) -> None:
    EngineConfig(block_size=block_size).settled("cpu")
    with pytest.raises(CumuloError, match="power of two"):
        EngineConfig(block_size=block_size).settled("cuda")


def test_options_of_the_kernels_are_refused_where_pytorchs_operators_run() -> None:
    obstacle = obstacle_of(SPECS["latent"], "bfloat16")  # of rank 12
    assert obstacle is not None and obstacle_of(SPECS["experts"], "bfloat16") is None
    assert obstacle_of(SPECS["dense"], "float64") is not None
    refuse_kernel_options(EngineConfig(), obstacle)
    for options in ({"weights": "fp8"}, {"kv_dtype": "fp8"}, {"batch_invariant": True}):
        with pytest.raises(CumuloError, match=rf"{next(iter(options))}=.*latent attention"):
            refuse_kernel_options(EngineConfig(**options), obstacle)


def test_latent_attention_runs_on_the_kernels_where_its_key_fits_them() -> None:
    def obstacle(rank: int, rope: int, dtype: str = "bfloat16") -> str | None:
        mla = MLASpec(None, kv_rank=rank, nope_head_dim=128, rope_head_dim=rope, value_head_dim=128)
        return obstacle_of(replace(SPECS["latent"], heads=128, kv_heads=1, mla=mla), dtype)

    assert obstacle(512, 64) is None and obstacle(256, 32, "float32") is None  # DeepSeek-V3, MiniCPM3
    assert "powers of two" in str(obstacle(384, 64)) and "powers of two" in str(obstacle(512, 8))
    assert "does not fit" in str(obstacle(1024, 64)) and "does not fit" in str(obstacle(512, 64, "float32"))


@pytest.mark.parametrize("options", [{"weights": "fp8"}, {"batch_invariant": True}])
def test_what_only_a_gpu_has_is_refused_on_a_cpu_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(CumuloError, match=f"{next(iter(options))}.* on a CPU, omit"):
        EngineConfig(**options).settled("cpu")


@pytest.mark.parametrize("max_context", [3, 12, 256])
def test_compiling_kernels_leaves_no_trace_in_the_engine(max_context: int) -> None:
    tokens = []
    for compiled in (False, True):
        engine = make_engine(make_decoder("dense"), blocks=24, max_context=max_context)
        cost = engine.scheduler.costs.prompt_s_per_token
        if compiled:
            compile_kernels(engine)
        assert engine.scheduler.costs.prompt_s_per_token == cost
        request = engine.add([0, 0], SamplingParams(temperature=1, max_tokens=1))
        output = run(engine)[request.id]
        assert (request.id, output.story.cached_tokens) == ("request-1", 0)
        tokens.append(output.samples[0].token_ids)
    assert tokens[0] == tokens[1]


def test_kernels_that_do_not_run_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_decoder("dense"), blocks=24)

    def broken(*_: object) -> None:
        raise RuntimeError("no image for this device")

    monkeypatch.setattr(engine.runner.model, "forward", broken)
    with pytest.raises(CumuloError, match=r"no image for this device.*try device=cpu"):
        compile_kernels(engine)
