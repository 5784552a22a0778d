"""`cumulo plan cluster`: what a training cluster of up to 100,000 GPUs does: a table, and a report with charts."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import group, option, takes_options

if TYPE_CHECKING:
    from cumulo.base.report import Row
    from cumulo.plan.cluster.goal import ClusterGoal
    from cumulo.plan.cluster.plan import ClusterPlan

EXAMPLE = (
    "Example: [bold]cumulo plan cluster llama-3.1-405b --gpus 100000 --tokens 15e12 --report plan.html[/bold]"
)
_ASSUMED, _REPORT = "Assumptions (default: published values)", "Report"
# What the terminal shows; the report has the rest.
_SHOWN = (
    "job_gpus", "nodes_beside_job", "further_jobs", "spare_nodes", "step_s", "step_low_s", "step_high_s", "mfu",
    "training_tok_s", "switches", "cables",
    "checkpoint_bytes", "write_behind", "read_bytes_per_s", "mttf_h", "ettr_formula", "ettr_simulated",
    "goodput_tok_s", "days", "facility_w", "energy_mwh", "cost_trillion", "cost_run",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AssumptionOptions:
    """The names are those of Assumptions; None: the published value."""

    failures: float | None = option(
        "Failures per 1,000 node-days, for nodes of 8 GPUs.", None, panel=_ASSUMED
    )
    broken_share: float | None = option(
        "Share of failures after which a node needs repair, from 0 to 1.", None, panel=_ASSUMED
    )
    repair: float | None = option("Hours to repair a node.", None, panel=_ASSUMED)
    detect: float | None = option(
        "Seconds from a failure until the job is placed on working nodes.", None, panel=_ASSUMED
    )
    storage: float | None = option("Storage bandwidth, in GB/s.", None, panel=_ASSUMED)
    stall: float | None = option(
        "Share of time that checkpoints can stop training, from 0 to 1.", None, panel=_ASSUMED
    )
    pue: float | None = option(
        "Power usage effectiveness: power of the building divided by power of its machines.",
        None,
        panel=_ASSUMED,
    )


@dataclass(frozen=True, kw_only=True)
class PlanClusterOptions:
    model: shared.ModelName
    where: shared.ClusterOptions = group(
        helps={
            "gpus": "Number of GPUs in the cluster, spares included.",
            "node": "Node type, by its name in the catalogue; replaces --device.",
        }
    )
    batches: shared.BatchOptions = shared.BatchOptions(batch=6144, sequence=8192)
    tokens: float = option("Tokens to train on, for example 15e12.", 1e12, panel=shared.TRAINING)
    dtype: str = option("Number format: bfloat16 or float8.", "bfloat16", panel=shared.TRAINING)
    fixed: str = option(
        "Use this layout instead of searching for one, as in `cumulo plan train`: tp=8,pp=16,dp=64.",
        "",
        panel=shared.TRAINING,
    )
    assumed: AssumptionOptions = AssumptionOptions()
    price: float | None = option("Price per GPU hour, in dollars.", None, panel=_ASSUMED)
    seed: int = option("Random seed of the simulated failures.", 0, panel=_REPORT)
    report_file: Path | None = option(
        "Write an HTML report with charts to this file.", None, "--report", panel=_REPORT, metavar="FILE"
    )
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@takes_options
def cluster(chosen: PlanClusterOptions) -> None:
    """Plan a cluster for pre-training MODEL: fabric, layout, storage, failures, power, price and goodput."""
    from cumulo.base import report as reports
    from cumulo.cli.shared.terminal import note, out, working
    from cumulo.errors import ConfigError
    from cumulo.plan.cluster.plan import plan_cluster
    from cumulo.plan.cluster.report import report

    goal = _goal(chosen)
    with working("planning"):
        plan = plan_cluster(goal, chosen.seed)
    if (report_file := chosen.report_file) is not None:
        try:
            report_file.write_text(report(plan), "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the report to {report_file}: {error.strerror}") from error
        note(f"report written to {report_file}")
    reports.write_json(chosen.json_file, _rows(plan), layout=str(plan.training.job.layout))
    if str(chosen.json_file) != "-":
        out.print(_table(plan))
        out.print(f"layout: {plan.training.job.layout}; checkpoints: {plan.checkpoints[0].name}")
        idle = plan.sheet["nodes_beside_job"] - plan.sheet["spare_nodes"]
        if not chosen.fixed and idle > 0.1 * plan.sheet["nodes"]:
            note(f"{idle:,.0f} nodes neither train nor are needed as spares; a larger --batch can use them")
        most = plan.sheet.figures[plan.gains[0]]
        out.print(
            f"largest possible improvement: {most.label}, {most.value:+.1%} goodput"
            if most.value >= 0.001
            else "failures, restarts and checkpoints each cost less than 0.1% of the goodput"
        )


def _goal(chosen: PlanClusterOptions) -> "ClusterGoal":
    from cumulo.errors import ConfigError
    from cumulo.plan.cluster.goal import Assumptions, ClusterGoal, fixed_job
    from cumulo.spec.catalog import shipped

    if chosen.dtype not in ("bfloat16", "float8"):
        raise ConfigError(f"--dtype must be bfloat16 or float8, got {chosen.dtype!r}")
    catalog = shipped(chosen.catalog_file)
    found = chosen.where.cluster(catalog)
    if chosen.price is not None:
        device = replace(found.device, price_per_hour=chosen.price)
        found = replace(found, node=replace(found.node, device=device))
    goal = ClusterGoal(
        model_name=chosen.model,
        model=catalog.model_or_file(chosen.model),
        cluster=found,
        global_batch=chosen.batches.batch,
        sequence_length=chosen.batches.sequence,
        tokens=chosen.tokens,
        dtype=chosen.dtype,  # type: ignore[arg-type]
        assumptions=Assumptions().overridden(asdict(chosen.assumed)),
    )
    return replace(goal, fixed=fixed_job(chosen.fixed, goal)) if chosen.fixed else goal


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
