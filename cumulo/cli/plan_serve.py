"""`cumulo plan serve`: the cheapest deployment that meets an SLO, why it is, and which one comes second."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import option, takes_options
from cumulo.cli.view import simulate as view

if TYPE_CHECKING:
    from cumulo.base.report import Row
    from cumulo.plan.serve.deployment import Deployment
    from cumulo.plan.serve.plan_file import ServePlanFile
    from cumulo.plan.serve.search import ServePlan

EXAMPLE = (
    "Example: [bold]cumulo plan serve llama-3.1-8b --rate 50 --input lognormal:400,0.8,4000 --output 200 "
    "--slo ttft=500ms,itl=40ms[/bold]"
)
_WHERE, _REPORT = "Deployment", "Report"


@dataclass(frozen=True, kw_only=True)
class PlanServeOptions:
    model: shared.ModelName
    rate: float = option("Request rate of all replicas together, in requests/s.", panel=shared.TRAFFIC)
    slo: shared.SloOption
    devices: str = option(
        "Devices to consider, separated by commas. Default: every GPU in the catalogue.", "", panel=_WHERE
    )
    weights: str = option(
        "Weight formats to consider, separated by commas. Default: bfloat16 and float8; float32 on CPUs.",
        "",
        panel=_WHERE,
    )
    split: bool | None = option(
        "Run prefill on replicas of its own, or together with decode. Default: consider both.",
        None,
        "--split/--together",
        panel=_WHERE,
    )
    max_gpus: int | None = option("Maximum number of GPUs. Default: no limit.", None, panel=_WHERE)
    traffic: shared.TrafficOptions = shared.TrafficOptions(requests=400)
    slo_percentile: shared.SloPercentile = 99.0
    out: Path | None = option(
        "Write the best deployment to this file, which `cumulo serve --plan FILE` starts.",
        None,
        panel=_REPORT,
        metavar="FILE",
    )
    svg: Path | None = option(
        "Write a chart of the best deployment's latencies over the request rate (SVG).",
        None,
        panel=_REPORT,
        metavar="FILE",
    )
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@takes_options
def serve(chosen: PlanServeOptions) -> None:
    """Find the cheapest deployment that meets an SLO.

    The report names devices, parallelism, weight format and replicas, with the predicted latencies.
    """
    from cumulo.base import report as reports
    from cumulo.cli.shared.terminal import note, out, working
    from cumulo.errors import ConfigError
    from cumulo.load.simulated import parse_objective
    from cumulo.plan.serve.capacity import play_between
    from cumulo.plan.serve.plan_file import plan_file, plan_text
    from cumulo.plan.serve.search import Wanted, kinds, search
    from cumulo.plan.serve.traffic import check_rate
    from cumulo.spec.catalog import shipped

    model, rate, max_gpus = chosen.model, chosen.rate, chosen.max_gpus
    check_rate(rate)
    if max_gpus is not None and max_gpus < 1:
        raise ConfigError(f"--max-gpus must be 1 or more, got {max_gpus}; omit it for no limit")
    catalog = shipped(chosen.catalog_file)
    objective = parse_objective(chosen.slo, chosen.slo_percentile)
    if objective is None:
        raise ConfigError("a deployment plan needs an SLO: add --slo, for example --slo ttft=500ms,itl=50ms")
    traffic = chosen.traffic.traffic()
    wanted = Wanted(catalog.model_or_file(model), traffic, rate, objective, max_gpus)
    names = _names(chosen.devices) or [
        name for name in catalog.names("devices") if catalog.device(name).generation != "cpu"
    ]
    on_cpus = all(catalog.device(name).generation == "cpu" for name in names)
    formats = _names(chosen.weights) or (["float32"] if on_cpus else ["bfloat16", "float8"])
    with working("planning") as tell:
        plan = search(wanted, kinds(wanted, catalog, names, formats, chosen.split), tell)
    best = plan.best
    share, between = rate / best.replicas, None
    if not best.prefill_replicas:
        between = play_between(best.replica, traffic.at_rate(share), chosen.slo_percentile)
    rows = _rows(plan) + view.report_rows(best.report, share, objective, between)
    if chosen.svg is not None:
        view.write_picture(
            chosen.svg, list(plan.capacity.trials), objective, f"{model}: a replica of {best.replica}"
        )
        note(f"chart written to {chosen.svg}")
    if chosen.out is not None:
        chosen.out.write_text(
            plan_text(plan_file(best, model, chosen.slo_percentile), shlex.join(["cumulo", *sys.argv[1:]])),
            "utf-8",
        )
        note(f"plan written to {chosen.out}")
    reports.write_json(chosen.json_file, rows, plans=[_as_dict(one) for one in plan.deployments])
    if str(chosen.json_file) != "-":
        out.print(f"[bold]{model}[/bold], {rate:g} requests/s: [bold]{best}[/bold]")
        out.print(reports.table("", rows))
        out.print(
            f"{plan.simulated} of {plan.enumerated} kinds of replica were simulated; {_rejected(plan)}",
            style="dim",
        )
        out.print(f"evidence: {best.replica.profile.evidence}", style="dim")
        planned = plan_file(best, model, chosen.slo_percentile)
        model_word = "" if planned.model and chosen.out else f" {planned.model or 'MODEL'}"
        words = _as_options(planned) if chosen.out is None else f" --plan {chosen.out}"
        note(f"start it with: cumulo serve{model_word}{words}")


def _as_options(planned: "ServePlanFile") -> str:
    """What differs from a plain `cumulo serve`, as options."""
    usual = {"tp": 1, "pp": 1, "ep": 1, "replicas": 1, "prefill": 0, "decode": 0, "weights": None}
    names = [name for name, value in usual.items() if getattr(planned, name) != value] + ["max_context"]
    return "".join(f" --{name.replace('_', '-')} {getattr(planned, name)}" for name in names)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _rows(plan: "ServePlan") -> "list[Row]":
    from cumulo.base.report import Row

    best = plan.best
    rows = [
        Row(
            "price",
            best.price_per_hour,
            "$/h",
            "lower",
            note=f"{best.gpus} GPU{'s' if best.gpus > 1 else ''}",
        ),
        Row("price of output tokens", best.price_per_million_tokens, "$/M tokens", "lower"),
        Row(
            "headroom",
            100 * (best.headroom or 0.0),
            "%",
            "higher",
            note=f"beyond that, limited by {plan.capacity.bound}",
        ),
    ]
    for second in plan.deployments[1:]:
        more = second.price_per_hour / best.price_per_hour - 1
        # Which of two is cheaper cannot be told where they are closer than the predictions.
        unsure = more < best.replica.profile.error + second.replica.profile.error
        words = f"{second}: {100 * more:.0f}% more expensive" + (
            ", within the prediction error" if unsure else ""
        )
        rows.append(Row("second best", second.price_per_hour, "$/h", "lower", note=words))
    return rows


def _rejected(plan: "ServePlan") -> str:
    if not plan.rejected:
        return "all of them fit"
    reasons = dict.fromkeys(f"{one.replica}: {one.why_not}" for one in plan.rejected)
    few = "; ".join(list(reasons)[:2])
    return f"{len(plan.rejected)} cannot be used, for example {few}"


def _as_dict(one: "Deployment") -> dict[str, Any]:
    replica = one.replica
    return {
        "device": replica.device.name, "tp": replica.tp, "pp": replica.pp, "ep": replica.ep,
        "weights": replica.weights, "replicas": one.replicas, "prefill_replicas": one.prefill_replicas,
        "gpus": one.gpus, "price_per_hour": one.price_per_hour, "headroom": one.headroom, "rate": one.rate,
        "report": one.report.as_dict(), "evidence": replica.profile.evidence, "error": replica.profile.error,
    }  # fmt: skip
