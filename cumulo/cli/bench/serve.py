"""`cumulo bench serve`: a load test for any OpenAI-compatible server."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from cumulo.base.quantities import parse_count, parse_duration_s
from cumulo.cli.bench import serve_report as report
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import Panel, argument, option, takes_options
from cumulo.cli.shared.terminal import note
from cumulo.errors import CumuloError
from cumulo.load.campaign import Campaign, Load, Replay, Settings, label
from cumulo.load.client import Target
from cumulo.load.prompts import parse_lengths
from cumulo.load.schedule import Arrivals, Workload, parse_process, parse_rates
from cumulo.load.slo import parse_slo
from cumulo.load.trace import read_trace

EXAMPLE = "Example: [bold]cumulo bench serve --rate 1,2,4 --slo ttft=500ms,itl=50ms --html load.html[/bold]"
_LOAD, _WORK, _REPORT = Panel("Load (one of)"), shared.REQUESTS, Panel("Report")


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    url: str = argument("The server's address.", "http://127.0.0.1:8000")
    model: str = option("Model name. Default: the first model the server lists.", "", "--model", "-m")
    endpoint: str = option("Endpoint to call: chat or completions.", "chat")
    api_key: str = option("API key, sent as a bearer token.", "", envvar="OPENAI_API_KEY", show_default=False)
    concurrency: str = _LOAD("Closed loop: number of concurrent requests; '1,4,16' measures each.", "")
    rate: str = _LOAD("Open loop: request rate, in requests/s; '1,2,4' measures each, '1:8' is a ramp.", "")
    trace: Path | None = _LOAD(
        "Replay a trace: CSV or JSON Lines with a time and two lengths per request.", None
    )
    arrivals: str = _LOAD(shared.ARRIVALS, "poisson")
    trace_speed: float = _LOAD("Speed of the replay; 2: twice as fast.", 1.0)
    trace_unit: str = _LOAD("Unit of the times in the trace: s or ms.", "s")
    requests: int | None = _LOAD("Conversations per level.", None, min=1)
    duration: str = _LOAD("Time per level. Default: 30s, unless --requests or --trace is given.", "")
    warmup: int | None = _LOAD("Conversations at the start of a level that are not measured.", None, min=0)
    settle: str = _LOAD("Pause between levels.", "1s")
    requested: shared.RequestOptions = shared.RequestOptions(input_tokens="128", output_tokens="64")
    turns: str = _WORK("Turns per conversation, in the same forms as --input.", "1")
    think: str = _WORK("Mean pause between turns, for example 2s.", "0s")
    extra: str = _WORK("A JSON object that is merged into every request.", "")
    seed: str = _WORK("Random seed. The same seed gives the same requests.", "0")
    timeout: str = _WORK("Maximum time to wait for an answer.", "600s")
    retries: int = _WORK("Number of retries after 429 or 503, following Retry-After.", 0, min=0)
    slo: str = _REPORT("Latency objective (SLO), for example ttft=500ms,itl=50ms; also tpot and e2e.", "")
    slo_share: float = _REPORT("Share of requests that must meet the SLO, from 0 to 1.", 0.95)
    find_rate: bool = _REPORT("Find the highest request rate that meets --slo.", False)
    tolerance: float = _REPORT("Relative accuracy of the rate that --find-rate finds.", 0.1)
    search_time: str = _REPORT("Maximum time for the search.", "30m")
    html: Path | None = _REPORT("Write an HTML report with charts to this file.", None)
    records: Path | None = _REPORT("Write every request to this file as JSON Lines.", None)
    json_file: options.JsonOption = None


@takes_options
def serve(chosen: BenchServeOptions) -> None:
    """Load-test a server: TTFT, ITL, throughput, goodput under an SLO, and the highest rate that meets it.

    It works with any OpenAI-compatible server. The load is a closed loop (--concurrency), an open loop (--rate) or
    a recorded trace (--trace). The default is 8 concurrent requests.
    """
    campaign = Campaign(settings(chosen), view := report.View())
    interrupted = _run(campaign, view)
    if not interrupted:
        _require_measurements(campaign)
    report.finish(campaign, chosen.json_file, chosen.html, chosen.records)
    if interrupted:
        raise typer.Exit(130)
    if not all(row.ok for row in report.rows(campaign)):
        raise typer.Exit(1)


def _require_measurements(campaign: Campaign) -> None:
    """A level whose time was over before a request after the warm-up had ended has no figures."""
    if campaign.settings.search:
        return
    names = [label(load) for load in campaign.settings.loads]
    empty = [name for name in names if name not in {result.label for result in campaign.results}]
    told = "no request ended after the warm-up: use a longer --duration, or --warmup 0"
    if len(empty) == len(names):
        raise CumuloError(told)
    for name in empty:
        note(f"{name}: {told}")


def _run(campaign: Campaign, view: report.View) -> bool:
    """Whether the user ended it. What was measured by then is reported all the same."""
    try:
        with view.progress:
            asyncio.run(campaign.run())
    except KeyboardInterrupt:
        if not campaign.results:
            raise typer.Exit(130) from None
        return True
    return False


def settings(chosen: BenchServeOptions) -> Settings:
    """The command line's options as a campaign's settings."""
    if chosen.endpoint not in ("chat", "completions"):
        raise CumuloError(f"--endpoint must be chat or completions, got {chosen.endpoint!r}")
    duration_s = parse_duration_s(chosen.duration, "--duration") if chosen.duration else None
    if duration_s is None and chosen.requests is None and not chosen.trace and not chosen.find_rate:
        duration_s = 30.0
    loads = _loads(chosen, duration_s)
    slo = parse_slo(chosen.slo, chosen.slo_share) if chosen.slo else None
    if chosen.find_rate:
        if slo is None:
            raise CumuloError("--find-rate needs an SLO: add --slo, for example --slo ttft=500ms")
        if len(loads) != 1 or not isinstance(loads[0], Arrivals) or loads[0].final_rate is not None:
            raise CumuloError("--find-rate needs one rate to start from: add --rate, for example --rate 1")
        if not chosen.tolerance > 0:
            raise CumuloError(f"--tolerance must be more than 0, got {chosen.tolerance:g}")
    workload = Workload(
        parse_lengths(chosen.requested.input_tokens, "--input"),
        parse_lengths(chosen.requested.output_tokens, "--output"),
        parse_lengths(chosen.turns, "--turns"),
        parse_duration_s(chosen.think, "--think"),
        chosen.requested.shared_prefix,
        chosen.requested.prefixes,
    )
    workload.conversation(0, chosen.seed, None, measured=True)  # lengths that cannot be drawn show here
    if any(isinstance(load, Replay) for load in loads) and workload != Workload():
        raise CumuloError(
            "a trace contains its own lengths; remove --input, --output, --turns and the prefix options"
        )
    endpoint: Any = chosen.endpoint
    target = Target(chosen.model, endpoint, chosen.api_key, extra=_extra(chosen.extra))
    return Settings(
        chosen.url, target, loads, workload, chosen.requests, duration_s, chosen.warmup, slo,
        chosen.find_rate, chosen.tolerance, chosen.seed,
        parse_duration_s(chosen.timeout, "--timeout"), chosen.retries,
        parse_duration_s(chosen.settle, "--settle"),
        parse_duration_s(chosen.search_time, "--search-time"),
    )  # fmt: skip


def _loads(chosen: BenchServeOptions, duration_s: float | None) -> list[Load]:
    given = [name for name in ("concurrency", "rate", "trace") if getattr(chosen, name)]
    if len(given) > 1:
        raise CumuloError(f"--{' and --'.join(given)} cannot be combined; keep one of them")
    process, burst_size = parse_process(chosen.arrivals)
    if chosen.rate:
        return list(parse_rates(chosen.rate, process, burst_size, duration_s))
    if chosen.trace:
        if chosen.trace_unit not in ("s", "ms"):
            raise CumuloError(f"--trace-unit must be s or ms, got {chosen.trace_unit!r}")
        if not chosen.trace_speed > 0:
            raise CumuloError(f"--trace-speed must be more than 0, got {chosen.trace_speed:g}")
        rows = read_trace(chosen.trace, 1.0 if chosen.trace_unit == "s" else 1e-3)
        return [Replay(rows, chosen.trace_speed)]
    return [parse_count(part, "--concurrency") for part in (chosen.concurrency or "8").split(",")]


def _extra(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise CumuloError(f"--extra is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CumuloError(f"--extra must be a JSON object, as in '{{\"top_p\": 0.9}}', got {text!r}")
    return fields
