"""`cumulo simulate serve`: the engine's scheduler under load, in virtual time, on hardware you may not have."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared import traffic as asked
from cumulo.cli.shared import traffic_options as requested
from cumulo.cli.view import simulate as view

if TYPE_CHECKING:
    from cumulo.plan.serve.report import ServeReport

app = typer.Typer(
    no_args_is_help=True,
    help="Simulate a deployment in virtual time, with the real scheduler.",
    rich_markup_mode="rich",
)
EXAMPLE = (
    "Example: [bold]cumulo simulate serve llama-3.1-8b --device h200 --rate 20 --slo ttft=500ms,itl=30ms "
    "--find-capacity --svg load.svg[/bold]"
)
_WHERE, _REPORT = "Deployment", "Report"


@app.command(epilog=EXAMPLE)
def serve(
    model: asked.ModelName,
    device: Annotated[
        str, typer.Option(help="Device, by its name in the catalogue.", rich_help_panel=_WHERE)
    ] = "h200",
    tp: Annotated[
        int,
        typer.Option(
            help="Tensor parallelism: number of GPUs that share every matrix.", rich_help_panel=_WHERE
        ),
    ] = 1,
    ep: Annotated[
        int,
        typer.Option(
            help="Expert parallelism: number of those GPUs that the experts are spread over.",
            rich_help_panel=_WHERE,
        ),
    ] = 1,
    weights: Annotated[
        str, typer.Option(help="Weight format: bfloat16, float8 or float32.", rich_help_panel=_WHERE)
    ] = "bfloat16",
    max_running: Annotated[
        int,
        typer.Option(
            help="Maximum number of running sequences; 0: the engine's default.", rich_help_panel=_WHERE
        ),
    ] = 0,
    max_tokens_per_step: Annotated[
        int,
        typer.Option(
            help="Maximum number of tokens in a step; 0: the engine's default.", rich_help_panel=_WHERE
        ),
    ] = 0,
    prefix_cache: Annotated[
        bool, typer.Option(help="Reuse the KV cache of shared prefixes.", rich_help_panel=_WHERE)
    ] = True,
    rate: Annotated[
        str,
        typer.Option(
            help="Request rate, in requests/s; '5,10,20' simulates each rate.", rich_help_panel=asked.TRAFFIC
        ),
    ] = "",
    input_tokens: requested.Input = "512",
    output_tokens: requested.Output = "128",
    shared_prefix: requested.SharedPrefix = 0,
    prefixes: requested.Prefixes = 1,
    arrivals: asked.Arrivals = "poisson",
    trace: asked.Trace = None,
    requests: asked.Requests = 1000,
    seed: asked.SeedOption = 0,
    slo: asked.SloOption = "",
    slo_percentile: asked.SloPercentile = 99.0,
    find_capacity: Annotated[
        bool,
        typer.Option(
            "--find-capacity", help="Find the highest request rate that meets --slo.", rich_help_panel=_REPORT
        ),
    ] = False,
    think: Annotated[
        str,
        typer.Option(
            help="Time a user waits between an answer and the next question.", rich_help_panel=_REPORT
        ),
    ] = "30s",
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a chart of the latencies over the request rate (SVG).",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    catalog_file: asked.CatalogFile = None,
    json_file: options.JsonOption = None,
) -> None:
    """Simulate a server under load: the real scheduler and block pool, with step times from a cost model.

    Latencies are those of the engine. They do not include HTTP and tokenization.
    """
    from cumulo.base import report as reports
    from cumulo.cli.shared.terminal import note, out, working
    from cumulo.errors import ConfigError
    from cumulo.load.units import parse_duration_s
    from cumulo.plan.serve.capacity import Trial, play, play_between
    from cumulo.plan.serve.capacity import find_capacity as search
    from cumulo.plan.serve.replica import Replica

    catalog = asked.load_catalog(catalog_file)
    spec = asked.model_spec(model, catalog)
    objective = asked.parse_objective(slo, slo_percentile)
    traffic = asked.make_traffic(
        input_tokens, output_tokens, shared_prefix, prefixes, arrivals, trace, requests, seed
    )
    cluster = catalog.cluster(max(1, tp), device)
    replica = Replica(
        spec, cluster.node, cluster.fabric, tp, ep, weights, max_running=max_running,
        max_tokens_per_step=max_tokens_per_step, prefix_cache=prefix_cache,
    ).with_context_for(traffic.arrivals)  # fmt: skip
    rates, evidence = _rates(rate, trace), replica.profile.evidence  # read before anything is timed
    cpu_s = simulated_s = 0.0
    capacity = None
    with working("simulating") as tell:

        def at(wanted: float | None) -> "ServeReport":
            nonlocal cpu_s, simulated_s
            tell("the trace as recorded" if wanted is None else f"{wanted:.4g} requests/s")
            began_s = time.thread_time()
            result = play(replica, traffic if wanted is None else traffic.at_rate(wanted), slo_percentile)
            cpu_s += time.thread_time() - began_s
            simulated_s += result.simulated_s
            return result

        if find_capacity:
            if objective is None:
                raise ConfigError(
                    "--find-capacity needs an SLO: add --slo, for example --slo ttft=500ms,itl=50ms"
                )
            capacity = search(at, objective, start=rates[0] or 1.0)
            trials = list(capacity.trials)
        else:
            results = [(wanted, at(wanted)) for wanted in rates]
            trials = [
                Trial(
                    traffic.rate if wanted is None else wanted, one, objective is None or one.holds(objective)
                )
                for wanted, one in results
            ]
    shown = capacity.best if capacity is not None else trials[-1]
    shown_traffic = traffic if shown.rate == traffic.rate else traffic.at_rate(shown.rate)
    between = play_between(replica, shown_traffic, slo_percentile)
    rows = view.report_rows(shown.report, shown.rate, objective, between)
    if capacity is not None:
        think_s = parse_duration_s(think, "--think")
        rows = view.capacity_rows(capacity.rate, capacity.users(think_s), think_s, capacity.bound) + rows
    rows += view.effort_rows(simulated_s, cpu_s)
    if svg is not None:
        view.write_picture(svg, trials, objective, f"{model} on {replica}")
        note(f"chart written to {svg}")
    extra = {
        "trials": [
            {"rate": view.finite(one.rate), "holds": one.holds, **one.report.as_dict()} for one in trials
        ]
    }
    reports.write_json(json_file, rows, evidence=evidence, **extra)
    if str(json_file) != "-":
        out.print(f"[bold]{model}[/bold] on [bold]{replica}[/bold]")
        if len(trials) > 1:
            out.print(view.sweep_table(trials, objective is not None))
        out.print(reports.table("", rows))
        out.print(f"evidence: {evidence}", style="dim")


def _rates(text: str, trace: Path | None) -> list[float | None]:
    from cumulo.load.units import parse_number

    if not text:
        return [None if trace is not None else 1.0]
    return [parse_number(part, "--rate", more_than=True) for part in text.split(",")]
