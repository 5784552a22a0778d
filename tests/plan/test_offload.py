"""What offloading costs: the worked example of docs/plan-time.md, and what must change when a job does."""

from dataclasses import replace

import pytest

from cumulo.layout.layout import Layout
from cumulo.plan.job import OptimizerKind, TrainJob
from cumulo.plan.memory.peak import peak_memory
from cumulo.plan.memory.states import heaviest_stage, state_bytes
from cumulo.plan.time.step import HOST_MEMORY_BYTES_PER_S, activations_s, estimate, optimizer_s
from cumulo.spec.catalog import cluster, model

GPUS = cluster(8, "h100-sxm")
JOB = TrainJob(model("llama-3.1-8b"), Layout(dp=8, zero=1), 64, 4096)


def test_the_worked_example_of_the_documentation() -> None:
    updated = 8.03e9 / 8
    share = HOST_MEMORY_BYTES_PER_S / 8
    assert share == pytest.approx(76.8e9)
    down_s, step_s, back_s = 4 * updated / 64e9, (24 + 4) * updated / share, 2 * updated / 64e9
    assert (round(1e3 * down_s), round(1e3 * step_s), round(1e3 * back_s)) == (63, 366, 31)
    found_s = optimizer_s(replace(JOB, offload_optimizer=True), GPUS)
    assert found_s == pytest.approx(down_s + step_s + back_s, rel=0.01)


def test_what_is_offloaded_is_in_the_step_and_its_parts() -> None:
    job = replace(JOB, offload_optimizer=True, offload_activations=True)
    plain, found = estimate(JOB, GPUS, explain=False), estimate(job, GPUS, explain=False)
    parts = dict(found.breakdown)
    assert "optimizer" not in parts and parts["optimizer on the host"] > 0
    assert sum(parts.values()) == pytest.approx(found.step_s)
    assert found.tokens_per_s == pytest.approx(job.tokens_per_step / found.step_s)
    assert found.mfu / plain.mfu == pytest.approx(plain.step_s / found.step_s)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2-0.5b"])
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_the_step_on_the_host_passes_over_the_very_states_of_the_ledger(
    name: str, kind: OptimizerKind
) -> None:
    """adamw8bit keeps the embedding's moments in float32, in both."""
    job = replace(JOB, model=model(name), optimizer=kind, offload_optimizer=True)
    assert state_bytes(job, heaviest_stage(job)).host == pytest.approx(peak_memory(job).host, rel=1e-4)


def test_activations_hide_behind_the_arithmetic_as_far_as_it_goes() -> None:
    kept = replace(JOB, offload_activations=True)
    long_s = 1000.0
    assert activations_s(kept, GPUS, long_s) == 0
    at_once = activations_s(kept, GPUS, 0.0)
    assert activations_s(kept, GPUS, 0.3) == pytest.approx(at_once - 0.3)
    less = activations_s(replace(kept, recompute="full"), GPUS, 0.0)
    assert less < at_once / 10
