"""`cumulo plan train`: the fastest way to train a model on a cluster, what it needs, and why it is the fastest."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from cumulo.base.nearest import names_in
from cumulo.cli.plan import train_report as view
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import Panel, group, takes_options, typed_flags
from cumulo.cli.shared.terminal import note, present, save, working
from cumulo.errors import ConfigError
from cumulo.pipeline.draw import to_svg
from cumulo.plan.job import OptimizerKind, TrainJob
from cumulo.plan.memory.peak import peak_memory
from cumulo.plan.search.fixed import fitted, fixed_job, said_in
from cumulo.plan.search.plan_file import SUFFIXES, job_text, plan_text, read_job
from cumulo.plan.search.run_cost import RunCost, RunLimits, Storage, check_limits, stalls_of
from cumulo.plan.search.search import SearchResult, search, timed
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.search.unnamed import remarks, system_named, timed_unnamed, widened
from cumulo.plan.search.why import changes, refuse
from cumulo.plan.time.compute_profile import shipped_for
from cumulo.plan.time.phases import CommunicationPhase, phases_of
from cumulo.plan.time.step import timeline
from cumulo.spec.catalog import shipped
from cumulo.spec.cluster import Cluster

_SOFTWARE = Panel("Software")


@dataclass(frozen=True, kw_only=True)
class SoftwareOptions:
    """How the job is carried out."""

    like: str | None = _SOFTWARE(
        "Take software, layout and number formats from a published system: deepseek-v3, llama-3, megascale or "
        "mt-nlg. Options that are given, --fixed too, take precedence.",
        None,
    )
    software: str = _SOFTWARE(
        "Generation of software: current, nemo-2025, megatron-core-2024, megatron-bridge-2026, "
        "torchtitan-2024-compile, fsdp-2023, cumulo-2026, ... ",
        "current",
    )
    date: str | None = _SOFTWARE(
        "Year and month in which the job runs, such as 2026-02, if --software is omitted: framework versions "
        "that were released later are not considered. Default: any version.",
        None,
    )
    overlap_tensor: bool | None = _SOFTWARE(
        "Hide tensor-parallel collectives behind matrix products. Default: as the software does.",
        None,
        "--overlap-tensor/--no-overlap-tensor",
    )
    expert_exchange: str | None = _SOFTWARE(
        "How tokens reach experts: once (to each rank that wants them) or all-to-all (for each expert). Default: "
        "as the software does.",
        None,
    )
    overlap_expert: bool = _SOFTWARE.flag("Exchange tokens behind the computation of another micro-batch.")
    predict_ahead: int = _SOFTWARE("Further tokens that extra layers predict (MTP).", 0, "--mtp", min=0)
    moment_dtype: str = _SOFTWARE("Number format of the optimizer's moments: float32 or bfloat16.", "float32")
    narrow_activations: bool = _SOFTWARE.flag("Keep activations for the backward pass in 8 bits.")
    lora_rank: int | None = _SOFTWARE(
        "Train only adapters of this rank (LoRA); the weights are frozen.", None, min=1
    )
    lora_targets: str = _SOFTWARE(
        "Projections that get adapters, joined by commas: qkv, output, gate_up, down, as in `cumulo train`.",
        "qkv,output,gate_up,down",
    )
    frozen_bits: int = _SOFTWARE("Bits of a frozen weight: 16, 8, or 4 (QLoRA).", 16)

    def system(self) -> Mapping[str, Any]:
        """What the system named by --like chose, except where an option was given."""
        chosen = system_named(self.like) if self.like else {}
        return {name: value for name, value in chosen.items() if name not in typed_flags()}

    def traits(self) -> dict[str, Any]:
        """For `TrainGoal`."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "like"}
        own["lora_targets"] = tuple(names_in(self.lora_targets))
        known = {*own, "flash_attention"}
        own["software_named"] = self.like is not None or "software" in typed_flags()
        return {**own, **{name: value for name, value in self.system().items() if name in known}}


EXAMPLE = (
    "Example: [bold]cumulo plan train llama-3.1-405b --gpus 16384 --device h100-sxm --batch 2048 --sequence 8192 "
    "--tokens 15e12[/bold]"
)
_LIMITS, _REPORT = map(Panel, ("Limits", "Report"))
_SURE = 0.8  # a plan that fits less surely is said to


