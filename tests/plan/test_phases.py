"""Communication phase by phase: the same seconds as the cost model's."""

import json

import pytest
from typer.testing import CliRunner

from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.plan.time.compute_profile import shipped_for
from cumulo.plan.time.phases import CommunicationPhase, phases_of
from cumulo.plan.time.step import estimate
from cumulo.spec import catalog
from tests.whole_command import app

CLUSTER = catalog.cluster(1024, "h100-sxm")


def phases(job: TrainJob) -> tuple[CommunicationPhase, ...]:
    profile, _ = shipped_for(CLUSTER.device, job.dtype, job.software)
    return phases_of(job, CLUSTER, profile)


def total_s(found: tuple[CommunicationPhase, ...], axis: str) -> float:
    return sum(phase.calls * phase.call_s for phase in found if phase.axis == axis)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=32, tp=8, pp=4, zero=1, sequence_parallel=True),
        Layout(dp=32, tp=8, pp=4, zero=1),
        Layout(dp=64, tp=2, pp=2, cp=4, zero=1, sequence_parallel=True),
    ],
)
def test_the_phases_of_a_layer_add_up_to_what_the_cost_model_counts(layout: Layout) -> None:
    job = TrainJob(catalog.model("llama-3.1-70b"), layout, 1024, 4096)
    profile, _ = shipped_for(CLUSTER.device, job.dtype, job.software)
    parts, found = dict(estimate(job, CLUSTER, explain=False).breakdown), phases(job)
    assert total_s(found, "tp") * profile.tensor_exposed == pytest.approx(parts["tensor parallel"], rel=1e-6)
    context_s = total_s(found, "cp") * profile.context_exposed
    assert context_s == pytest.approx(parts.get("context parallel", 0.0), rel=1e-6)


def test_experts_over_tensor_ranks_exchange_tokens_and_gather_nothing() -> None:
    layout = Layout(dp=64, tp=2, pp=8, ep=32, zero=1, sequence_parallel=True)
    job = TrainJob(
        catalog.model("deepseek-v3"), layout, 1024, 4096, expert_exchange="once", whole_experts=True
    )
    mixed = [phase for phase in phases(job) if phase.where == "feed-forward with experts"]
    assert {(phase.axis, phase.ranks) for phase in mixed} == {("ep", 64)}
    assert all(phase.leaves_domain for phase in mixed)


def test_the_command_says_what_bounds_each_collective_of_tp8_pp4_dp32() -> None:
    words = "plan train llama-3.1-70b --gpus 1024 --batch 1024 --sequence 4096 --fixed tp=8,pp=4,dp=32"
    found = CliRunner().invoke(app, [*words.split(), "--phases", "--no-why", "--json", "-"])
    assert found.exit_code == 0, found.output
    listed = {
        (phase["pass"], phase["block"], phase["collective"]): phase
        for phase in json.loads(found.stdout)["phases"]
    }
    gathered = listed["forward", "feed-forward", "all_gather"]
    assert gathered["buffer_bytes"] == 4096 * 8192 * 2  # tokens × width × 2 bytes
    assert gathered["sent_bytes"] == pytest.approx(4096 * 8192 * 2 * 7 / 8)
    assert gathered["bound"] == "compute"
    assert listed["step", "gradients", "reduce_scatter"]["ranks"] == 32
    assert not gathered["leaves_domain"]
    assert listed["step", "gradients", "reduce_scatter"]["leaves_domain"]
