"""`cumulo plan cluster`: what a training cluster of up to 100,000 GPUs does: a table, and a report with charts."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared import traffic as asked

if TYPE_CHECKING:
    from cumulo.base.report import Row
    from cumulo.plan.cluster.goal import Assumptions, ClusterGoal
    from cumulo.plan.cluster.plan import ClusterPlan
    from cumulo.plan.job import TrainJob

EXAMPLE = (
    "Example: [bold]cumulo plan cluster llama-3.1-405b --gpus 100000 --tokens 15e12 --report plan.html[/bold]"
)
_JOB, _CLUSTER, _ASSUMED, _REPORT = "Training", "Cluster", "Assumptions (default: published values)", "Report"
# What the terminal shows; the report has the rest.
_SHOWN = (
    "job_gpus", "nodes_beside_job", "spare_nodes", "step_s", "mfu", "training_tok_s", "switches", "cables",
    "checkpoint_bytes", "write_behind", "read_bytes_per_s", "mttf_h", "ettr_formula", "ettr_simulated",
    "goodput_tok_s", "days", "facility_w", "energy_mwh", "cost_trillion", "cost_run",
)  # fmt: skip


def _assumed(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=_ASSUMED)


def cluster(
    model: asked.ModelName,
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs in the cluster, spares included.", rich_help_panel=_CLUSTER)
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
            help="Node type, by its name in the catalogue; replaces --device.", rich_help_panel=_CLUSTER
        ),
    ] = None,
    fabric: Annotated[
        str, typer.Option(help="Network fabric, by its name in the catalogue.", rich_help_panel=_CLUSTER)
    ] = "rail-infiniband",
    batch: Annotated[
        int, typer.Option(help="Global batch size, in sequences per step.", rich_help_panel=_JOB)
    ] = 6144,
    sequence: Annotated[int, typer.Option(help="Sequence length, in tokens.", rich_help_panel=_JOB)] = 8192,
    tokens: Annotated[
        float, typer.Option(help="Tokens to train on, for example 15e12.", rich_help_panel=_JOB)
    ] = 1e12,
    dtype: Annotated[
        str, typer.Option(help="Number format: bfloat16 or float8.", rich_help_panel=_JOB)
    ] = "bfloat16",
    fixed: Annotated[
        str,
        typer.Option(
            help="Use this layout instead of searching for one, as in `cumulo plan train`: tp=8,pp=16,dp=64.",
            rich_help_panel=_JOB,
        ),
    ] = "",
    failures: Annotated[float | None, _assumed("Failures per 1,000 node-days, for nodes of 8 GPUs.")] = None,
    broken_share: Annotated[
        float | None, _assumed("Share of failures after which a node needs repair, from 0 to 1.")
    ] = None,
    repair: Annotated[float | None, _assumed("Hours to repair a node.")] = None,
    detect: Annotated[
        float | None, _assumed("Seconds from a failure until the job is placed on working nodes.")
    ] = None,
    storage: Annotated[float | None, _assumed("Storage bandwidth, in GB/s.")] = None,
    stall: Annotated[
        float | None, _assumed("Share of time that checkpoints can stop training, from 0 to 1.")
    ] = None,
    pue: Annotated[
        float | None,
        _assumed("Power usage effectiveness: power of the building divided by power of its machines."),
    ] = None,
    price: Annotated[float | None, _assumed("Price per GPU hour, in dollars.")] = None,
    seed: Annotated[
        int, typer.Option(help="Random seed of the simulated failures.", rich_help_panel=_REPORT)
    ] = 0,
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write an HTML report with charts to this file.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    catalog_file: asked.CatalogFile = None,
    json_file: options.JsonOption = None,
) -> None:
    """Plan a cluster for pre-training MODEL: fabric, layout, storage, failures, power, price and goodput."""
    from cumulo.base import report as reports
    from cumulo.cli.shared.terminal import note, out, working
    from cumulo.errors import ConfigError
    from cumulo.plan.cluster.plan import plan_cluster
    from cumulo.plan.cluster.report import report

    given = {
        "failures": failures,
        "broken_share": broken_share,
        "repair": repair,
        "detect": detect,
        "storage": storage,
        "stall": stall,
        "pue": pue,
    }
    goal = _goal(
        model, gpus, device, node, fabric, batch, sequence, tokens, dtype, price, given, catalog_file
    )
    if fixed:
        goal = replace(goal, fixed=fixed_job(fixed, goal))
    with working("planning"):
        plan = plan_cluster(goal, seed)
    if report_file is not None:
        try:
            report_file.write_text(report(plan), "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the report to {report_file}: {error.strerror}") from error
        note(f"report written to {report_file}")
    reports.write_json(json_file, _rows(plan), layout=str(plan.training.job.layout))
    if str(json_file) != "-":
        out.print(_table(plan))
        out.print(f"layout: {plan.training.job.layout}; checkpoints: {plan.checkpoints[0].name}")
        idle = plan.sheet["nodes_beside_job"] - plan.sheet["spare_nodes"]
        if not fixed and idle > 0.1 * plan.sheet["nodes"]:
            note(f"{idle:,.0f} nodes neither train nor are needed as spares; a larger --batch can use them")
        most = plan.sheet.figures[plan.gains[0]]
        out.print(
            f"largest possible improvement: {most.label}, {most.value:+.1%} goodput"
            if most.value >= 0.001
            else "failures, restarts and checkpoints each cost less than 0.1% of the goodput"
        )


def _goal(
    model: str,
    gpus: int,
    device: str | None,
    node: str | None,
    fabric: str,
    batch: int,
    sequence: int,
    tokens: float,
    dtype: str,
    price: float | None,
    given: dict[str, float | None],
    catalog_file: Path | None,
) -> "ClusterGoal":
    from cumulo.errors import ConfigError
    from cumulo.plan.cluster.goal import ClusterGoal

    if dtype not in ("bfloat16", "float8"):
        raise ConfigError(f"--dtype must be bfloat16 or float8, got {dtype!r}")
    catalog = asked.load_catalog(catalog_file)
    found = catalog.cluster(gpus, device or (None if node else "h100-sxm"), node, fabric)
    if price is not None:
        found = replace(found, node=replace(found.node, device=replace(found.device, price_per_hour=price)))
    return ClusterGoal(
        model_name=model,
        model=asked.model_spec(model, catalog),
        cluster=found,
        global_batch=batch,
        sequence_length=sequence,
        tokens=tokens,
        dtype=dtype,  # type: ignore[arg-type]
        assumptions=_assumptions(given),
    )


def _assumptions(given: dict[str, float | None]) -> "Assumptions":
    from cumulo.plan.cluster.goal import Assumptions

    usual = Assumptions()
    told = {
        one.name: replace(getattr(usual, one.name), value=value, source=f"--{one.name.replace('_', '-')}")
        for one in fields(usual)
        if (value := given.get(one.name)) is not None
    }
    return replace(usual, **told)


def fixed_job(text: str, goal: "ClusterGoal") -> "TrainJob":
    """As `cumulo plan train --fixed` reads it, but of as many GPUs as it names: the others are spares. What is
    not said is what jobs of this size use: ZeRO-1, and sequence parallelism beside tensor parallelism."""
    import math
    import re

    from cumulo.errors import ConfigError
    from cumulo.plan.search.fixed import fixed_job as parse

    sizes = dict(re.findall(r"\b(dp|tp|pp|cp)\s*=\s*(\d+)", text))
    gpus = math.prod(map(int, sizes.values()))
    if gpus > goal.cluster.gpus:
        raise ConfigError(
            f"the layout {text} needs {gpus:,} GPUs, but the cluster contains {goal.cluster.gpus:,}; make dp "
            f"smaller, or raise --gpus"
        )
    usual = "zero=1,sp=true" if int(sizes.get("tp", 1)) > 1 else "zero=1"
    job = parse(f"{usual},{text}", goal.on(max(1, gpus)))
    if "dp" not in sizes:
        raise ConfigError(
            f"--fixed {text} does not contain dp; add dp=N, the number of model copies (the other nodes are spares)"
        )
    return job


def _rows(plan: "ClusterPlan") -> "list[Row]":
    from cumulo.base.report import Row

    sheet = plan.sheet
    return [
        Row(
            figure.name,
            figure.value,
            figure.unit,
            note=figure.label,
            more={"formula": sheet.shown(name), "inserted": sheet.inserted(name), "source": figure.source}
            if figure.formula
            else {"source": figure.source},
        )
        for name, figure in sheet.figures.items()
    ]


def _table(plan: "ClusterPlan") -> Any:
    from rich.table import Table

    from cumulo.plan.cluster.report import value

    table = Table(title=f"{plan.goal.model_name} on {plan.goal.cluster}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("calculation")
    for name in _SHOWN:
        figure = plan.sheet.figures[name]
        how = plan.sheet.inserted(name) if figure.formula else figure.source
        table.add_row(figure.label, value(figure), how)
    return table
