"""The search against trying everything, and its bounds against what they bound."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from cumulo.errors import ConfigError, OutOfMemory
from cumulo.pipeline.decide.actions import PipelineSchedule
from cumulo.pipeline.decide.catalog import FAMILIES, build
from cumulo.plan.evidence.published import held_out_rows, rows
from cumulo.plan.job import TrainJob
from cumulo.plan.memory import live as memory_live
from cumulo.plan.memory.peak import least_memory_bytes, peak_memory
from cumulo.plan.search.bounds import Bounds
from cumulo.plan.search.fixed import fixed_job
from cumulo.plan.search.plan_file import job_text, read_job
from cumulo.plan.search.search import search, timed
from cumulo.plan.search.space import (
    Choices,
    JobShape,
    TrainGoal,
    Variant,
    job_of,
    pipelines,
    shapes,
    zero_stages,
)
from cumulo.plan.search.why import least_memory, refuse
from cumulo.plan.time.compute_profile import shipped
from cumulo.plan.time.step import estimate, step_time
from cumulo.spec.catalog import cluster, model
from tests.thorough import rare

FEW = Choices(
    micro_batches=(1, 2),
    schedules=("1f1b", "interleaved-1f1b", "zb-v", "dualpipe"),
    chunks_per_stage=(2,),
    zero=(1, 3),
    zero_with_pipeline=(0, 1),
)


def _goal(name: str, gpus: int, batch: int, device: str = "h100-sxm", **fields: object) -> TrainGoal:
    return TrainGoal(model(name), cluster(gpus, device), batch, 2048, **fields)  # type: ignore[arg-type]


def _everything(goal: TrainGoal, choices: Choices) -> list[tuple[JobShape, TrainJob]]:
    return [
        (shape, job_of(shape, Variant(schedule, chunks, zero, recompute), goal))
        for shape in shapes(goal, choices)
        for schedule, chunks in pipelines(
            shape.pp, shape.micro_batches(goal.global_batch), goal.model.layers, choices
        )
        for zero in zero_stages(shape, choices)
        for recompute in choices.recompute
    ]


GOALS = [
    _goal("qwen3-0.6b", 8, 16),
    _goal("llama-3.1-8b", 8, 16),  # much does not fit
    _goal("llama-3.1-8b", 16, 16, memory_bytes=30 * 2**30),
    _goal("deepseek-v2-lite", 8, 16),  # experts, a first layer without
    _goal("gpt3-1.3b", 8, 8, "l40s"),  # slow links
    _goal("llama-3.1-8b", 8, 16, "l40s", optimizer="adamw8bit", offload_optimizer=True),
    _goal("llama-3.1-8b", 8, 16, memory_bytes=24 * 2**30, offload_activations=True),
    # A framework that keeps outputs of stages, and waits for messages.
    _goal("gpt3-13b", 16, 32, "a100-40gb", software="megatron-deepspeed-2022"),
]


@pytest.mark.long
@pytest.mark.parametrize("goal", [*GOALS[:2], *GOALS[4:], *rare(*GOALS[2:4])])
def test_the_search_finds_what_trying_everything_finds(goal: TrainGoal) -> None:
    found: dict[tuple[int, ...], float] = {}
    everything = _everything(goal, FEW)
    for shape, job in everything:
        if peak_memory(job).total <= goal.memory_limit_bytes:
            step_s = estimate(job, goal.cluster, explain=False).step_s
            found[shape.mesh] = min(step_s, found.get(shape.mesh, float("inf")))
    result = search(goal, FEW, keep=4)
    assert [plan.estimate.step_s for plan in result.plans] == pytest.approx(sorted(found.values())[:4])
    assert result.enumerated == len(everything)
    assert result.timed < len(everything) / 4  # it is a search


@pytest.mark.long
@pytest.mark.parametrize("goal", [GOALS[0], *GOALS[2:4], GOALS[7], *rare(GOALS[1], *GOALS[4:7])])
def test_no_bound_is_above_what_it_bounds(goal: TrainGoal) -> None:
    profile, _ = shipped().find(goal.cluster.device, goal.dtype, goal.software)
    bounds = Bounds(goal, profile)
    for shape, job in itertools.islice(_everything(goal, FEW), 0, None, 7):
        layout = job.layout
        step_s = estimate(job, goal.cluster, explain=False).step_s * (1 + 1e-9)
        each = layout.chunks_per_stage or FAMILIES[layout.schedule].chunks_per_stage
        variant = Variant(layout.schedule, layout.chunks_per_stage, layout.zero, job.recompute)
        pipeline_s = bounds.pipeline_s(shape, layout.schedule, each, job.recompute)
        assert bounds.shape_s(shape) <= pipeline_s * (1 + 1e-9) <= step_s * (1 + 2e-9)
        plan_s, least_s = bounds.plan_s(shape, job)
        assert plan_s >= step_time(job, goal.cluster, profile, play=False).step_s * (1 - 1e-9)
        assert least_s <= plan_s <= step_s
        more = estimate(replace(job, recompute=FEW.recompute[-1]), goal.cluster, explain=False)
        assert least_s <= more.step_s * (1 + 1e-9)
        needed = peak_memory(job).total * (1 + 1e-9)
        assert bounds.fitting(shape, (variant,), needed) == (variant,)
        assert least_memory_bytes(job) <= needed


def test_what_a_stage_holds_is_the_same_whichever_plan_was_asked_about_first() -> None:
    goal = GOALS[7]
    profile, _ = shipped().find(goal.cluster.device, goal.dtype, goal.software)
    shared = Bounds(goal, profile)
    for shape, job in itertools.islice(_everything(goal, FEW), 0, None, 11):
        layout = job.layout
        variant = Variant(layout.schedule, layout.chunks_per_stage, layout.zero, job.recompute)
        for stage in {0, layout.pp - 1}:
            alone = Bounds(goal, profile).stage_holds(shape, variant, stage)
            assert shared.stage_holds(shape, variant, stage) == alone


def test_every_plan_of_a_result_fits_and_uses_every_gpu() -> None:
    goal = _goal("llama-3.1-8b", 16, 32, memory_bytes=24 * 2**30)
    result = search(goal, keep=5)
    assert result.plans
    for plan in result.plans:
        assert plan.job.layout.world == 16
        assert plan.estimate.memory is not None
        assert plan.estimate.memory.total <= 24 * 2**30
    times = [plan.estimate.step_s for plan in result.plans]
    assert times == sorted(times)


def test_more_memory_or_a_faster_network_never_makes_the_best_plan_slower() -> None:
    goal = _goal("llama-3.1-8b", 16, 32, memory_bytes=24 * 2**30)
    (best,) = search(goal, FEW, keep=1).plans
    (roomier,) = search(replace(goal, memory_bytes=80 * 2**30), FEW, keep=1).plans
    node = replace(goal.cluster.node, nic_bytes_per_s=4 * goal.cluster.node.nic_bytes_per_s)
    (wired,) = search(replace(goal, cluster=replace(goal.cluster, node=node)), FEW, keep=1).plans
    assert roomier.estimate.step_s <= best.estimate.step_s
    assert wired.estimate.step_s <= best.estimate.step_s


@pytest.mark.parametrize(("gpus", "gib"), [(112, 60), *rare((64, 80), (16384, 4))])
def test_a_model_that_cannot_fit_is_refused_without_playing_schedules(
    gpus: int, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[int] = []

    def building(name: str, stages: int, micro_batches: int, chunks: int) -> PipelineSchedule:
        played.append(stages * micro_batches * chunks)
        return build(name, stages, micro_batches, chunks)

    monkeypatch.setattr(memory_live, "build", building)
    memory_live.stage_loads.cache_clear()
    goal = TrainGoal(model("llama-3.1-405b"), cluster(gpus, "h100-sxm"), 6144, 8192, gib * 2**30)
    assert not search(goal).plans
    with pytest.raises(OutOfMemory, match="no layout fits: the least any needs is"):
        refuse(goal)
    # Of all that are refused, the one that needs least was looked at, and as little of it as repeats.
    assert len(played) <= 8 and max(played, default=0) <= 2 * 126 * 126


@pytest.mark.long
def test_a_405b_model_on_16384_gpus_is_planned_in_seconds_and_no_slower_than_it_was_trained() -> None:
    """Grattafiori et al. 2024, table 4: tp 8, pp 16, dp 128 for 16 million tokens a step."""
    goal = TrainGoal(model("llama-3.1-405b"), cluster(16384, "h100-sxm"), 2048, 8192)
    result = search(goal)
    # What makes it seconds: of all these, so few are timed.
    assert result.enumerated > 10_000 and result.timed < 100
    theirs = fixed_job("tp=8,pp=16,dp=128,zero=1,sp=true,schedule=interleaved-1f1b,chunks=4", goal)
    assert result.plans[0].estimate.step_s <= timed(theirs, goal).estimate.step_s


def test_the_least_memory_is_that_of_the_layout_that_needs_least() -> None:
    goal = _goal("llama-3.1-8b", 32, 32)
    choices = Choices(
        micro_batches=(1,), schedules=("1f1b",), recompute=("full",), sequence_parallel=(True,), zero=(3,),
        zero_with_pipeline=(3,),
    )  # fmt: skip
    least = least_memory(goal)
    assert least is not None
    assert least[0].total == min(peak_memory(job).total for _, job in _everything(goal, choices))


def test_only_what_is_faster_is_searched_for() -> None:
    all_of_them = search(GOALS[1], FEW, keep=4).plans
    second_s = all_of_them[1].estimate.step_s
    assert search(GOALS[1], FEW, keep=4, faster_than_s=second_s).plans == all_of_them[:1]


def test_the_same_search_gives_the_same_plans() -> None:
    first, second = (search(GOALS[0], FEW) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("fields", [{"global_batch": 0}, {"sequence_length": -1}, {"memory_bytes": 0}])
def test_a_goal_without_sense_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"must be (1 or )?more"):
        replace(GOALS[0], **fields)


def test_a_job_with_all_its_traits_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    own = replace(rows()[0].job, moment_dtype="bfloat16", narrow_activations=True, software="fsdp-2023")
    for job in (own, *(row.job for row in (*rows()[::40], *held_out_rows()[::10]))):
        file.write_text(job_text(job))
        assert read_job(file, job.model, job.layout.world) == job
    file.write_text("softwear: nemo-2025\nlayout: {}")
    with pytest.raises(ConfigError, match="softwear"):
        read_job(file, own.model, 1)
