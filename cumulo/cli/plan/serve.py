"""`cumulo plan serve`: the cheapest deployment that meets an SLO, why it is, and which one comes second."""

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from cumulo.base import report as reports
from cumulo.base.chart import chart_file
from cumulo.base.figures import figure_table
from cumulo.base.quantities import number, parse_duration_s
from cumulo.cli.plan import serve_report as view
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import Panel, group, takes_options
from cumulo.cli.shared.figures import latency_chart
from cumulo.cli.shared.terminal import dim, note, only_json, present, save, working
from cumulo.errors import ConfigError
from cumulo.load.simulated import parse_objective
from cumulo.plan.serve.deployment import Deployment
from cumulo.plan.serve.kinds import ReplicaChoices, kinds
from cumulo.plan.serve.options import weigh
from cumulo.plan.serve.plan_file import ServePlanFile, differing, plan_file, plan_text
from cumulo.plan.serve.replica import FORMATS
from cumulo.plan.serve.search import ServePlan, Wanted, search
from cumulo.plan.serve.traffic import check_rate
from cumulo.spec.catalog import Catalog, shipped

EXAMPLE = (
    "Example: [bold]cumulo plan serve llama-3.1-8b --rate 50 --input lognormal:400,0.8,4000 --output 200 "
    "--slo ttft=500ms,itl=40ms[/bold]"
)
_WHERE, _REPORT = shared.DEPLOYMENT, Panel("Report")
_NOT_FOR_RENT = ("a800", "h800")  # sold in China only, and their prices are a guess and a paper's


@dataclass(frozen=True, kw_only=True)
class PlanServeOptions:
    model: shared.ModelName
    rate: float = shared.TRAFFIC("Request rate of all replicas together, in requests/s.")
    slo: shared.SloOption
    devices: str = _WHERE(
        "Devices to consider, separated by commas. Default: every GPU in the catalogue but a800 and h800.", ""
    )
    weights: str = _WHERE(
        "Weight formats to consider, separated by commas: bfloat16, float8, int4. Default: all of them; float32 on "
        "CPUs.",
        "",
    )
    kv: str = _WHERE(
        "KV cache formats to consider, separated by commas: bfloat16, float8. Default: bfloat16.", "bfloat16"
    )
    split: bool | None = _WHERE(
        "Run prefill on replicas of its own, or together with decode. Default: consider both.",
        None,
        "--split/--together",
    )
    engines: shared.ReplicaOptions = group(
        shared.ReplicaOptions(),
        helps={
            "acceptance": "Also consider speculation: how often a drafted token is right, those before it being "
            "right, 0 to 1.",
            "kv_host_gib": "Also consider host memory of each engine for prefixes that leave the KV cache, in GiB.",
            "kv_disk": "Also consider a folder, with its size in GiB, for prefixes that leave host memory.",
        },
    )
    hypothetical: bool = _WHERE.flag(
        "Also consider what `cumulo serve` cannot run: 8-bit experts, and 4-bit weights on Blackwell, as fast as "
        "TensorRT-LLM's published throughputs."
    )
    max_gpus: int | None = _WHERE("Maximum number of GPUs. Default: no limit.", None)
    traffic: shared.TrafficOptions = shared.TrafficOptions(requests=400)
    slo_percentile: shared.SloPercentile = 99.0
    think: str = _REPORT("Time a user waits between an answer and the next question.", "30s")
    out: Path | None = _REPORT(
        "Write the best deployment to this file, which `cumulo serve --plan FILE` starts.", None
    )
    report_file: Path | None = _REPORT(
        "Write an HTML report with a chart of how many users fit to this file.", None, "--report"
    )
    svg: Path | None = _REPORT(
        "Write a chart of the best deployment's latencies over the number of users (SVG).", None
    )
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@takes_options
def serve(chosen: PlanServeOptions) -> None:
    """Find the cheapest deployment that meets an SLO.

    The report names devices, parallelism, number formats, tokens per step and replicas, with predicted latencies.
    The SLO is met at the pessimistic end of their ranges. The plan file also promises it (`cumulo serve --slo`).
    """

    catalog, think_s = shipped(chosen.catalog_file), parse_duration_s(chosen.think, "--think")
    wanted, choices = _wanted(chosen, catalog), _choices(chosen, catalog)
    with working("planning") as tell:
        every = kinds(wanted.spec, wanted.traffic, wanted.slo, catalog, choices)
        plan = search(wanted, every, tell, promises=True)
        tell("options")
        options_chosen = weigh(plan, wanted, choices)
    best, rows = plan.best, view.rows(plan, wanted.slo, think_s)
    by_users = ((best.replicas * one.users(think_s), one.report) for one in plan.curve)
    chart = latency_chart("Latency over users", "users", by_users, wanted.slo)
    users = [(number(best.replicas * one.users(think_s)), one) for one in plan.curve]
    columns = view.users_columns(best)
    heading = f"{chosen.model}, {chosen.rate:g} requests/s: {best}"
    notes = (
        f"why: {view.why(plan)}.",
        f"evidence: {best.replica.confidence.evidence}.",
        view.promised(plan),
        *map(str, options_chosen),
        view.rejected(plan),
    )
    planned = plan_file(best, chosen.model, wanted.slo, plan.promise)
    save(chosen.svg, lambda: chart_file(chart), "chart")
    save(chosen.report_file, lambda: view.report_page(heading, rows, notes, chart, users, columns), "report")
    save(chosen.out, lambda: plan_text(planned, shlex.join(["cumulo", *sys.argv[1:]])), "plan")
    present(
        rows,
        chosen.json_file,
        Text(heading, "bold"),
        reports.table("", rows),
        figure_table("users", users, columns, "How many users fit"),
        dim("\n".join(filter(None, notes))),
        plans=[_as_dict(one, plan) for one in plan.deployments],
        options=[asdict(one) for one in options_chosen],
    )
    if only_json(chosen.json_file):
        return
    if best.replica.engine != "cumulo":
        note("this is hypothetical: `cumulo serve` cannot run it")
        return
    model_word = "" if planned.model and chosen.out else f" {planned.model or 'MODEL'}"
    words = _as_options(planned) if chosen.out is None else f" --plan {chosen.out}"
    note(f"start it with: cumulo serve{model_word}{words}")


