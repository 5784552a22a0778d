"""`cumulo plan train`: the fastest way to train a model on a cluster, what it needs, and why it is the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import group, option, takes_options
from cumulo.cli.shared.software_options import SoftwareOptions

if TYPE_CHECKING:
    from cumulo.plan.job import TrainJob
    from cumulo.plan.search.search import SearchResult
    from cumulo.plan.search.space import TrainGoal
    from cumulo.plan.time.phases import CommunicationPhase
    from cumulo.spec.cluster import Cluster

EXAMPLE = (
    "Example: [bold]cumulo plan train llama-3.1-405b --gpus 16384 --device h100-sxm --batch 2048 --sequence 8192 "
    "--tokens 15e12[/bold]"
)
_LIMITS, _REPORT = "Limits", "Report"


@dataclass(frozen=True, kw_only=True)
class PlanTrainOptions:
    model: shared.ModelName
    where: shared.ClusterOptions = group()
    batches: shared.BatchOptions = shared.BatchOptions()
    how: SoftwareOptions = SoftwareOptions()
    dtype: str = option(
        "Number format: bfloat16, float16, float32 or float8.", "bfloat16", panel=shared.TRAINING
    )
    optimizer: str = option("adamw, adamw8bit or muon, as in `cumulo train`.", "adamw", panel=shared.TRAINING)
    offload_optimizer: bool = option(
        "Keep the optimizer states in host memory.", False, "--offload-optimizer", panel=shared.TRAINING
    )
    offload_activations: bool = option(
        "Keep activations in host memory until the backward pass needs them.",
        False,
        "--offload-activations",
        panel=shared.TRAINING,
    )
    tokens: float | None = option("Tokens of the whole run, for example 15e12.", None, panel=shared.TRAINING)
    fixed: str | None = option(
        "Predict this layout instead of searching for one: "
        "tp=8,pp=16,dp=64,zero=1,schedule=1f1b,chunks=2,sp=true,micro_batch=1,recompute=full. recompute can "
        "also be norm, activation, attention, or several of them joined by +. Other keys: cp, ep, etp, "
        "ulysses, shard. Or a file of --save-job.",
        None,
        panel=shared.TRAINING,
    )
    storage_gb_s: float = option(
        "Storage bandwidth per node, in GB/s, for reading data and writing checkpoints.",
        1.0,
        panel=shared.CLUSTER,
    )
    checkpoint_minutes: float | None = option(
        "Minutes between two checkpoints. Default: the best interval for the failure rate.",
        None,
        panel=shared.TRAINING,
    )
    asynchronous: bool = option(
        "Write checkpoints while training continues, or stop training to write them.",
        True,
        "--async-checkpoints/--sync-checkpoints",
        panel=shared.TRAINING,
    )
    memory_gib: float | None = option(
        "Usable memory per GPU, in GiB. Default: all of the device's memory.", None, panel=_LIMITS
    )
    deadline_days: float | None = option(
        "Longest acceptable run time for --tokens, in days.", None, panel=_LIMITS
    )
    budget: float | None = option("Highest acceptable price for --tokens, in dollars.", None, panel=_LIMITS)
    out_file: Path | None = option(
        "Write the best plan to this file. `cumulo train FILE` runs it.",
        None,
        "--out",
        panel=_REPORT,
        metavar="FILE",
    )
    job_file: Path | None = option(
        "Write the best plan's job to this file (YAML), with its software, recomputation and number formats. "
        "--fixed FILE reads it.",
        None,
        "--save-job",
        panel=_REPORT,
        metavar="FILE.yaml",
    )
    timeline_file: Path | None = option(
        "Draw the pipeline of the best plan into this file (SVG).",
        None,
        "--timeline",
        panel=_REPORT,
        metavar="FILE",
    )
    why: bool = option("Show how much a single change would save.", True, "--why/--no-why", panel=_REPORT)
    phases: bool = option(
        "Show every collective of a forward and a backward pass: bytes, time, and whether compute or bandwidth "
        "bounds it.",
        False,
        "--phases",
        panel=_REPORT,
    )
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@takes_options
def train(chosen: PlanTrainOptions) -> None:
    """Find the fastest way to train MODEL on a cluster: layout, schedule, memory, time, traffic, price, and why.

    The search considers every plan in its space and ranks them by predicted step time. `cumulo plan validate`
    compares the predictions with published results.
    """
    from cumulo.base import report
    from cumulo.cli.shared.terminal import out, working
    from cumulo.cli.view import plan_train as view
    from cumulo.cli.view.phases import phase_tables, phases_as_dicts
    from cumulo.plan.search.plan_file import job_text, plan_text
    from cumulo.plan.search.run_cost import RunCost, RunLimits, Storage, check_limits, stalls_of
    from cumulo.plan.search.why import changes

    goal, fixed = asked(chosen)
    tokens = chosen.tokens
    limits = RunLimits(chosen.deadline_days, chosen.budget)
    interval_s = None if chosen.checkpoint_minutes is None else 60 * chosen.checkpoint_minutes
    storage = Storage(chosen.storage_gb_s * 1e9, chosen.asynchronous, interval_s)
    with working("planning"):
        result = _plans(goal, fixed)
        best = result.plans[0]
        check_limits(best, goal, tokens, limits, storage, searched=fixed is None)
        stalls = stalls_of(best.job, goal.cluster, best.estimate.step_s, storage)
        gains = changes(best, goal, searched=fixed is None) if chosen.why else ()
    cost = None if tokens is None else RunCost.from_plan(best, goal.cluster, tokens, stalls)
    texts: list[tuple[Path, str]] = []
    if chosen.out_file is not None:
        steps = None if tokens is None else max(1, round(tokens / best.job.tokens_per_step))
        text = plan_text(best, goal.cluster, stalls, storage, _command(chosen), steps)
        texts.append((chosen.out_file, text))
    if chosen.job_file is not None:
        texts.append((chosen.job_file, job_text(best.job)))
    if chosen.timeline_file is not None:
        texts.append((chosen.timeline_file, _timeline(best.job, goal.cluster, chosen.model)))
    _write_files(texts)
    rows = view.rows(best, goal, cost, stalls)
    phases = _phases(best.job, goal.cluster) if chosen.phases else ()
    more = {"phases": phases_as_dicts(phases)} if phases else {}
    report.write_json(chosen.json_file, rows, **view.as_dict(result, gains, stalls), **more)
    if str(chosen.json_file) != "-":
        view.show(out, chosen.model, goal, result, gains, cost, stalls)
        for table in phase_tables(phases):
            out.print(table)


def parsed(words: Sequence[str]) -> "tuple[TrainGoal, str | None]":
    """What these words of `cumulo plan train` ask for, read by its own options."""
    import typer

    found: list[tuple[TrainGoal, str | None]] = []

    def remember(chosen: PlanTrainOptions) -> None:
        found.append(asked(chosen))

    reader = typer.Typer(add_completion=False)
    reader.command()(takes_options(remember))
    typer.main.get_command(reader).main(list(words), "plan train", standalone_mode=False)
    return found[0]


def asked(chosen: PlanTrainOptions) -> "tuple[TrainGoal, str | None]":
    """The job, and its layout where one is given."""
    from cumulo.errors import ConfigError
    from cumulo.plan.job import OptimizerKind
    from cumulo.plan.search.space import TrainGoal
    from cumulo.spec.catalog import shipped

    system = chosen.how.system()
    where = replace(chosen.where, fabric=system.get("fabric", chosen.where.fabric))
    batches = chosen.batches
    dtype, fixed = system.get("dtype", chosen.dtype), chosen.fixed or system.get("layout")
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
    catalog = shipped(chosen.catalog_file)
    goal = TrainGoal(
        catalog.model_or_file(chosen.model),
        where.cluster(catalog),
        system.get("batch", batches.batch),
        system.get("sequence", batches.sequence),
        None if chosen.memory_gib is None else round(chosen.memory_gib * 2**30),
        dtype,
        chosen.optimizer,  # type: ignore[arg-type]
        chosen.offload_optimizer,
        chosen.offload_activations,
        **chosen.how.traits(),
    )
    return goal, fixed


def _command(chosen: PlanTrainOptions) -> str:
    """The command that makes this plan, for its file."""
    from shlex import quote

    where = chosen.where
    words = [
        "cumulo plan train", quote(chosen.model), f"--gpus {where.gpus}",
        f"--node {where.node}" if where.node else f"--device {where.known_device}",
        f"--fabric {where.fabric}", f"--batch {chosen.batches.batch}", f"--sequence {chosen.batches.sequence}",
        f"--dtype {chosen.dtype}", f"--optimizer {chosen.optimizer}",
        "--offload-optimizer" if chosen.offload_optimizer else "",
        "--offload-activations" if chosen.offload_activations else "",
        f"--memory-gib {chosen.memory_gib!r}" if chosen.memory_gib else "",
        f"--tokens {chosen.tokens!r}" if chosen.tokens else "",
        f"--storage-gb-s {chosen.storage_gb_s!r}",
        f"--checkpoint-minutes {chosen.checkpoint_minutes!r}" if chosen.checkpoint_minutes else "",
        "" if chosen.asynchronous else "--sync-checkpoints",
        f"--fixed {quote(chosen.fixed)}" if chosen.fixed else "",
        *chosen.how.words(),
        f"--catalog {quote(str(chosen.catalog_file))}" if chosen.catalog_file else "",
    ]  # fmt: skip
    return " ".join(filter(None, words))


def _plans(goal: "TrainGoal", fixed: str | None) -> "SearchResult":
    from cumulo.cli.shared.terminal import note
    from cumulo.plan.memory.peak import peak_memory
    from cumulo.plan.search.fixed import fitted, fixed_job, said_in
    from cumulo.plan.search.plan_file import SUFFIXES, read_job
    from cumulo.plan.search.search import SearchResult, search, timed
    from cumulo.plan.search.unnamed import timed_unnamed, widened
    from cumulo.plan.search.why import refuse

    if fixed is not None and fixed.endswith(SUFFIXES):
        job = read_job(Path(fixed), goal.model, goal.cluster.gpus)
        return SearchResult((timed(job, goal),), 1, int(peak_memory(job).total > goal.memory_limit_bytes), 1)
    if fixed is not None:
        if goal.software_named:
            fits = fitted(fixed_job(fixed, goal), goal.memory_limit_bytes, said_in(fixed))
            plan = timed(fits.job, goal)
        else:
            plan, fits = timed_unnamed(fixed, goal)
        needed = plan.estimate.memory.total if plan.estimate.memory else 0
        if fits.saved_by:
            note(
                f"as given, this layout needs {fits.needed_bytes / 2**30:.3g} GiB per GPU, and "
                f"{goal.memory_limit_bytes / 2**30:.3g} GiB are available: it is predicted with "
                f"{', '.join(fits.saved_by)}"
            )
        if needed > goal.memory_limit_bytes:
            note(
                f"this layout needs {needed / 2**30:.3g} GiB per GPU, but only "
                f"{goal.memory_limit_bytes / 2**30:.3g} GiB are available: the time is predicted as if it fitted"
            )
        return SearchResult((plan,), 1, int(needed > goal.memory_limit_bytes), 1)
    result = search(goal)
    if not result.plans:
        refuse(goal)
    if not goal.software_named:
        result = replace(result, plans=(widened(result.plans[0], goal), *result.plans[1:]))
    return result


def _phases(job: "TrainJob", cluster: "Cluster") -> "tuple[CommunicationPhase, ...]":
    from cumulo.plan.time.compute_profile import shipped_for
    from cumulo.plan.time.phases import phases_of

    profile, _ = shipped_for(cluster.device, job.dtype, job.software)
    return phases_of(job, cluster, profile)


def _timeline(job: "TrainJob", cluster: "Cluster", model: str) -> str:
    from cumulo.pipeline.draw import to_svg
    from cumulo.plan.time.step import timeline

    played = timeline(job, cluster)
    title = f"{model}: {job.layout}, {played.schedule.micro_batches} of {job.micro_batches} micro-batches"
    return to_svg(played, title)


def _write_files(texts: "list[tuple[Path, str]]") -> None:
    from cumulo.base.files import write_text_file
    from cumulo.cli.shared.terminal import note

    for path, text in texts:
        write_text_file(path, text)
        note(f"written to {path}")