@dataclass(frozen=True, kw_only=True)
class PlanTrainOptions:
    model: shared.ModelName
    where: shared.ClusterOptions = group()
    batches: shared.BatchOptions = shared.BatchOptions()
    how: SoftwareOptions = SoftwareOptions()
    dtype: str | None = shared.TRAINING(
        "Number format: bfloat16, float16, float32 or float8. Default: bfloat16; on a CPU float32.", None
    )
    optimizer: str = shared.TRAINING("adamw, adamw8bit or muon, as in `cumulo train`.", "adamw")
    offload_optimizer: bool = shared.TRAINING.flag("Keep the optimizer states in host memory.")
    offload_activations: bool = shared.TRAINING.flag(
        "Keep activations in host memory until the backward pass needs them."
    )
    tokens: float | None = shared.TRAINING("Tokens of the whole run, for example 15e12.", None)
    fixed: str | None = shared.TRAINING(
        "Predict this layout instead of searching for one: "
        "tp=8,pp=16,dp=64,zero=1,schedule=1f1b,chunks=2,sp=true,micro_batch=1,recompute=full. recompute can "
        "also be norm, activation, attention, or several of them joined by +. Other keys: cp, ep, etp, "
        "ulysses, shard. Or a file of --save-job.",
        None,
    )
    storage_gb_s: float = shared.CLUSTER(
        "Storage bandwidth per node, in GB/s, for reading data and writing checkpoints.",
        1.0,
        "--storage-gb-s",
    )
    checkpoint_minutes: float | None = shared.TRAINING(
        "Minutes between two checkpoints. Default: the best interval for the failure rate.", None
    )
    asynchronous: bool = shared.TRAINING(
        "Write checkpoints while training continues, or stop training to write them.",
        True,
        "--async-checkpoints/--sync-checkpoints",
    )
    memory_gib: float | None = _LIMITS(
        "Usable memory per GPU, in GiB. Default: all of the device's memory.", None
    )
    deadline_days: float | None = _LIMITS("Longest acceptable run time for --tokens, in days.", None)
    budget: float | None = _LIMITS("Highest acceptable price for --tokens, in dollars.", None)
    out_file: Path | None = _REPORT(
        "Write the best plan to this file. `cumulo train FILE` runs it.", None, "--out"
    )
    job_file: Path | None = _REPORT(
        "Write the best plan's job to this file (YAML), with its software, recomputation and number formats. "
        "--fixed FILE reads it.",
        None,
        "--save-job",
        metavar="FILE.yaml",
    )
    timeline_file: Path | None = _REPORT(
        "Draw the pipeline of the best plan into this file (SVG).", None, "--timeline"
    )
    why: bool = _REPORT("Show how much a single change would save.", True, "--why/--no-why")
    phases: bool = _REPORT.flag(
        "Show every collective of a forward and a backward pass: bytes, time, and whether compute or bandwidth "
        "bounds it."
    )
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@takes_options
def train(chosen: PlanTrainOptions) -> None:
    """Find the fastest way to train MODEL on a cluster: layout, schedule, memory, time, traffic, price, and why.

    The search considers every plan in its space and ranks them by predicted step time. `cumulo plan validate`
    compares the predictions with published results.
    """
    goal, fixed = asked(chosen)
    tokens = chosen.tokens
    limits = RunLimits(chosen.deadline_days, chosen.budget)
    interval_s = None if chosen.checkpoint_minutes is None else 60 * chosen.checkpoint_minutes
    storage = Storage(chosen.storage_gb_s * 1e9, chosen.asynchronous, interval_s)
    if dtype_note := _wider(goal):
        note(dtype_note)
    with working("planning"):
        result = _plans(goal, fixed)
        best = result.plans[0]
        unsure = check_limits(best, goal, tokens, limits, storage, searched=fixed is None)
        stalls = stalls_of(best.job, goal.cluster, best.estimate.step_s, storage)
        gains = changes(best, goal, searched=fixed is None) if chosen.why else ()
    cost = None if tokens is None else RunCost.from_plan(best, goal.cluster, tokens, stalls)
    steps = None if tokens is None else max(1, round(tokens / best.job.tokens_per_step))
    command = shlex.join(["cumulo", *sys.argv[1:]])
    save(chosen.out_file, lambda: plan_text(best, goal.cluster, stalls, storage, command, steps), "plan")
    save(chosen.job_file, lambda: job_text(best.job), "job")
    save(chosen.timeline_file, lambda: _timeline(best.job, goal.cluster, chosen.model), "timeline")
    rows = view.rows(best, goal, cost, stalls)
    phases = _phases(best.job, goal.cluster) if chosen.phases else ()
    more = {"phases": view.phases_as_dicts(phases)} if phases else {}
    short = view.in_short(best, goal, cost, gains)
    tables = view.shown(chosen.model, goal, result, gains, rows, stalls, short), view.phase_tables(phases)
    told = view.as_dict(result, gains, stalls) | more | {"in_short": short}
    present(rows, chosen.json_file, *tables[0], *tables[1], **told)
    if unsure:
        note(unsure)
    sure = (
        best.estimate.memory.fits_with_probability(goal.memory_limit_bytes) if best.estimate.memory else 1.0
    )
    if fixed is None and sure < _SURE:
        roomy = 0.9 * goal.memory_limit_bytes / 2**30
        note(
            f"the best plan fits into memory with a probability of {sure:.0%} only; --memory-gib {roomy:.3g} plans "
            "with room"
        )


