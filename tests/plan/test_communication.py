"""What a training step communicates: whoever folds over cumulo/plan/time/communication.py counts the same bytes."""

from collections import defaultdict

import pytest

from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.plan.time.communication import data_exchanges, layer_calls, message_call
from cumulo.plan.time.compute_profile import shipped_for
from cumulo.plan.time.phases import phases_of
from cumulo.plan.time.step import estimate
from cumulo.plan.time.step_traffic import step_calls
from cumulo.spec import catalog

CLUSTER = catalog.cluster(64, "h100-sxm")
JOBS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("llama-3.1-8b", {"dp": 64}, {}),
    ("llama-3.1-8b", {"dp": 64, "zero": 3}, {"lora_rank": 16, "frozen_bits": 4}),
    ("llama-3.1-8b", {"dp": 64, "zero": 3, "shard": 8}, {}),
    ("llama-3.1-8b", {"dp": 16, "zero": 1, "shard": 8, "tp": 2, "pp": 2}, {"gradient_dtype": "bfloat16"}),
    ("llama-3.1-8b", {"dp": 8, "tp": 8, "sequence_parallel": True}, {"recompute": "norm"}),
    ("llama-3.1-8b", {"dp": 4, "tp": 4, "pp": 2, "cp": 2, "zero": 1}, {"recompute": "full"}),
    ("llama-3.1-8b", {"dp": 8, "pp": 2, "cp": 4, "zero": 1}, {"recompute": "norm+attention"}),
    ("qwen3-30b-a3b", {"dp": 64, "ep": 8, "zero": 1}, {"expert_exchange": "once"}),
    ("qwen3-30b-a3b", {"dp": 16, "tp": 2, "pp": 2, "ep": 8, "zero": 1, "sequence_parallel": True},
     {"recompute": "full", "recompute_layers": 8}),
    # Three of its layers have no experts. In the last job each expert is whole on one tensor-parallel rank.
    ("deepseek-v3", {"dp": 16, "tp": 4, "ep": 16, "zero": 2, "sequence_parallel": True}, {"recompute": "norm"}),
    ("deepseek-v3", {"dp": 8, "tp": 4, "cp": 2, "ep": 8, "zero": 3, "sequence_parallel": True},
     {"whole_experts": True, "expert_exchange": "once"}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout", "more"), JOBS)
def test_the_estimate_the_phases_and_the_play_on_a_fabric_count_the_same_bytes(
    model: str, layout: dict[str, object], more: dict[str, object]
) -> None:
    job = TrainJob(catalog.model(model), Layout(**layout), 256, 4096, **more)  # type: ignore[arg-type]
    counted = dict(estimate(job, CLUSTER, explain=False).link_bytes)
    profile, _ = shipped_for(CLUSTER.device, job.dtype, job.software)
    by_phase: dict[str, float] = defaultdict(float)
    for phase in phases_of(job, CLUSTER, profile):
        by_phase[phase.axis] += phase.calls * phase.sent_bytes
    assert dict(by_phase) == pytest.approx(counted)
    played: dict[str, float] = defaultdict(float)
    for call in step_calls(job, 8):
        ranks = call.groups.shape[1]
        share = {"neighbours": 2.0, "all_reduce": 2 * (ranks - 1) / ranks}
        sent = call.size_bytes * share.get(call.collective, (ranks - 1) / ranks)
        played["dp" if call.axis == "edp" else call.axis] += call.calls * sent
    assert dict(played) == pytest.approx(counted)


def test_experts_that_are_whole_leave_tensor_ranks_nothing_to_gather() -> None:
    """And their tokens reach all tensor-parallel ranks of all expert-parallel groups."""
    layout = Layout(dp=16, tp=4, ep=16, zero=1, sequence_parallel=True)
    job = TrainJob(catalog.model("deepseek-v3"), layout, 256, 4096, whole_experts=True)
    mixed = [call for call in layer_calls(job, has_experts=True) if call.place == "feed-forward"]
    assert [(call.axis, call.ranks, call.stride) for call in mixed] == [("ep", 64, 1)]
    dense = [call.collective for call in layer_calls(job, has_experts=False)]
    assert dense == ["all_gather", "reduce_scatter"] * 2


def test_groups_of_a_step_are_those_of_the_layout() -> None:
    """Ranks and strides of the statement name the same groups as the layout's own arithmetic."""
    layout = Layout(dp=8, tp=2, pp=2, cp=2, ep=4, zero=1, shard=4, sequence_parallel=True)
    job = TrainJob(catalog.model("qwen3-30b-a3b"), layout, 256, 4096)
    calls = [*layer_calls(job, has_experts=True), *(c for one in data_exchanges(job) for c in one.calls)]
    assert layout.zero_ranks == len(layout.group("shard", 0))
    message = message_call(job)
    assert message is not None and message.stride == layout.group("pp", 0)[1]
    named = {"tp": "tp", "cp": "cp", "ep": "ep", "reduce_scatter": "shard", "all_reduce": "copies"}
    of_experts = {"reduce_scatter": "expert_data", "all_gather": "expert_data"}
    met = set()
    for call in calls:
        if call.place.endswith(" of experts"):
            name: str | None = of_experts[
                call.collective
            ]  # shared by all that hold the same: nothing is summed over copies
        else:
            name = named.get(call.axis) or named.get(call.collective)
        if name is None:
            continue
        met.add(name)
        assert tuple(call.stride * rank for rank in range(call.ranks)) == layout.group(name, 0), name  # type: ignore[arg-type]
    assert met == {*named.values(), "expert_data"}
