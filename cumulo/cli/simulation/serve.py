"""`cumulo simulate serve`: the engine's scheduler under load, in virtual time, on hardware you may not have."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cumulo.base import report as reports
from cumulo.base.chart import chart_file
from cumulo.base.figures import RunFigure, figure_rows, figure_table
from cumulo.base.nearest import names_in
from cumulo.base.quantities import parse_duration_s, parse_number, quantity
from cumulo.base.report import Row
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import Panel, group, takes_options
from cumulo.cli.shared.figures import latency_chart, latency_rows, range_words, trial_columns
from cumulo.cli.shared.terminal import dim, marked, present, save, working
from cumulo.errors import ConfigError
from cumulo.load.simulated import parse_objective
from cumulo.plan.serve.capacity import RateTrial, play, play_between
from cumulo.plan.serve.capacity import find_capacity as search
from cumulo.plan.serve.fleet import play_fleet, play_split
from cumulo.plan.serve.goodput import play_goodput
from cumulo.plan.serve.replica import CUMULO, TENSORRT_LLM, Replica
from cumulo.plan.serve.report import ServeReport
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import shipped
from cumulo.spec.slo import Slo

EXAMPLE = (
    "Example: [bold]cumulo simulate serve llama-3.1-8b --device h200 --rate 20 --slo ttft=500ms,itl=30ms "
    "--find-capacity --svg load.svg[/bold]"
)
_WHERE, _REPORT = shared.DEPLOYMENT, Panel("Report")
_USUAL_MODEL = "llama-3.1-8b"
_MODEL = "A model name from the catalogue, or a folder with a config.json."


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)] = _USUAL_MODEL
    trace_file: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="A trace to replay, as with --trace.")
    ] = None
    device: str = _WHERE("Device, by its name in the catalogue.", "h200")
    tp: int = _WHERE("Tensor parallelism: number of GPUs that share every matrix.", 1)
    pp: int = _WHERE("Pipeline parallelism: number of stages, of --tp GPUs each.", 1)
    ep: int = _WHERE("Expert parallelism: number of those GPUs that the experts are spread over.", 1)
    dp: int = _WHERE(
        "Data-parallel attention: number of engines that share the experts, each with requests of its own. Request "
        "rates and figures are those of one of them.",
        1,
        min=1,
    )
    engine: str = _WHERE(
        "cumulo, or tensorrt-llm: an engine with 8- and 4-bit experts, by its published throughputs.", CUMULO
    )
    replicas: int = _WHERE("Number of replicas behind a router; 1: no router.", 1)
    router: str = _WHERE(
        "With --replicas: routing policy, round-robin, least-loaded or prefix-aware; several, separated by commas, "
        "are compared.",
        "prefix-aware",
    )
    prefill: int = _WHERE(
        "With --decode: number of replicas that only compute prompts. The report compares with as many replicas "
        "that do both.",
        0,
    )
    decode: int = _WHERE("With --prefill: number of replicas that draw the answers.", 0)
    weights: str = _WHERE("Weight format: bfloat16, float8, int4, float4, mxfp4 or float32.", "bfloat16")
    prefix_cache: bool = _WHERE("Reuse the KV cache of shared prefixes.", True)
    kv: str = _WHERE("KV cache format: bfloat16 or float8. Default: the format of activations.", "")
    front_door: str = _WHERE(
        "Time of a request outside the engine (HTTP, tokenization, to the engine and back), part of TTFT. A "
        "gateway in front adds about 1 ms. `cumulo bench overhead` measures it.",
        "2ms",
    )
    steps: options.StepOptions = options.StepOptions()
    engines: shared.ReplicaOptions = group(
        shared.ReplicaOptions(),
        helps={"kv_disk": "Folder, which is not used, and size in GiB for prefixes that leave host memory."},
    )
    rate: str = shared.TRAFFIC("Request rate, in requests/s; '5,10,20' simulates each rate.", "")
    traffic: shared.TrafficOptions = shared.TrafficOptions()
    slo: shared.SloOption = ""
    slo_percentile: shared.SloPercentile = 99.0
    promise: bool = _REPORT.flag(
        "Compare scheduling by --slo, as `cumulo serve --slo` does it, with steps of fixed size: goodput, refused "
        "requests and promises kept."
    )
    find_capacity: bool = _REPORT.flag("Find the highest request rate that meets --slo.")
    think: str = _REPORT("Time a user waits between an answer and the next question.", "30s")
    svg: Path | None = _REPORT("Write a chart of the latencies over the request rate (SVG).", None)
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@takes_options
def serve(chosen: SimulateOptions) -> None:
    """Simulate a server under load: the real scheduler and block pool, with step times from a cost model.

    TTFT and end-to-end latency include --front-door, the time outside the engine.
    """
    chosen = _with_trace(chosen)
    model, percentile, catalog = chosen.model, chosen.slo_percentile, shipped(chosen.catalog_file)
    spec = catalog.model_or_file(model)
    objective = parse_objective(chosen.slo, percentile)
    traffic = chosen.traffic.traffic(spec.max_context)
    if chosen.engine not in (CUMULO, TENSORRT_LLM):
        raise ConfigError(f"--engine must be {CUMULO} or {TENSORRT_LLM}, got {chosen.engine!r}")
    if chosen.dp > 1 and (spec.moe is None or chosen.tp * chosen.pp * chosen.ep > 1):
        why = (
            "the model has no experts to share" if spec.moe is None else "it goes without --tp, --pp and --ep"
        )
        raise ConfigError(f"--dp {chosen.dp}: {why}")
    cluster = catalog.cluster(max(1, chosen.tp * chosen.pp * chosen.dp), chosen.device)
    replica = Replica(
        spec, cluster.node, cluster.fabric, chosen.tp, chosen.ep, chosen.weights, pp=chosen.pp, dp=chosen.dp,
        engine=chosen.engine,
        prefix_cache=chosen.prefix_cache, **vars(chosen.steps),
        kv=shared.kv_format(chosen.kv), **chosen.engines.fields(),
        front_door_s=parse_duration_s(chosen.front_door, "--front-door"),
    ).with_context_for(traffic.arrivals)  # fmt: skip
    # Read before anything is timed.
    rates, evidence = _rates(chosen.rate, chosen.traffic.trace), replica.profile.evidence
    if chosen.replicas != 1 or chosen.prefill or chosen.decode:
        _serve_fleet(chosen, replica, traffic, rates, evidence)
        return
    if chosen.promise:
        _serve_promised(chosen, replica, traffic, rates, objective)
        return
    cpu_s = simulated_s = 0.0
    capacity = None
    with working("simulating") as tell:

        def at(wanted: float | None) -> ServeReport:
            nonlocal cpu_s, simulated_s
            tell("the trace as recorded" if wanted is None else f"{wanted:.4g} requests/s")
            began_s = time.thread_time()
            result = play(replica, traffic if wanted is None else traffic.at_rate(wanted), percentile)
            cpu_s += time.thread_time() - began_s
            simulated_s += result.simulated_s
            return result

        if chosen.find_capacity:
            if objective is None:
                raise ConfigError(
                    "--find-capacity needs an SLO: add --slo, for example --slo ttft=500ms,itl=50ms"
                )
            capacity = search(at, objective, start=rates[0] or 1.0)
            trials = list(capacity.trials)
        else:
            results = [(wanted, at(wanted)) for wanted in rates]
            trials = [
                RateTrial(
                    traffic.rate if wanted is None else wanted, one, objective is None or one.holds(objective)
                )
                for wanted, one in results
            ]
    shown = capacity.best if capacity is not None else trials[-1]
    shown_traffic = traffic if shown.rate == traffic.rate else traffic.at_rate(shown.rate)
    between = play_between(replica, shown_traffic, percentile)
    rows = _report_rows((shown.report, *between), shown.rate, objective)
    if capacity is not None and objective is not None:
        think_s = parse_duration_s(chosen.think, "--think")
        think = f"each waits {think_s:g} s between an answer and the next question"
        beyond = f"beyond it, {capacity.limit(objective)}"
        rows = [
            Row("highest rate within the SLO", capacity.rate, "requests/s", note=beyond),
            Row("concurrent users", float(f"{capacity.users(think_s):.3g}"), "users", note=think),
            *rows,
        ]
    effort = f"{quantity(simulated_s, 's')} simulated in {quantity(cpu_s, 's')} on one core"
    rows.append(Row("simulation speed", simulated_s / cpu_s, "× real time", note=effort))
    by_rate = [(one.rate, one.report) for one in sorted(trials, key=lambda one: one.rate)]
    chart = latency_chart(f"{model} on {replica}", "requests per second", by_rate, objective)
    save(chosen.svg, lambda: chart_file(chart), "chart")
    told = [{"rate": _finite(one.rate), "holds": one.holds, **one.report.as_dict()} for one in trials]
    sweep = [_sweep_table(trials, objective is not None)] if len(trials) > 1 else []
    present(
        rows, chosen.json_file, marked("[bold]{}[/bold] on [bold]{}[/bold]", model, replica), *sweep,
        reports.table("", rows), dim(f"evidence: {evidence}"), evidence=evidence, trials=told,
    )  # fmt: skip


def _with_trace(chosen: SimulateOptions) -> SimulateOptions:
    """A file instead of a model, unless it is a configuration, is a trace."""
    trace, first = chosen.trace_file, Path(chosen.model)
    if trace is None and first.is_file() and first.suffix != ".json":
        chosen, trace = replace(chosen, model=_USUAL_MODEL), first
    return chosen if trace is None else replace(chosen, traffic=replace(chosen.traffic, trace=trace))


def _serve_promised(
    chosen: SimulateOptions,
    replica: Replica,
    traffic: Traffic,
    rates: list[float | None],
    objective: Slo | None,
) -> None:
    """Goodput with a promised latency, and without."""
    if objective is None:
        raise ConfigError("--promise needs an SLO: add --slo, for example --slo ttft=1s,itl=50ms")
    if chosen.find_capacity or chosen.svg is not None:
        raise ConfigError("--promise prints a table of goodput: remove --find-capacity and --svg")
    fixed = f"{replica.engine_config().max_tokens_per_step}-token steps"
    found, rows = [], []
    with working("simulating") as tell:
        for rate in rates:
            shown = traffic if rate is None else traffic.at_rate(rate)
            for name, promise in ((fixed, False), ("--slo", True)):
                tell(f"{shown.rate:.4g} requests/s, {name}")
                goodput = play_goodput(replica, shown, objective, promise=promise)
                found.append((f"{name}, {shown.rate:.4g} requests/s", goodput))
                rows += [
                    replace(row, name=f"{row.name} at {shown.rate:.4g} requests/s")
                    for row in figure_rows(name, goodput, _GOODPUT)
                ]
    title = marked("[bold]{}[/bold] on [bold]{}[/bold], {}", chosen.model, replica, objective)
    table = figure_table("scheduling", found, _GOODPUT)
    present(rows, chosen.json_file, title, table, evidence=replica.profile.evidence)


def _serve_fleet(
    chosen: SimulateOptions, replica: Replica, traffic: Traffic, rates: list[float | None], evidence: str
) -> None:
    """Play the same traffic under each routing policy."""
    if bool(chosen.prefill) != bool(chosen.decode):
        raise ConfigError("--prefill and --decode go together, as in --prefill 2 --decode 6")
    replicas = chosen.prefill + chosen.decode or chosen.replicas
    if chosen.replicas not in (1, replicas):
        raise ConfigError(
            f"--prefill {chosen.prefill} and --decode {chosen.decode} are {replicas} replicas, not "
            f"{chosen.replicas}: remove --replicas, or set it to {replicas}"
        )
    if chosen.find_capacity or chosen.svg is not None or chosen.slo or len(rates) > 1:
        raise ConfigError(
            "a fleet plays one rate: remove --find-capacity, --svg and --slo, and give one --rate"
        )
    shown = traffic if rates[0] is None else traffic.at_rate(rates[0])
    found = []
    with working("simulating") as tell:
        for policy in names_in(chosen.router) or [chosen.router]:
            tell(f"{replicas} replicas, {policy}")
            found.append(play_fleet(replica, replicas, policy, shown, chosen.slo_percentile))
            if chosen.prefill:
                tell(f"{chosen.prefill} prefill and {chosen.decode} decode replicas, {policy}")
                found.append(
                    play_split(replica, chosen.prefill, chosen.decode, policy, shown, chosen.slo_percentile)
                )
    rows = [row for one in found for row in figure_rows(one.router, one, _FLEET)]
    first = found[0]
    title = marked("[bold]{}[/bold] on [bold]{} × {}[/bold], ", chosen.model, replicas, replica)
    key = (
        f"cached: share of prompt tokens found in the prefix cache. reuse: of the {first.shared_cache_share:.1%} "
        f"that one cache as large as all {first.replicas} replicas' would find. busiest: tokens computed by the "
        f"busiest replica, over the mean.\nevidence: {evidence}"
    )
    present(
        rows, chosen.json_file, title.append(f"{first.finished:,} of {first.requests:,} requests answered"),
        figure_table("router", [(one.router, one) for one in found], _FLEET), dim(key), evidence=evidence,
    )  # fmt: skip


def _rates(text: str, trace: Path | None) -> list[float | None]:
    if not text:
        return [None if trace is not None else 1.0]
    return [parse_number(part, "--rate", more_than=True) for part in text.split(",")]


_KINDS = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("end-to-end latency", "e2e_s"))
_USE = (
    RunFigure("device busy", lambda one: 100 * one.device_busy, "%"),
    RunFigure("running sequences, peak", lambda one: one.most_running),
    RunFigure("KV cache usage, peak", lambda one: 100 * one.kv_used, "%", "lower"),
    RunFigure("prefix cache hit rate", lambda one: 100 * one.cached_share, "%"),
)
_FLEET = (
    RunFigure("output throughput", lambda one: one.output_tok_s, "tok/s", heading="tok/s", shown="{:,.0f}"),
    RunFigure("TTFT p50", lambda one: one.ttft_s and 1e3 * one.ttft_s.p50, "ms", "lower", "TTFT p50"),
    RunFigure("TTFT p99", lambda one: one.ttft_s and 1e3 * one.ttft_s.p99, "ms", "lower", "TTFT p99"),
    RunFigure("ITL p50", lambda one: one.itl_s and 1e3 * one.itl_s.p50, "ms", "lower"),
    RunFigure("ITL p99", lambda one: one.itl_s and 1e3 * one.itl_s.p99, "ms", "lower", "ITL p99"),
    RunFigure(
        "cached prompt tokens", lambda one: 100 * one.cached_share, "%", heading="cached", shown="{:.1f}%"
    ),
    RunFigure(
        "reuse, of a shared cache's", lambda one: 100 * one.reuse, "%", heading="reuse", shown="{:.0f}%"
    ),
    RunFigure(
        "busiest replica, over the mean", lambda one: one.load_over_mean, "×", "lower", "busiest", "{:.2f} ×"
    ),
)
# Of a rate and the goodput at it.
_GOODPUT = (
    RunFigure("goodput", lambda one: one.request_s, "requests/s", heading="goodput", shown="{:.4g}/s"),
    RunFigure("", lambda one: 1 - one.admitted / one.requests, heading="refused", shown="{:.1%}"),
    RunFigure("promises kept", lambda one: 100 * one.kept_share, "%", heading="kept", shown="{:.2f}%"),
    RunFigure("", lambda one: one.missed_ttft / one.requests, heading="late TTFT", shown="{:.1%}"),
    RunFigure("", lambda one: one.missed_itl / one.requests, heading="late ITL", shown="{:.1%}"),
)


def _report_rows(reports: Sequence[ServeReport], rate: float, slo: Slo | None) -> list[Row]:
    """The first report's figures; the others are the same with all steps as much faster and slower as the profile
    may be wrong."""
    result = reports[0]
    answered = f"{result.finished:,} of {result.requests:,} answered"
    throughput = range_words(lambda one: one.output_tok_s, reports, "tok/s")
    shares = sorted(result.time_by_part.items(), key=lambda item: -item[1])[:3]
    parts = f"{result.bound_by}: " + ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares)
    rows = [
        Row("request rate", _finite(rate), "requests/s", note=answered),
        Row("output throughput", result.output_tok_s, "tok/s", note=throughput),
        *latency_rows(reports, slo, _KINDS, ("p50", "p90")),
        Row("mean step time", 1e3 * result.mean_step_s, "ms", "lower", note=parts),
        *figure_rows("", result, _USE),
    ]
    recomputed = f"{result.recomputed_tokens:,} tokens recomputed"
    rows.append(Row("preemptions", result.preemptions, "", "lower", note=recomputed))
    if result.drafted_tokens:
        share = 100 * result.accepted_tokens / result.drafted_tokens
        told = f"{result.accepted_tokens:,} of {result.drafted_tokens:,} drafted tokens"
        rows.append(Row("drafts accepted", share, "%", note=told))
    return rows


def _finite(rate: float) -> float | None:
    """A trace whose requests all come at once has no rate."""
    return rate if math.isfinite(rate) else None


def _sweep_table(trials: Sequence[RateTrial], judged: bool) -> Table:
    """`judged`: there is an SLO to meet."""
    throughput = RunFigure("", lambda one: one.report.output_tok_s, heading="tok/s", shown="{:,.0f}")
    named = [(f"{one.rate:.4g}", one) for one in trials]
    return figure_table("requests/s", named, (throughput, *trial_columns(judged)))
