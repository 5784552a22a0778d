"""`cumulo simulate serve`: the engine's scheduler under load in virtual time, on hardware one does not have."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cumulo.cli import options
from cumulo.cli import simulate_traffic as asked

if TYPE_CHECKING:
    from cumulo.cli.report import Row
    from cumulo.plan.serve_capacity import Trial
    from cumulo.plan.serve_report import ServeReport
    from cumulo.plan.traffic import Slo

app = typer.Typer(
    no_args_is_help=True,
    help="Play what would run, with the schedulers that will run it, in virtual time.",
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
    device: Annotated[str, typer.Option(help="Of the catalogue.", rich_help_panel=_WHERE)] = "h200",
    tp: Annotated[int, typer.Option(help="GPUs that share every matrix.", rich_help_panel=_WHERE)] = 1,
    ep: Annotated[
        int, typer.Option(help="Of these, over how many experts are spread.", rich_help_panel=_WHERE)
    ] = 1,
    weights: Annotated[
        str, typer.Option(help="bfloat16, float8 or float32.", rich_help_panel=_WHERE)
    ] = "bfloat16",
    max_running: Annotated[
        int, typer.Option(help="Sequences at a time; 0: the engine's default.", rich_help_panel=_WHERE)
    ] = 0,
    max_tokens_per_step: Annotated[
        int, typer.Option(help="Tokens of a step; 0: the engine's default.", rich_help_panel=_WHERE)
    ] = 0,
    prefix_cache: Annotated[
        bool, typer.Option(help="Shared prefixes are computed once.", rich_help_panel=_WHERE)
    ] = True,
    rate: Annotated[
        str, typer.Option(help="Requests per second; '5,10,20' is a sweep.", rich_help_panel=asked.TRAFFIC)
    ] = "",
    input_tokens: asked.Input = "512",
    output_tokens: asked.Output = "128",
    shared_prefix: asked.SharedPrefix = 0,
    prefixes: asked.Prefixes = 1,
    arrivals: asked.Arrivals = "poisson",
    trace: asked.Trace = None,
    requests: asked.Requests = 1000,
    seed: asked.SeedOption = 0,
    slo: asked.SloOption = "",
    slo_percentile: asked.SloPercentile = 99.0,
    find_capacity: Annotated[
        bool,
        typer.Option(
            "--find-capacity", help="Find the highest rate that holds --slo.", rich_help_panel=_REPORT
        ),
    ] = False,
    think: Annotated[
        str, typer.Option(help="What a user does between answer and next question.", rich_help_panel=_REPORT)
    ] = "30s",
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Latencies over load as a picture.", rich_help_panel=_REPORT),
    ] = None,
    catalog_file: asked.CatalogFile = None,
    json_file: options.JsonOption = None,
) -> None:
    """Serve simulated traffic: the real scheduler and block pool, step times from the device's cost model.

    Latencies are the engine's own: what HTTP and tokenisation add is not in them.
    """
    from cumulo.cli import report as reports
    from cumulo.cli.terminal import note, out, working
    from cumulo.errors import ConfigError
    from cumulo.plan.serve_capacity import Trial, play
    from cumulo.plan.serve_capacity import find_capacity as search
    from cumulo.plan.serve_replica import Replica
    from cumulo.serve.load.units import parse_duration_s

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
    rates = _rates(rate, trace)
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
                raise ConfigError("--find-capacity needs an objective to hold: add --slo ttft=500ms,itl=50ms")
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
    error = replica.profile.error
    shown_traffic = traffic if shown.rate == traffic.rate else traffic.at_rate(shown.rate)
    low, high = (play(replica, shown_traffic, slo_percentile, slower=1 + sign * error) for sign in (-1, 1))
    rows = report_rows(shown.report, shown.rate, objective, (low, high))
    if capacity is not None:
        think_s = parse_duration_s(think, "--think")
        rows = _capacity_rows(capacity.rate, capacity.users(think_s), think_s, capacity.bound) + rows
    rows += _effort_rows(simulated_s, cpu_s)
    if svg is not None:
        write_picture(svg, trials, objective, f"{model} on {replica}")
        note(f"picture written to {svg}")
    extra = {
        "trials": [{"rate": _finite(one.rate), "holds": one.holds, **one.report.as_dict()} for one in trials]
    }
    reports.write_json(json_file, rows, evidence=replica.profile.evidence, **extra)
    if str(json_file) != "-":
        out.print(f"[bold]{model}[/bold] on [bold]{replica}[/bold]")
        if len(trials) > 1:
            out.print(_sweep_table(trials))
        out.print(reports.table("", rows))
        out.print(f"rests on: {replica.profile.evidence}", style="dim")


def _rates(text: str, trace: Path | None) -> list[float | None]:
    from cumulo.serve.load.units import parse_number

    if not text:
        return [None if trace is not None else 1.0]
    return [parse_number(part, "--rate", more_than=True) for part in text.split(",")]


# -- what they get to see ----------------------------------------------------------------------------------------
def report_rows(
    result: "ServeReport",
    rate: float,
    slo: "Slo | None",
    between: "tuple[ServeReport, ServeReport] | None" = None,
) -> "list[Row]":
    """`between`: the same with all steps as much faster and slower as the profile may be wrong."""
    from cumulo.cli.report import Row

    def interval(pick: Callable[["ServeReport"], float]) -> str:
        if between is None:
            return ""
        low, high = sorted(map(pick, between))
        return f"{_figure(low)} to {_figure(high)}"

    rows = [
        Row(
            "requests",
            _finite(rate),
            "/s",
            "higher",
            note=f"{result.finished:,} of {result.requests:,} answered",
        ),
        Row("output", result.output_tok_s, "tok/s", "higher", note=interval(lambda one: one.output_tok_s)),
    ]
    for name, kind, bound in (
        ("first token", "ttft_s", slo.ttft_s if slo else None),
        ("between tokens", "itl_s", slo.itl_s if slo else None),
        ("whole answer", "e2e_s", None),
    ):
        if getattr(result, kind) is None:
            continue
        for label, field in (
            ("p50", "p50"),
            ("p90", "p90"),
            (f"p{slo.percentile if slo else 99:g}", "at_slo"),
        ):

            def pick(one: "ServeReport", kind: str = kind, field: str = field) -> float:
                return 1e3 * float(getattr(getattr(one, kind), field))

            must = None if bound is None or field != "at_slo" else 1e3 * bound
            rows.append(Row(f"{name}, {label}", pick(result), "ms", "lower", must=must, note=interval(pick)))
    shares = sorted(result.time_by_part.items(), key=lambda item: -item[1])[:3]
    words = ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares)
    rows += [
        Row("step", 1e3 * result.mean_step_s, "ms", "lower", note=f"{result.bound_by}: {words}"),
        Row("device busy", 100 * result.device_busy, "%", "higher"),
        Row("sequences at a time, most", result.most_running, "", "higher"),
        Row("KV cache used, most", 100 * result.kv_used, "%", "lower"),
        Row("prompt tokens from the cache", 100 * result.cached_share, "%", "higher"),
        Row(
            "preemptions",
            result.preemptions,
            "",
            "lower",
            note=f"{result.recomputed_tokens:,} tokens recomputed",
        ),
    ]
    return rows


def _finite(rate: float) -> float | None:
    """A trace whose requests all come at once has no rate."""
    return rate if math.isfinite(rate) else None


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _capacity_rows(rate: float, users: float, think_s: float, bound: str) -> "list[Row]":
    from cumulo.cli.report import Row

    return [
        Row("highest rate that holds", rate, "/s", "higher", note=f"then bounded by {bound}"),
        Row(
            "users",
            int(users),
            "",
            "higher",
            note=f"who think {think_s:g} s between an answer and their next question",
        ),
    ]


def _effort_rows(simulated_s: float, cpu_s: float) -> "list[Row]":
    from cumulo.cli.report import Row

    return [
        Row(
            "simulated",
            simulated_s / cpu_s,
            "× real time",
            "higher",
            note=f"{simulated_s:,.0f} s in {cpu_s:.2g} s of one core",
        )
    ]


def _sweep_table(trials: "list[Trial]") -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for name in ("requests/s", "tok/s", "ttft p50", "ttft p99", "itl p50", "itl p99", ""):
        table.add_column(name, justify="right")
    for one in trials:
        spreads = [spread for spread in (one.report.ttft_s, one.report.itl_s) if spread is not None]
        cells = [f"{1e3 * value:,.1f} ms" for spread in spreads for value in (spread.p50, spread.p99)]
        verdict = "[green]holds[/green]" if one.holds else "[red]misses[/red]"
        table.add_row(
            f"{one.rate:.4g}", f"{one.report.output_tok_s:,.0f}", *cells, *[""] * (4 - len(cells)), verdict
        )
    return table


_COLORS = ("#2563eb", "#1e3a8a", "#f59e0b", "#92400e")
_STYLE = (
    "<style>svg{background:#fff;font:12px sans-serif}.grid{stroke:#eee}.axis,.tick{stroke:#888}.line{fill:none;"
    "stroke-width:2}.bound{stroke:#dc2626;stroke-dasharray:4 4}.note{fill:#dc2626}"
    + "".join(f".line.s{at}{{stroke:{color}}}.dot.s{at}{{fill:{color}}}" for at, color in enumerate(_COLORS))
    + "</style>"
)


def write_picture(path: Path, trials: "list[Trial]", slo: "Slo | None", title: str) -> None:
    """Percentiles of both latencies over the rate, on logarithmic axes: the knee is what one looks for."""
    from html import escape

    from cumulo.errors import CumuloError
    from cumulo.serve.load.svg import HEIGHT, LEFT, WIDTH, Chart, Series, draw

    series = []
    for color, (name, field, percentile) in enumerate(
        (("first token p50", "ttft_s", "p50"), ("first token p99", "ttft_s", "p99"),
         ("between tokens p50", "itl_s", "p50"), ("between tokens p99", "itl_s", "p99"))
    ):  # fmt: skip
        points = [
            (one.rate, 1e3 * getattr(spread, percentile))
            for one in sorted(trials, key=lambda one: one.rate)
            if (spread := getattr(one.report, field)) is not None
        ]
        series.append(Series(name, points, "both", color))
    bounds = [] if slo is None else [
        (f"{name} ≤ {1e3 * bound:g} ms", 1e3 * bound)
        for name, bound in (("first token", slo.ttft_s), ("between tokens", slo.itl_s))
        if bound is not None
    ]  # fmt: skip
    text = draw(Chart(title, "requests per second", "milliseconds", series, y_log=True, bounds=bounds))
    legend = "".join(
        f'<text x="{LEFT + 130 * index}" y="{HEIGHT + 14}" fill="{color}">{escape(one.name)}</text>'
        for index, (one, color) in enumerate(zip(series, _COLORS, strict=True))
    )
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" viewBox="0 -22 {WIDTH} {HEIGHT + 46}">'
    )
    heading = f'<text x="{LEFT}" y="-6" font-weight="bold">{escape(title)}</text>'
    inner = text.partition(">")[2]
    try:
        path.write_text(opening + _STYLE + heading + legend + inner, "utf-8")
    except OSError as error:
        raise CumuloError(f"cannot write {path}: {error.strerror or error}") from error
