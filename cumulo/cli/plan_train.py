"""`cumulo plan train`: the fastest way to train a model on a cluster, what it needs, and why it is the fastest."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared import traffic as asked

if TYPE_CHECKING:
    from cumulo.plan.job import TrainJob
    from cumulo.plan.search.search import SearchResult
    from cumulo.plan.search.space import TrainGoal
    from cumulo.spec.cluster import Cluster

EXAMPLE = (
    "Example: [bold]cumulo plan train llama-3.1-405b --gpus 16384 --device h100-sxm --batch 2048 --sequence 8192 "
    "--tokens 15e12[/bold]"
)
_JOB, _CLUSTER, _LIMITS, _REPORT = "Training", "Cluster", "Limits", "Report"


def train(
    model: asked.ModelName,
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs. The plan uses all of them.", rich_help_panel=_CLUSTER)
    ],
    device: Annotated[
        str | None,
        typer.Option(
            help="Device, by its name in the catalogue. Default: h100-sxm.", rich_help_panel=_CLUSTER
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            help="Node type, by its name in the catalogue. Default: the first one with the device.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    fabric: Annotated[
        str, typer.Option(help="Network fabric, by its name in the catalogue.", rich_help_panel=_CLUSTER)
    ] = "rail-infiniband",
    batch: Annotated[
        int, typer.Option(help="Global batch size, in sequences per step.", rich_help_panel=_JOB)
    ] = 1024,
    sequence: Annotated[int, typer.Option(help="Sequence length, in tokens.", rich_help_panel=_JOB)] = 4096,
    dtype: Annotated[
        str, typer.Option(help="Number format: bfloat16, float16, float32 or float8.", rich_help_panel=_JOB)
    ] = "bfloat16",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw8bit or muon, as in `cumulo train`.", rich_help_panel=_JOB)
    ] = "adamw",
    offload_optimizer: Annotated[
        bool,
        typer.Option(
            "--offload-optimizer", help="Keep the optimizer states in host memory.", rich_help_panel=_JOB
        ),
    ] = False,
    offload_activations: Annotated[
        bool,
        typer.Option(
            "--offload-activations",
            help="Keep activations in host memory until the backward pass needs them.",
            rich_help_panel=_JOB,
        ),
    ] = False,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the whole run, for example 15e12.", rich_help_panel=_JOB)
    ] = None,
    fixed: Annotated[
        str | None,
        typer.Option(
            help="Predict this layout instead of searching for one: tp=8,pp=16,dp=64,zero=1,schedule=1f1b,chunks=2,"
            "sp=true,micro_batch=1,recompute=full. recompute can also be norm, activation, attention, or several "
            "of them joined by +. Other keys: cp, ep, ulysses, shard.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    storage_gb_s: Annotated[
        float,
        typer.Option(
            help="Storage bandwidth per node, in GB/s, for reading data and writing checkpoints.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 1.0,
    checkpoint_minutes: Annotated[
        float | None,
        typer.Option(
            help="Minutes between two checkpoints. Default: the best interval for the failure rate.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    asynchronous: Annotated[
        bool,
        typer.Option(
            "--async-checkpoints/--sync-checkpoints",
            help="Write checkpoints while training continues, or stop training to write them.",
            rich_help_panel=_JOB,
        ),
    ] = True,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            help="Usable memory per GPU, in GiB. Default: all of the device's memory.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    deadline_days: Annotated[
        float | None,
        typer.Option(help="Longest acceptable run time for --tokens, in days.", rich_help_panel=_LIMITS),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Highest acceptable price for --tokens, in dollars.", rich_help_panel=_LIMITS),
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the best plan to this file. `cumulo train FILE` runs it.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    timeline_file: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Draw the pipeline of the best plan into this file (SVG).",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    why: Annotated[
        bool,
        typer.Option(
            "--why/--no-why", help="Show how much a single change would save.", rich_help_panel=_REPORT
        ),
    ] = True,
    catalog_file: asked.CatalogFile = None,
    json_file: options.JsonOption = None,
) -> None:
    """Find the fastest way to train MODEL on a cluster: layout, schedule, memory, time, traffic, price, and why.

    The search considers every plan in its space and ranks them by predicted step time. `cumulo plan validate`
    compares the predictions with published results.
    """
    from shlex import quote

    from cumulo.base import report
    from cumulo.cli.shared.terminal import out, working
    from cumulo.cli.view import plan_train as view
    from cumulo.errors import ConfigError
    from cumulo.plan.job import OptimizerKind
    from cumulo.plan.search.plan_file import plan_text
    from cumulo.plan.search.run_cost import Limits, RunCost, check_limits
    from cumulo.plan.search.run_stalls import Storage, stalls_of
    from cumulo.plan.search.space import TrainGoal
    from cumulo.plan.search.why import changes

    limits = Limits(deadline_days, budget)
    interval_s = None if checkpoint_minutes is None else 60 * checkpoint_minutes
    storage = Storage(storage_gb_s * 1e9, asynchronous, interval_s)
    for name, value, choices in (
        ("--dtype", dtype, ("bfloat16", "float16", "float32", "float8")),
        ("--optimizer", optimizer, get_args(OptimizerKind)),
    ):
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    for option, amount in (("--tokens", tokens), ("--memory-gib", memory_gib)):
        if amount is not None and not 0 < amount < float("inf"):
            raise ConfigError(f"{option} must be more than 0 and finite, got {amount:g}")
    catalog = asked.load_catalog(catalog_file)
    wanted = device if device or node else "h100-sxm"
    goal = TrainGoal(
        asked.model_spec(model, catalog),
        catalog.cluster(gpus, wanted, node, fabric),
        batch,
        sequence,
        None if memory_gib is None else round(memory_gib * 2**30),
        dtype,  # type: ignore[arg-type]
        optimizer,  # type: ignore[arg-type]
        offload_optimizer,
        offload_activations,
    )
    with working("planning"):
        result = _plans(goal, fixed)
        best = result.plans[0]
        check_limits(best, goal, tokens, limits, storage, searched=fixed is None)
        stalls = stalls_of(best.job, goal.cluster, best.estimate.step_s, storage)
        gains = changes(best, goal, searched=fixed is None) if why else ()
    cost = None if tokens is None else RunCost.of(best, goal.cluster, tokens, stalls)
    command = [
        "cumulo plan train", quote(model), f"--gpus {gpus}", f"--node {node}" if node else f"--device {wanted}",
        f"--fabric {fabric}", f"--batch {batch}", f"--sequence {sequence}", f"--dtype {dtype}",
        f"--optimizer {optimizer}",
        "--offload-optimizer" if offload_optimizer else "",
        "--offload-activations" if offload_activations else "",
        f"--memory-gib {memory_gib!r}" if memory_gib else "",
        f"--tokens {tokens!r}" if tokens else "",
        f"--storage-gb-s {storage_gb_s!r}",
        f"--checkpoint-minutes {checkpoint_minutes!r}" if checkpoint_minutes else "",
        "" if asynchronous else "--sync-checkpoints",
        f"--fixed {quote(fixed)}" if fixed else "",
        f"--catalog {quote(str(catalog_file))}" if catalog_file else "",
    ]  # fmt: skip
    texts: list[tuple[Path, str]] = []
    if out_file is not None:
        steps = None if tokens is None else max(1, round(tokens / best.job.tokens_per_step))
        text = plan_text(best, goal.cluster, stalls, storage, " ".join(filter(None, command)), steps)
        texts.append((out_file, text))
    if timeline_file is not None:
        texts.append((timeline_file, _timeline(best.job, goal.cluster, model)))
    _write_files(texts)
    rows = view.rows(best, goal, cost, stalls)
    report.write_json(json_file, rows, **view.as_dict(result, gains, stalls))
    if str(json_file) != "-":
        view.show(out, model, goal, result, gains, cost, stalls)


def _plans(goal: "TrainGoal", fixed: str | None) -> "SearchResult":
    from cumulo.cli.shared.terminal import note
    from cumulo.plan.search.fixed import fixed_job
    from cumulo.plan.search.search import SearchResult, search, timed
    from cumulo.plan.search.why_not import refuse

    if fixed is not None:
        plan = timed(fixed_job(fixed, goal), goal)
        needed = plan.estimate.memory.total if plan.estimate.memory else 0
        if needed > goal.memory_limit_bytes:
            note(
                f"this layout needs {needed / 2**30:.1f} GiB per GPU, but only "
                f"{goal.memory_limit_bytes / 2**30:.1f} GiB are available: the time is predicted as if it fitted"
            )
        return SearchResult((plan,), 1, int(needed > goal.memory_limit_bytes), 1)
    result = search(goal)
    if not result.plans:
        refuse(goal)
    return result


def _timeline(job: "TrainJob", cluster: "Cluster", model: str) -> str:
    from cumulo.pipeline.draw.svg import to_svg
    from cumulo.plan.time.timeline import timeline

    played = timeline(job, cluster)
    title = f"{model}: {job.layout}, {played.schedule.micro_batches} of {job.micro_batches} micro-batches"
    return to_svg(played, title)


def _write_files(texts: "list[tuple[Path, str]]") -> None:
    from cumulo.cli.shared.terminal import note
    from cumulo.errors import CumuloError

    for path, text in texts:
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise CumuloError(f"cannot write {path}: {error.strerror or error}") from error
        note(f"written to {path}")