def _wanted(chosen: PlanServeOptions, catalog: Catalog) -> Wanted:

    check_rate(chosen.rate)
    if chosen.max_gpus is not None and chosen.max_gpus < 1:
        raise ConfigError(f"--max-gpus must be 1 or more, got {chosen.max_gpus}; omit it for no limit")
    objective = parse_objective(chosen.slo, chosen.slo_percentile)
    if objective is None:
        raise ConfigError("a deployment plan needs an SLO: add --slo, for example --slo ttft=500ms,itl=50ms")
    spec = catalog.model_or_file(chosen.model)
    return Wanted(spec, chosen.traffic.traffic(spec.max_context), chosen.rate, objective, chosen.max_gpus)


def _choices(chosen: PlanServeOptions, catalog: Catalog) -> ReplicaChoices:

    names = _names(chosen.devices) or [
        name
        for name in catalog.names("devices")
        if catalog.device(name).generation != "cpu" and name not in _NOT_FOR_RENT
    ]
    on_cpus = all(catalog.device(name).generation == "cpu" for name in names)
    usual = ["float32"] if on_cpus else ["bfloat16", "float8", "int4"]
    if chosen.hypothetical and not on_cpus:
        usual.append("float4")
    for kind in _names(chosen.weights):
        if kind not in FORMATS:
            raise ConfigError(f"--weights takes {', '.join(FORMATS)}; got {kind!r}")
    return ReplicaChoices(
        tuple(names),
        tuple(_names(chosen.weights) or usual),
        tuple(map(shared.kv_format, _names(chosen.kv))) or ("",),
        chosen.split,
        chosen.hypothetical,
        **chosen.engines.fields(),
    )


def _as_options(planned: ServePlanFile) -> str:
    """What differs from a plain `cumulo serve`, as options."""

    return "".join(f" --{name.replace('_', '-')} {value}" for name, value in differing(planned).items())


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _as_dict(one: Deployment, plan: ServePlan) -> dict[str, Any]:
    replica, sure = one.replica, one.replica.confidence
    low, middle, high = plan.headroom if one is plan.best else (None, None, None)
    return {
        "device": replica.device.name, "tp": replica.tp, "pp": replica.pp, "ep": replica.ep,
        "weights": replica.weights, "kv": replica.kv or "bfloat16", "engine": replica.engine,
        "max_tokens_per_step": replica.engine_config().max_tokens_per_step,
        "replicas": one.replicas, "prefill_replicas": one.prefill_replicas,
        "gpus": one.gpus, "price_per_hour": one.price_per_hour, "headroom": middle, "headroom_low": low,
        "headroom_high": high, "rate": one.rate, "output_tok_s": one.output_tok_s,
        "report": one.report.as_dict(), "evidence": sure.evidence, "error": sure.error,
    }  # fmt: skip
