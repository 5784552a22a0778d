"""`cumulo plan serve`: the cheapest deployment that meets an SLO, why it is, and which one comes second."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared import traffic as asked
from cumulo.cli.shared import traffic_options as requested
from cumulo.cli.view import simulate as view

if TYPE_CHECKING:
    from cumulo.base.report import Row
    from cumulo.plan.serve.deployment import Deployment
    from cumulo.plan.serve.search import ServePlan

EXAMPLE = (
    "Example: [bold]cumulo plan serve llama-3.1-8b --rate 50 --input lognormal:400,0.8,4000 --output 200 "
    "--slo ttft=500ms,itl=40ms[/bold]"
)
_WHERE, _REPORT = "Deployment", "Report"


def serve(
    model: asked.ModelName,
    rate: Annotated[
        float,
        typer.Option(
            help="Request rate of all replicas together, in requests/s.", rich_help_panel=asked.TRAFFIC
        ),
    ],
    slo: asked.SloOption,
    devices: Annotated[
        str,
        typer.Option(
            help="Devices to consider, separated by commas. Default: every GPU in the catalogue.",
            rich_help_panel=_WHERE,
        ),
    ] = "",
    weights: Annotated[
        str, typer.Option(help="Weight formats to consider, separated by commas.", rich_help_panel=_WHERE)
    ] = "bfloat16,float8",
    split: Annotated[
        bool | None,
        typer.Option(
            "--split/--together",
            help="Run prefill on replicas of its own, or together with decode. Default: consider both.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option(help="Maximum number of GPUs. Default: no limit.", rich_help_panel=_WHERE)
    ] = None,
    input_tokens: requested.Input = "512",
    output_tokens: requested.Output = "128",
    shared_prefix: requested.SharedPrefix = 0,
    prefixes: requested.Prefixes = 1,
    arrivals: asked.Arrivals = "poisson",
    trace: asked.Trace = None,
    requests: asked.Requests = 400,
    seed: asked.SeedOption = 0,
    slo_percentile: asked.SloPercentile = 99.0,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a chart of the best deployment's latencies over the request rate (SVG).",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    catalog_file: asked.CatalogFile = None,
    json_file: options.JsonOption = None,
) -> None:
    """Find the cheapest deployment that meets an SLO.

    The report names devices, parallelism, weight format and replicas, with the predicted latencies.
    """
    from cumulo.base import report as reports
    from cumulo.cli.shared.terminal import note, out, working
    from cumulo.errors import ConfigError
    from cumulo.plan.serve.capacity import play_between
    from cumulo.plan.serve.search import Wanted, kinds, search
    from cumulo.plan.serve.traffic import check_rate

    check_rate(rate)
    if max_gpus is not None and max_gpus < 1:
        raise ConfigError(f"--max-gpus must be 1 or more, got {max_gpus}; omit it for no limit")
    catalog = asked.load_catalog(catalog_file)
    objective = asked.parse_objective(slo, slo_percentile)
    if objective is None:
        raise ConfigError("a deployment plan needs an SLO: add --slo, for example --slo ttft=500ms,itl=50ms")
    traffic = asked.make_traffic(
        input_tokens, output_tokens, shared_prefix, prefixes, arrivals, trace, requests, seed
    )
    wanted = Wanted(asked.model_spec(model, catalog), traffic, rate, objective, max_gpus)
    names = _names(devices) or [
        name for name in catalog.names("devices") if catalog.device(name).generation != "cpu"
    ]
    with working("planning") as tell:
        plan = search(wanted, kinds(wanted, catalog, names, _names(weights), split), tell)
    best = plan.best
    share, between = rate / best.replicas, None
    if not best.prefill_replicas:
        between = play_between(best.replica, traffic.at_rate(share), slo_percentile)
    rows = _rows(plan) + view.report_rows(best.report, share, objective, between)
    if svg is not None:
        view.write_picture(
            svg, list(plan.capacity.trials), objective, f"{model}: a replica of {best.replica}"
        )
        note(f"chart written to {svg}")
    reports.write_json(json_file, rows, plans=[_as_dict(one) for one in plan.deployments])
    if str(json_file) != "-":
        out.print(f"[bold]{model}[/bold], {rate:g} requests/s: [bold]{best}[/bold]")
        out.print(reports.table("", rows))
        out.print(
            f"{plan.simulated} of {plan.enumerated} kinds of replica were simulated; {_rejected(plan)}",
            style="dim",
        )
        out.print(f"evidence: {best.replica.profile.evidence}", style="dim")
        if best.replica.tp == 1 and not best.prefill_replicas:
            fp8 = " --weights fp8" if best.replica.weights == "float8" else ""
            note(
                f"start each replica with: cumulo serve MODEL{fp8} --max-context {best.replica.roomy_context()}"
            )
        else:
            note(
                "Cumulo serves from one device today: tensor parallelism and separate prefill are predictions only"
            )


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
        "device": replica.device.name, "tp": replica.tp, "ep": replica.ep, "weights": replica.weights,
        "replicas": one.replicas, "prefill_replicas": one.prefill_replicas, "gpus": one.gpus,
        "price_per_hour": one.price_per_hour, "headroom": one.headroom, "rate": one.rate,
        "report": one.report.as_dict(), "evidence": replica.profile.evidence, "error": replica.profile.error,
    }  # fmt: skip
