"""`cumulo plan train`: the best way to train a model on a cluster, what it takes, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cumulo.cli import options
from cumulo.cli import simulate_traffic as asked

if TYPE_CHECKING:
    from cumulo.plan.search import SearchResult
    from cumulo.plan.search_space import TrainGoal

EXAMPLE = (
    "Example: [bold]cumulo plan train llama-3.1-405b --gpus 16384 --device h100-sxm --batch 2048 --sequence 8192 "
    "--tokens 15e12[/bold]"
)
_JOB, _CLUSTER, _LIMITS, _REPORT = "Training", "Cluster", "Limits", "Report"


def train(
    model: asked.ModelName,
    gpus: Annotated[int, typer.Option(help="All of which are used.", rich_help_panel=_CLUSTER)],
    device: Annotated[
        str | None, typer.Option(help="Of the catalogue; left out: h100-sxm.", rich_help_panel=_CLUSTER)
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="Of the catalogue; left out: the device's first.", rich_help_panel=_CLUSTER),
    ] = None,
    fabric: Annotated[
        str, typer.Option(help="Of the catalogue.", rich_help_panel=_CLUSTER)
    ] = "rail-infiniband",
    batch: Annotated[int, typer.Option(help="Sequences of a step.", rich_help_panel=_JOB)] = 1024,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.", rich_help_panel=_JOB)] = 4096,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32 or float8.", rich_help_panel=_JOB)
    ] = "bfloat16",
    optimizer: Annotated[str, typer.Option(help="adamw or muon.", rich_help_panel=_JOB)] = "adamw",
    tokens: Annotated[
        float | None, typer.Option(help="Of the whole run, as in 15e12.", rich_help_panel=_JOB)
    ] = None,
    fixed: Annotated[
        str | None,
        typer.Option(
            help="Time this layout instead of searching: tp=8,pp=16,dp=64,zero=1,schedule=1f1b,chunks=2,sp=true,"
            "micro_batch=1,recompute=full; also cp, ep, ulysses, shard.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Of a GPU; left out: all the device has.", rich_help_panel=_LIMITS),
    ] = None,
    deadline_days: Annotated[
        float | None, typer.Option(help="For --tokens.", rich_help_panel=_LIMITS)
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="In dollars, for --tokens.", rich_help_panel=_LIMITS)
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the best plan there; `cumulo train` runs it.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    timeline_file: Annotated[
        Path | None,
        typer.Option(
            "--timeline", metavar="FILE", help="Draw its pipeline there (SVG).", rich_help_panel=_REPORT
        ),
    ] = None,
    why: Annotated[
        bool, typer.Option("--why/--no-why", help="What one change would gain.", rich_help_panel=_REPORT)
    ] = True,
    catalog_file: asked.CatalogFile = None,
    json_file: options.JsonOption = None,
) -> None:
    """Find the fastest way to train MODEL: layout, schedule, memory, time, bytes, money, and why.

    Every plan of the space is considered; the best is the best of all of them, by the cost model that
    `cumulo plan validate` holds against published results.
    """
    from cumulo.cli import plan_train_view as view
    from cumulo.cli import report
    from cumulo.cli.terminal import out, working
    from cumulo.errors import ConfigError
    from cumulo.plan.run_cost import Limits, RunCost, check_limits
    from cumulo.plan.search_space import TrainGoal
    from cumulo.plan.why import changes

    limits = Limits(deadline_days, budget)
    for name, value, choices in (
        ("--dtype", dtype, ("bfloat16", "float16", "float32", "float8")),
        ("--optimizer", optimizer, ("adamw", "muon")),
    ):
        if value not in choices:
            raise ConfigError(f"{name} is {', '.join(choices)}; got {value!r}")
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
    )
    with working("planning"):
        result = _plans(goal, fixed)
        best = result.plans[0]
        check_limits(best, goal, tokens, limits, searched=fixed is None)
        gains = changes(best, goal) if why else ()
    cost = None if tokens is None else RunCost.of(best, goal.cluster, tokens)
    _write_files(result, goal, model, tokens, out_file, timeline_file)
    rows = view.rows(best, goal, cost)
    report.write_json(json_file, rows, **view.as_dict(result, gains))
    if str(json_file) != "-":
        view.show(out, model, goal, result, gains, cost)


def _plans(goal: "TrainGoal", fixed: str | None) -> "SearchResult":
    from cumulo.cli.terminal import note
    from cumulo.plan.fixed import fixed_job
    from cumulo.plan.search import SearchResult, search, timed
    from cumulo.plan.why_not import refuse

    if fixed is not None:
        plan = timed(fixed_job(fixed, goal), goal)
        needed = plan.estimate.memory.total if plan.estimate.memory else 0
        if needed > goal.memory_limit_bytes:
            note(
                f"this layout needs {needed / 2**30:.1f} GiB on a GPU, and there are "
                f"{goal.memory_limit_bytes / 2**30:.1f} GiB: it is timed as if it fitted"
            )
        return SearchResult((plan,), 1, int(needed > goal.memory_limit_bytes), 1)
    result = search(goal)
    if not result.plans:
        refuse(goal)
    return result


def _write_files(
    result: "SearchResult",
    goal: "TrainGoal",
    model: str,
    tokens: float | None,
    out_file: Path | None,
    timeline_file: Path | None,
) -> None:
    from cumulo.cli.terminal import note
    from cumulo.errors import CumuloError
    from cumulo.pipeline.draw import to_svg
    from cumulo.plan.plan_file import plan_text
    from cumulo.plan.timeline import timeline

    job = result.plans[0].job
    texts: list[tuple[Path, str]] = []
    if out_file is not None:
        steps = None if tokens is None else max(1, round(tokens / job.tokens_per_step))
        command = f"cumulo plan train {model} --gpus {goal.cluster.gpus} --device {goal.cluster.device.name}"
        texts.append((out_file, plan_text(result.plans[0], command, steps)))
    if timeline_file is not None:
        played = timeline(job, goal.cluster)
        title = f"{model}: {job.layout}, {played.schedule.micro_batches} of {job.micro_batches} micro-batches"
        texts.append((timeline_file, to_svg(played, title)))
    for path, text in texts:
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise CumuloError(f"cannot write {path}: {error.strerror or error}") from error
        note(f"written to {path}")
