"""The memory ledger: predictions beside measurements, and refusals whose advice works."""

import dataclasses
import io
import json
import mmap
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from cumulo.base.machine import PeakMemory, available_memory
from cumulo.base.quantities import GIB
from cumulo.engine.config import EngineConfig
from cumulo.engine.memory.memory_plan import plan_memory
from cumulo.engine.memory.needs import activation_bytes, logit_bytes, quantised_saved_bytes
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.errors import CumuloError, OutOfMemory
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.spec.counting import weight_bytes
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec
from tests import thorough

SMOLLM2 = ModelSpec("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, tied_embeddings=True)
LLAMA_8B = ModelSpec("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072)
MIB = 1 << 20


def test_without_settings_kv_takes_at_most_a_quarter_of_memory_and_4_gib() -> None:
    small = plan_memory(SMOLLM2, 100 * MIB, EngineConfig(), 4 * GIB)
    assert 0.24 * 4 * GIB < small.ledger["kv cache"].predicted <= GIB
    large = plan_memory(SMOLLM2, 100 * MIB, EngineConfig(), 500 * GIB)
    assert 3.9 * GIB < large.ledger["kv cache"].predicted <= 4 * GIB
    assert large.max_context == small.max_context == 8192


def test_few_sequences_get_no_more_kv_than_they_can_use() -> None:
    plan = plan_memory(SMOLLM2, 100 * MIB, EngineConfig(max_running=1), 500 * GIB)
    assert plan.kv_blocks * 16 == 8192


def test_a_context_nobody_asked_for_shrinks_to_the_cache_and_the_ledger_says_so() -> None:
    plan = plan_memory(LLAMA_8B, 5 * GIB, EngineConfig(), 12 * GIB)
    assert plan.max_context == plan.kv_blocks * 16 < 131072
    assert f"longest context {plan.max_context:,} of the model's 131,072" in plan.ledger["kv cache"].how


def test_a_context_that_was_asked_for_is_kept_or_refused() -> None:
    plan = plan_memory(LLAMA_8B, 5 * GIB, EngineConfig(max_context=16384), 12 * GIB)
    assert plan.max_context == 16384
    assert plan.kv_blocks >= 1024
    with pytest.raises(OutOfMemory, match=r"max_context=\d+"):
        plan_memory(LLAMA_8B, 5 * GIB, EngineConfig(max_context=131072), 12 * GIB)
    with pytest.raises(CumuloError, match="set max_context=8192 or less"):
        plan_memory(SMOLLM2, 100 * MIB, EngineConfig(max_context=9000), 12 * GIB)


def test_configured_kv_is_taken_as_it_is() -> None:
    assert plan_memory(SMOLLM2, 100 * MIB, EngineConfig(kv_blocks=77), 4 * GIB).kv_blocks == 77
    half = plan_memory(SMOLLM2, 100 * MIB, EngineConfig(kv_memory_gib=0.5), 4 * GIB)
    block_bytes = 16 * SMOLLM2.kv_bytes_per_token(4)
    assert half.kv_blocks == GIB // 2 // block_bytes
    doubled = plan_memory(SMOLLM2, 100 * MIB, EngineConfig(kv_memory_gib=0.5, dtype="bfloat16"), 4 * GIB)
    assert doubled.kv_blocks == GIB // 2 // (block_bytes // 2)


def test_weights_that_do_not_fit_are_refused_for_what_they_are() -> None:
    with pytest.raises(OutOfMemory, match=r"weights alone take 15\.0 GiB"):
        plan_memory(LLAMA_8B, 15 * GIB, EngineConfig(), 12 * GIB)


def test_eight_bit_weights_are_counted_as_held_and_must_fit_before_they_are_quantised() -> None:
    """Llama-3.1-8B by hand: 6,979,321,856 numbers in the layers' matrices, which have 1,376,256 rows in all."""
    config = EngineConfig(device="cuda", weights="fp8", max_context=8192)
    loaded = weight_bytes(LLAMA_8B, "bfloat16")
    held = loaded - quantised_saved_bytes(LLAMA_8B, 2, "fp8")
    assert loaded - held == 6_979_321_856 - 4 * 1_376_256
    plan = plan_memory(LLAMA_8B, held, config, 80 * GIB, loading_bytes=loaded)
    plain = plan_memory(LLAMA_8B, loaded, dataclasses.replace(config, weights="auto"), 80 * GIB)
    gained = (plan.kv_blocks - plain.kv_blocks) * 64 * LLAMA_8B.kv_bytes_per_token(2)
    assert 0 <= loaded - held - gained < 64 * LLAMA_8B.kv_bytes_per_token(2)  # all of it goes to the KV cache
    assert "8 bits" in plan.ledger["weights"].how and "8 bits" not in plain.ledger["weights"].how
    with pytest.raises(
        OutOfMemory, match=r"weights=fp8 .*before they are quantised.* 15\.0 GiB of 14\.5 GiB"
    ):
        plan_memory(LLAMA_8B, held, config, 15 * GIB, loading_bytes=loaded)


def test_the_ledger_says_that_routed_experts_are_not_quantised() -> None:
    spec = dataclasses.replace(LLAMA_8B, moe=MoESpec(8, 2, 1024))
    config = EngineConfig(device="cuda", weights="fp8", max_context=8192)
    plan = plan_memory(spec, 10 * GIB, config, 80 * GIB)
    assert "routed experts too in bfloat16" in plan.ledger["weights"].how
    attention = spec.layers * (6144 + 4096) * 4096
    assert quantised_saved_bytes(spec, 2, "fp8") == attention - 4 * spec.layers * (6144 + 4096)


@settings(max_examples=thorough.examples(150), deadline=None)
@given(
    available_gib=st.floats(0.3, 60),
    spec=st.sampled_from([SMOLLM2, LLAMA_8B]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "max_context": st.sampled_from([64, 2048, 8192]),
            "kv_blocks": st.sampled_from([3, 500, 40_000]),
            "kv_memory_gib": st.sampled_from([0.01, 0.5, 7.0]),
            "max_tokens_per_step": st.sampled_from([1, 512, 30_000]),
            "max_running": st.sampled_from([1, 64, 4096]),
            "kv_host_gib": st.sampled_from([0.0, 3.0]),
            "block_size": st.sampled_from([1, 16, 128]),
        },
    ),
)
def test_a_plan_fits_and_a_refusal_names_settings_that_do(
    available_gib: float, spec: ModelSpec, options: dict[str, Any]
) -> None:
    assume(not ("kv_blocks" in options and "kv_memory_gib" in options))
    config, available = EngineConfig(**options).settled("cpu"), int(available_gib * GIB)
    weights = weight_bytes(spec, "q4_0")
    try:
        plan = plan_memory(spec, weights, config, available)
    except OutOfMemory as refused:
        for name, text, or_more in re.findall(r"(\w+)=([\d.]+)( or more)?", str(refused)):
            value = float(text) if name.endswith("gib") else int(text)
            plan_memory(spec, weights, dataclasses.replace(config, **{name: value}), available)
            if not or_more:  # the largest: a little more is refused
                more = value + (0.01 if name.endswith("gib") else 1)
                with pytest.raises(OutOfMemory):
                    plan_memory(spec, weights, dataclasses.replace(config, **{name: more}), available)
        return
    assert plan.ledger.predicted_bytes <= 0.95 * available
    assert plan.max_context <= plan.kv_blocks * config.block_size
    assert plan.max_context == (
        config.max_context or min(spec.max_context, plan.kv_blocks * config.block_size)
    )
    assert plan.tier_blocks * config.block_size * spec.kv_bytes_per_token(4) <= config.kv_host_gib * GIB


def test_measurements_stand_beside_predictions_in_every_rendering() -> None:
    ledger = plan_memory(SMOLLM2, 100 * MIB, EngineConfig(), 4 * GIB).ledger
    assert ledger.measured_bytes is None
    measured = ledger.measured({"weights": 110 * MIB, "kv cache": None})
    assert measured["weights"].measured == measured.measured_bytes == 110 * MIB
    assert ledger["weights"].measured is None
    with pytest.raises(ValueError, match="no row cake"):
        ledger.measured({"cake": 1})
    restored = json.loads(json.dumps(measured.to_dict()))
    assert restored["rows"][0]["predicted_bytes"] == 100 * MIB
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(measured)
    text = console.export_text()
    assert "110.0 MiB" in text
    assert "1.10" in text
    assert all(row.name in text for row in ledger.rows)


# -- against real models ----------------------------------------------------------------------------------
SHAPES = {
    "dense": ModelSpec("llama", 4096, 256, 3, 8, 4, 32, 704, 2048),
    "experts": ModelSpec("mixtral", 4096, 256, 2, 8, 4, 32, 704, 2048, moe=MoESpec(8, 2, 256)),
    "latent": ModelSpec("deepseek_v2", 4096, 256, 2, 8, 8, 32, 704, 2048, mla=MLASpec(None, 64, 32, 16, 32)),
}


def profiled_peak(runner: TorchRunner, tokens: int, draws: int) -> int:
    """The most bytes torch had allocated at one time in a step, and the most numpy had (it reports to
    tracemalloc): together at least the peak of both.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    tracemalloc.start()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        runner.measure_step(tokens, draws)
    numpy_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + numpy_peak


@pytest.mark.long
@pytest.mark.parametrize("kind", SHAPES)
def test_predictions_hold_for_a_real_model_of_each_kind(kind: str) -> None:
    """Weights, KV cache and tables exactly; activations within 35% and logits within 50% of what is counted."""
    spec = SHAPES[kind]
    config = EngineConfig(kv_blocks=128, max_running=128, max_tokens_per_step=1024, kv_host_gib=0.01).settled(
        "cpu"
    )
    model = Decoder(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    plan = plan_memory(spec, weight_bytes(spec), config, 4 * GIB)
    cache = KVCache(spec, plan.kv_blocks, config.block_size)
    runner = TorchRunner(
        model, cache, max_slots=config.max_running, max_context=plan.max_context, host_blocks=plan.tier_blocks
    )
    ledger = plan.ledger.measured(runner.memory_bytes())
    for name in ("weights", "kv cache", "host tier"):
        assert ledger[name].measured == ledger[name].predicted
    tables = ledger["token tables"]
    assert tables.measured == pytest.approx(tables.predicted, rel=0.02)

    profiled_peak(runner, 8, 2)  # makes what is made once, such as the table of rotations
    activations = activation_bytes(spec, 1024, 4, 8)
    assert profiled_peak(runner, 1024, 1) == pytest.approx(activations, rel=0.35)
    # One token per row: the logits are most of it, and random ones are flat, the sampler's worst case.
    assert profiled_peak(runner, 128, 128) == pytest.approx(logit_bytes(spec, 128, 4), rel=0.5)


@pytest.mark.long
def test_predictions_hold_for_the_built_in_model() -> None:
    """Weights within 5% of the file's bytes though packed anew; a step's peak within its prediction."""
    from cumulo.models.files.load import inspect_model, load_model

    files = inspect_model(None)
    config = EngineConfig(kv_blocks=100, max_running=8, max_tokens_per_step=256).settled("cpu")
    plan = plan_memory(files.spec, files.weight_bytes, config, available_memory())
    loaded = load_model(None, with_tokenizer=False)
    cache = KVCache(loaded.spec, plan.kv_blocks, config.block_size)
    runner = TorchRunner(loaded.decoder, cache, max_slots=8, max_context=plan.max_context)
    ledger = plan.ledger.measured(runner.memory_bytes())
    assert ledger["weights"].measured == pytest.approx(files.weight_bytes, rel=0.05)
    assert ledger["kv cache"].measured == ledger["kv cache"].predicted
    peak = runner.measure_step(256, 8)
    assert peak is not None
    predicted = ledger["activations"].predicted + ledger["logits"].predicted
    assert peak < 1.5 * predicted


# -- the machine ------------------------------------------------------------------------------------------
def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:    8000 kB\n"}


def test_available_memory_is_what_the_system_says_where_nothing_limits_it(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/user\n", "sys/fs/cgroup/user/memory.max": "max\n",
             "sys/fs/cgroup/user/memory.current": "5\n"}  # fmt: skip
    assert available_memory(system(tmp_path, MEMINFO | files)) == 8000 * 1024


def test_the_tightest_cgroup_above_this_process_limits_it(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": "3000000\n",
        "sys/fs/cgroup/outer/memory.current": "2500000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 7\ninactive_file 400000\nactive_file 9\n",
        "sys/fs/cgroup/outer/inner/memory.max": "4000000\n",
        "sys/fs/cgroup/outer/inner/memory.current": "100000\n",
    }
    assert available_memory(system(tmp_path, MEMINFO | files)) == 900_000


def test_version_1_cgroups_count_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/ab\n0::/\n",
        # In a container its own folder is mounted as the root of the hierarchy.
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000\n",
        "sys/fs/cgroup/memory/memory.stat": "cache 3\ntotal_inactive_file 1000\n",
        "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/docker/memory.usage_in_bytes": "7\n",
    }
    assert available_memory(system(tmp_path, MEMINFO | files)) == 1_501_000


def test_a_system_without_such_files_still_has_an_answer(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > 0


def test_the_peak_of_a_piece_of_work_is_seen_after_it_gave_the_memory_back() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not report a process's memory")
    # Straight from the system: torch's allocator might have as much left over from earlier tests.
    with PeakMemory() as peak, mmap.mmap(-1, 64 * MIB) as memory:
        for page in range(0, 64 * MIB, 4096):
            memory[page] = 1
    assert peak.bytes is not None
    assert 60 * MIB < peak.bytes < 90 * MIB
