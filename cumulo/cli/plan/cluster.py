"""`cumulo plan cluster`: what a training cluster of up to 100,000 GPUs does: a table, and a report with charts."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cumulo.base.quantities import quantity
from cumulo.base.report import ReportTable, Row
from cumulo.base.strict import package_yaml
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import Panel, group, takes_options
from cumulo.cli.shared.terminal import present, save, working
from cumulo.errors import ConfigError
from cumulo.load.simulated import draw_traffic, parse_objective
from cumulo.plan.cluster.goal import ClusterGoal, assumptions
from cumulo.plan.cluster.inference import InferenceGoal, inference_plan
from cumulo.plan.cluster.plan import ClusterPlan, plan_cluster
from cumulo.plan.cluster.report import budget_verdict, extrapolations, report, why_so_many
from cumulo.plan.cluster.sheet import value, value_range
from cumulo.plan.serve.search import ServePlan
from cumulo.spec.catalog import shipped

EXAMPLE = (
    "Example: [bold]cumulo plan cluster llama-3.1-405b --gpus 100000 --tokens 15e12 --report plan.html[/bold]"
)
_ASSUMED, _REPORT, _SERVING = map(Panel, ("Assumptions (default: published values)", "Report", "Inference"))


@dataclass(frozen=True, kw_only=True)
class AssumptionOptions:
    """The names are those of the assumptions in cluster_sheet.yaml; None: the published value."""

    failures: float | None = _ASSUMED("Failures per 1,000 node-days, for nodes of 8 GPUs.", None)
    broken_share: float | None = _ASSUMED(
        "Share of failures after which a node needs repair, from 0 to 1.", None
    )
    repair: float | None = _ASSUMED("Hours to repair a node.", None)
    detect: float | None = _ASSUMED("Seconds from a failure until the job is placed on working nodes.", None)
    storage: float | None = _ASSUMED("Storage bandwidth, in GB/s.", None)
    stall: float | None = _ASSUMED("Share of time that checkpoints can stop training, from 0 to 1.", None)
    pue: float | None = _ASSUMED(
        "Power usage effectiveness: power of the building divided by power of its machines.", None
    )


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """What the nodes beside the job serve."""

    serve: str = _SERVING("Model that the nodes beside the job serve.", "", metavar="MODEL")
    rate: float | None = _SERVING(
        "Request rate to serve, in requests/s. Default: as much as the nodes that are left take.", None
    )
    slo: str = _SERVING("Latency objective (SLO) of inference.", "ttft=1s,itl=50ms")
    input_tokens: str = _SERVING("Prompt length in tokens.", "1000", "--input")
    output_tokens: str = _SERVING("Answer length in tokens.", "300", "--output")
    hypothetical: bool = _SERVING.flag(
        "Also consider replicas that `cumulo serve` cannot run, as in `cumulo plan serve`."
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
    tokens: float = shared.TRAINING("Tokens to train on, for example 15e12.", 1e12)
    dtype: str = shared.TRAINING("Number format: bfloat16 or float8.", "bfloat16")
    fixed: str = shared.TRAINING(
        "Use this layout instead of searching for one, as in `cumulo plan train`: tp=8,pp=16,dp=64.", ""
    )
    assumed: AssumptionOptions = AssumptionOptions()
    price: float | None = _ASSUMED("Price per GPU hour, in dollars.", None)
    deadline_days: float | None = shared.TRAINING(
        "Longest acceptable run time, in days: the job takes no more GPUs than it needs.", None
    )
    budget: float | None = shared.TRAINING("Budget of the run, in dollars.", None)
    recovery: str = shared.TRAINING(
        "After a failure: restart (the whole job), spare (a hot spare takes over) or replica (only one replica "
        "stops: no global rollback). The report compares all three.",
        "restart",
    )
    inference: InferenceOptions = InferenceOptions()
    seed: int = _REPORT("Random seed of the simulated failures.", 0)
    report_file: Path | None = _REPORT("Write an HTML report with charts to this file.", None, "--report")
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@takes_options
def cluster(chosen: PlanClusterOptions) -> None:
    """Plan a cluster for pre-training MODEL: fabric, layout, storage, failures, power, price and goodput."""
    goal = _goal(chosen)
    with working("planning"):
        plan = plan_cluster(goal, chosen.seed, _inference(chosen))
    save(chosen.report_file, lambda: report(plan), "report")
    layout = str(plan.training.job.layout)
    present(_rows(plan), chosen.json_file, _table(plan), _recoveries(plan), *_sentences(plan), layout=layout)


def _sentences(plan: ClusterPlan) -> Iterator[str]:
    if reasons := extrapolations(plan):
        yield f"extrapolated: {reasons}"
    kept = plan.checkpoints[0]
    every = quantity(kept.interval_s, "s")
    yield f"layout: {plan.training.job.layout}; checkpoints: {kept.name}, every {every}"
    yield from plan.assumed
    yield f"why: {why_so_many(plan)} {_bound(plan)}"
    if verdict := budget_verdict(plan):
        yield f"budget: {verdict}"
    if plan.inference is not None:
        replica = plan.inference.best.replica
        yield f"inference: replicas of {replica}; {replica.confidence.evidence}"
    most = plan.sheet.figures[plan.gains[0]]
    yield (
        f"largest possible improvement: {most.label}, {most.value:+.1%} goodput"
        if most.value >= 0.001
        else "failures, restarts and checkpoints each cost less than 0.1% of the goodput"
    )


def _goal(chosen: PlanClusterOptions) -> ClusterGoal:
    if chosen.dtype not in ("bfloat16", "float8"):
        raise ConfigError(f"--dtype must be bfloat16 or float8, got {chosen.dtype!r}")
    if chosen.recovery not in ("restart", "spare", "replica"):
        raise ConfigError(f"--recovery must be restart, spare or replica, got {chosen.recovery!r}")
    catalog = shipped(chosen.catalog_file)
    found = chosen.where.cluster(catalog)
    if chosen.price is not None:
        device = replace(found.device, price_per_hour=chosen.price)
        found = replace(found, node=replace(found.node, device=device))
    return ClusterGoal(
        model_name=chosen.model,
        model=catalog.model_or_file(chosen.model),
        cluster=found,
        global_batch=chosen.batches.batch,
        sequence_length=chosen.batches.sequence,
        tokens=chosen.tokens,
        dtype=chosen.dtype,  # type: ignore[arg-type]
        fixed=chosen.fixed,
        recovery=chosen.recovery,  # type: ignore[arg-type]
        deadline_days=chosen.deadline_days,
        budget=chosen.budget,
        assumptions=assumptions(asdict(chosen.assumed)),
    )


def _inference(chosen: PlanClusterOptions) -> tuple[InferenceGoal, ServePlan] | None:
    asked = chosen.inference
    if not asked.serve:
        if asked.rate is not None:
            raise ConfigError("--rate is the request rate of inference: add --serve MODEL")
        return None
    slo = parse_objective(asked.slo, 99.0)
    if slo is None:
        raise ConfigError("inference needs an SLO, for example --slo ttft=1s,itl=50ms")
    catalog = shipped(chosen.catalog_file)
    traffic = draw_traffic(asked.input_tokens, asked.output_tokens, 0, 1, "poisson", 200, chosen.seed)
    model = catalog.model_or_file(asked.serve)
    goal = InferenceGoal(asked.serve, model, traffic, slo, asked.rate, asked.hypothetical)
    return goal, inference_plan(goal, chosen.where.cluster(catalog).device.name, catalog)


def _bound(plan: ClusterPlan) -> str:
    """What a step spends its time on."""
    estimate = plan.training.estimate
    largest = sorted(estimate.breakdown, key=lambda part: -part[1])[:3]
    shares = ", ".join(f"{name} {seconds / estimate.step_s:.0%}" for name, seconds in largest)
    return f"A step is {shares}."


def _recoveries(plan: ClusterPlan) -> Any:
    sheet, lines = plan.sheet, []
    for one in plan.recoveries:
        names = (f"pause_{one.key}_s", f"ettr_{one.key}", f"goodput_{one.key}")
        shown = [part for name in names for part in (value(sheet.figures[name]), value_range(sheet, name))]
        lines.append(((one.name, *shown), one.what))
    heads = ("", "pause", "90% range", "trains", "90% range", "goodput", "90% range")
    return ReportTable("After a failure", heads, (False, *(True, False) * 3), lines)


def _rows(plan: ClusterPlan) -> list[Row]:
    sheet = plan.sheet
    return [
        Row(
            figure.name,
            figure.value,
            figure.unit,
            note=figure.label,
            more=({"formula": sheet.shown(name), "inserted": sheet.inserted(name)} if figure.formula else {})
            | {"source": figure.source}
            | ({"extrapolated": "; ".join(figure.extrapolated)} if figure.extrapolated else {}),
        )
        for name, figure in sheet.figures.items()
    ]


def _table(plan: ClusterPlan) -> Any:
    """The main figures with their ranges and what they follow from; the report has all of them with formulas."""
    sheet, lines = plan.sheet, []
    for name, reason in package_yaml("cumulo.plan", "data/cluster_shown.yaml").items():
        if name in sheet.figures:
            ranged = value_range(sheet, "inference_most" if name == "inference_rate" else name)
            figure, notes = sheet.figures[name], ["extrapolated"] * bool(sheet.figures[name].extrapolated)
            if reason:
                notes.append(f"from {sheet.figures[reason].label}: {value(sheet.figures[reason])}")
            lines.append(((figure.label, value(figure), ranged), "; ".join(notes)))
    title = f"{plan.goal.model_name} on {plan.goal.cluster}"
    return ReportTable(title, ("", "", "90% range"), (False, True, False), lines)