def _wider(goal: TrainGoal) -> str:
    """What is to be known of a number format that the device does not compute in."""
    device, dtype = goal.cluster.device, goal.dtype
    if dtype in device.peak_flops or device.generation == "cpu":
        return ""
    rates = ", ".join(name for name in device.peak_flops)
    return (
        f"{device.name} has no units for {dtype} (it has {rates}): its products are timed at the rate of the next "
        "wider format"
    )


def asked(chosen: PlanTrainOptions) -> tuple[TrainGoal, str | None]:
    """The job, and its layout where one is given."""
    system = chosen.how.system()
    where = replace(chosen.where, fabric=system.get("fabric", chosen.where.fabric))
    batches, fixed = chosen.batches, chosen.fixed or system.get("layout")
    catalog = shipped(chosen.catalog_file)
    cluster = where.cluster(catalog)
    usual = "float32" if cluster.device.generation == "cpu" else "bfloat16"
    dtype = system.get("dtype", chosen.dtype) or usual
    for name, value, choices in (
        ("--dtype", dtype, ("bfloat16", "float16", "float32", "float8")),
        ("--expert-exchange", chosen.how.expert_exchange or "once", ("once", "all-to-all")),
        ("--moment-dtype", chosen.how.moment_dtype, ("float32", "bfloat16")),
        ("--frozen-bits", chosen.how.frozen_bits, (4, 8, 16)),
        ("--optimizer", chosen.optimizer, get_args(OptimizerKind)),
    ):
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}")
    for name, amount in (("--tokens", chosen.tokens), ("--memory-gib", chosen.memory_gib)):
        if amount is not None and not 0 < amount < float("inf"):
            raise ConfigError(f"{name} must be more than 0 and finite, got {amount:g}")
    goal = TrainGoal(
        catalog.model_or_file(chosen.model),
        cluster,
        system.get("batch", batches.batch),
        system.get("sequence", batches.sequence),
        None if chosen.memory_gib is None else round(chosen.memory_gib * 2**30),
        dtype=dtype,  # type: ignore[arg-type]
        optimizer=chosen.optimizer,  # type: ignore[arg-type]
        offload_optimizer=chosen.offload_optimizer,
        offload_activations=chosen.offload_activations,
        **chosen.how.traits(),
    )
    return goal, fixed


def _plans(goal: TrainGoal, fixed: str | None) -> SearchResult:
    limit = goal.memory_limit_bytes
    if fixed is not None and fixed.endswith(SUFFIXES):
        job = read_job(Path(fixed), goal.model, goal.cluster.gpus)
        return SearchResult((timed(job, goal),), 1, int(peak_memory(job).total > limit), 1)
    if fixed is not None:
        if goal.software_named:
            fits = fitted(fixed_job(fixed, goal), limit, said_in(fixed))
            plan = timed(fits.job, goal)
        else:
            plan, fits = timed_unnamed(fixed, goal)
        for remark in remarks(fixed, plan, fits, limit):
            note(remark)
        needed = plan.estimate.memory.total if plan.estimate.memory else 0
        if needed > limit:
            note(
                f"this layout needs {needed / 2**30:.3g} GiB per GPU, but only {limit / 2**30:.3g} GiB are "
                "available: the time is predicted as if it fitted"
            )
        return SearchResult((plan,), 1, int(needed > limit), 1)
    result = search(goal)
    if not result.plans:
        refuse(goal)
    if not goal.software_named:
        result = replace(result, plans=(widened(result.plans[0], goal), *result.plans[1:]))
    return result


def _phases(job: TrainJob, cluster: Cluster) -> tuple[CommunicationPhase, ...]:
    profile, _ = shipped_for(cluster.device, job.dtype, job.software)
    return phases_of(job, cluster, profile)


def _timeline(job: TrainJob, cluster: Cluster, model: str) -> str:
    played = timeline(job, cluster)
    title = f"{model}: {job.layout}, {played.schedule.micro_batches} of {job.micro_batches} micro-batches"
    return to_svg(played, title)
