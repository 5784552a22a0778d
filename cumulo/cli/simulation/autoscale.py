"""`cumulo simulate autoscale`: rehearse autoscaling rules on a trace before they are deployed."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated

import typer

from cumulo.base.chart import Chart, Series, chart_file
from cumulo.base.figures import RunFigure, figure_rows, figure_table
from cumulo.base.nearest import names_in
from cumulo.base.quantities import parse_duration_s
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import Panel, takes_options
from cumulo.cli.shared.terminal import dim, marked, present, save, working
from cumulo.errors import ConfigError
from cumulo.fleet.decide.scaling import ReplicaSpeed, ScalingLimits
from cumulo.fleet.simulate.autoscaled_fleet import ScaledRun
from cumulo.fleet.simulate.rehearsal import Rehearsal, copied, parse_rule, parted
from cumulo.fleet.simulate.replica_speed import replica_speed, split_speed
from cumulo.load.slo import parse_slo
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import Percentiles
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import shipped
from cumulo.spec.slo import Slo

EXAMPLE = (
    "Example: [bold]cumulo simulate autoscale --requests 2400 --rate 24 --begin 1 --start-up 20s --device l40s "
    "--rule forecast,hpa-queue=2 --svg autoscale.svg[/bold]"
)
_KEY = (
    "hours: of replicas, from their order until they have drained. most: replicas at the same time. starts: "
    "replicas that were started. turns: changes against the direction of the one before. lost: requests without an "
    "answer."
)
_FLEET, _RULES, _REPORT = map(Panel, ("Fleet", "Rules", "Report"))


@dataclass(frozen=True, kw_only=True)
class AutoscaleOptions:
    trace_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE", help="A trace to replay, as with --trace: Azure, BurstGPT, Mooncake."
        ),
    ] = None
    rule: str = _RULES(
        "Rules to compare, separated by commas: forecast, hpa-queue, hpa-concurrency, hpa-utilization, keda-queue, "
        "keda-concurrency, keda-utilization, with a target per replica as in hpa-queue=2; oracle knows the future.",
        "forecast,hpa-queue,hpa-concurrency,hpa-utilization",
    )
    train: float = _RULES(
        "Share of the trace on which rules learn or are tuned; the rest is reported.", 0.0, min=0, max=0.9
    )
    min_replicas: int = _RULES("Fewest replicas; 0: scale to zero.", 1, "--min", min=0)
    max_replicas: int = _RULES("Most replicas.", 16, "--max", min=1)
    budget: float = _RULES("Most that all replicas may cost per hour, in USD; 0: no bound.", 0.0, min=0)
    model: str = _FLEET("A model name from the catalogue, or a folder with a config.json.", "llama-3.1-8b")
    device: str = _FLEET("Device, by its name in the catalogue.", "h200")
    tp: int = _FLEET("Tensor parallelism of a replica.", 1)
    weights: str = _FLEET("Weight format: bfloat16, float8 or float32.", "bfloat16")
    start_up: str = _FLEET("Time from the order of a replica until it serves.", "60s")
    begin: int = _FLEET(
        "Replicas at the beginning; 0: as many as the rule had after --train, or as the first minute needs.",
        0,
        min=0,
    )
    split: bool = _FLEET(
        "Prefill and decode on replicas of their own, scaled apart; --min and --max hold for each.", False
    )
    copies: int = shared.TRAFFIC(
        "Replay every request so many times, a few seconds apart: a larger service.", 1, min=1
    )
    rate: float = shared.TRAFFIC("Request rate; 0: as recorded, or 1 request/s.", 0.0, min=0)
    traffic: shared.TrafficOptions = shared.TrafficOptions()
    slo: str = shared.TRAFFIC(
        "Latency objective of a request: ttft, itl, tpot and e2e, as in a server's own --slo.",
        "ttft=1s,tpot=50ms",
    )
    slo_share: float = shared.TRAFFIC("Share of requests that must keep the SLO.", 0.95)
    svg: Path | None = _REPORT("Write a picture of replicas and load over time (SVG).", None)
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@takes_options
def autoscale(chosen: AutoscaleOptions) -> None:
    """Rehearse autoscaling rules on a trace: replica-hours, SLO attainment and thrash, next to HPA and KEDA.

    The rule that does best here is the one that `cumulo serve --autoscale` obeys: the same code decides.
    """
    rules = [parse_rule(text) for text in names_in(chosen.rule) or [chosen.rule]]
    slo = parse_slo(chosen.slo, chosen.slo_share)
    catalog = shipped(chosen.catalog_file)
    traffic_options = chosen.traffic
    if chosen.trace_file is not None:
        traffic_options = dataclasses.replace(traffic_options, trace=chosen.trace_file)
    spec = catalog.model_or_file(chosen.model)
    traffic = traffic_options.traffic(spec.max_context)
    traffic = copied(traffic.at_rate(chosen.rate) if chosen.rate else traffic, chosen.copies)
    cluster = catalog.cluster(max(1, chosen.tp), chosen.device)
    replica = Replica(spec, cluster.node, cluster.fabric, chosen.tp, weights=chosen.weights).with_context_for(
        traffic.arrivals
    )
    start_up_s = parse_duration_s(chosen.start_up, "--start-up")
    roles = ("prefill", "decode") if chosen.split else ("both",)
    limits = ScalingLimits(
        chosen.min_replicas,
        chosen.max_replicas,
        budget_per_hour=chosen.budget or None,
        devices_per_replica=dict.fromkeys(roles, replica.ranks),
        price_per_device_hour=replica.device.price_per_hour,
    )
    _check(chosen, traffic, limits, replica.price_per_hour * len(roles))
    earlier, judged = parted(traffic, chosen.train)
    runs = []
    with working("simulating") as tell:
        tell("what one replica serves within the SLO")
        speed = (split_speed if chosen.split else replica_speed)(replica, earlier or judged, slo)
        begin = {role: chosen.begin or _needed(judged, speed, limits, role) for role in roles}
        rehearsal = Rehearsal(replica, slo, start_up_s, limits, begin if chosen.split else begin["both"])
        for rule in rules:
            played = rehearsal
            if earlier is not None:
                rule = rehearsal.tuned(rule, earlier, judged, speed, tell)
                played = rehearsal if chosen.begin else rehearsal.begun(rule, earlier, speed)
            tell(str(rule))
            runs.append(played.play(rule, judged, speed, earlier=earlier))
    figures, named = _figures(slo, replica.price_per_hour), [(run.rule, run) for run in runs]
    save(chosen.svg, lambda: chart_file(_replicas_chart(runs)), "picture")
    evidence = replica.profile.evidence
    speeds = (
        f"{began_words(runs)} at the beginning, {start_up_s:g} s to start one. "
        f"One serves {speed.prompt_tok_s:,.0f} prompt tok/s or {speed.output_tok_s:,.0f} output tok/s within "
        "the SLO."
    )
    present(
        [row for name, run in named for row in figure_rows(name, run, figures)],
        chosen.json_file,
        marked("[bold]{}[/bold] on replicas of [bold]{}[/bold], {}", chosen.model, replica, slo),
        figure_table("rule", named, figures),
        dim(f"{speeds}\n{_KEY}\nevidence: {evidence}"),
        evidence=evidence,
        runs={name: [dataclasses.asdict(look) for look in run.looks] for name, run in named},
    )


def _check(chosen: AutoscaleOptions, traffic: Traffic, limits: ScalingLimits, least_price: float) -> None:
    """What cannot be kept, before a long run. `least_price`: of one replica of each role, per hour."""
    if math.isinf(traffic.rate):
        count = len(traffic.arrivals)
        what = "it has one request" if count == 1 else f"its {count:,} requests arrive at the same time"
        raise ConfigError(f"a rehearsal needs traffic that changes over time: {what}")
    if chosen.begin > limits.most:
        raise ConfigError(f"--begin {chosen.begin} is more than --max {limits.most}")
    least = least_price * max(1, limits.fewest)
    if chosen.budget and chosen.budget < least:
        raise ConfigError(
            f"--budget {chosen.budget:g} is less than the fewest replicas cost, which is ${least:.2f} per hour"
        )
    if chosen.svg is not None and not chosen.svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {chosen.svg}: there is no folder {chosen.svg.parent}")


def began_words(runs: Sequence[ScaledRun]) -> str:
    """How many replicas each rule began with: after --train, as many as it had then."""
    words = {}
    for run in runs:
        counts = [
            f"{count} {'' if role == 'both' else role + ' '}replica{'' if count == 1 else 's'}"
            for role, count in run.began_with.items()
        ]
        words[run.rule] = " and ".join(counts)
    alike = len(set(words.values())) == 1
    return words[runs[0].rule] if alike else ", ".join(f"{rule}: {told}" for rule, told in words.items())


def _needed(traffic: Traffic, speed: ReplicaSpeed, limits: ScalingLimits, role: str) -> int:
    """As many replicas as the first minute needs, so that no rule is judged by how the fleet began."""
    first = [one for one in traffic.arrivals if one.arrived_s <= traffic.arrivals[0].arrived_s + 60]
    work_s = sum(speed.work_s(role, one.prompt_tokens, one.output_tokens) for one in first)
    span_s = max(1.0, min(60.0, traffic.arrivals[-1].arrived_s - traffic.arrivals[0].arrived_s))
    needed = speed.needed(work_s / span_s / speed.at_most(role), role)
    return min(limits.most, max(1, limits.fewest, math.ceil(needed)))


def _figures(slo: Slo, price_per_hour: float) -> tuple[RunFigure, ...]:
    """What is compared of each rule, in at most 80 columns; `_KEY` explains the headings."""

    def ttft_s(run: ScaledRun) -> float | None:
        spread = Percentiles.from_values(run.ttft_s, percentile=slo.percentile)
        return None if spread is None else spread.at_slo

    def cost(run: ScaledRun) -> float | None:
        return run.replica_hours * price_per_hour if price_per_hour else None

    ttft = f"TTFT p{slo.percentile:g}"
    return (
        RunFigure("replica-hours", lambda run: run.replica_hours, "h", "lower", "hours", "{:.2f}"),
        RunFigure("cost", cost, "USD", "lower", "cost", "${:.2f}"),
        RunFigure("SLO attainment", lambda run: 100 * run.attainment, "%", heading="in SLO", shown="{:.1f}%"),
        RunFigure(ttft, ttft_s, "s", "lower", ttft),
        RunFigure("", lambda run: run.most, heading="most"),
        RunFigure("replicas started", lambda run: run.starts, "", "lower", "starts"),
        RunFigure("reversals", lambda run: run.reversals, "", "lower", "turns"),
        RunFigure("requests lost", lambda run: run.requests - run.answered, "", "lower", "lost"),
    )


def _replicas_chart(runs: Sequence[ScaledRun]) -> Chart:
    """Ready replicas under each rule, where requests missed the SLO, and the load, which is the same for all."""
    series, load = [], list[tuple[float, float]]()
    for color, run in enumerate(runs, 1):
        # Roles that were looked at in the same moment count as one: their replicas are added.
        moments = [list(looks) for _, looks in groupby(run.looks, key=lambda look: look.time_s)]
        ready = [(looks[0].time_s / 60, sum(look.ready for look in looks)) for looks in moments]
        steps = [point for (x, y), (after, _) in pairwise(ready) for point in ((x, y), (after, y))]
        late = [
            (point, f"{looks[0].ended - looks[0].ended_in_slo} of {looks[0].ended} late")
            for point, looks in zip(ready, moments, strict=True)
            if looks[0].ended > looks[0].ended_in_slo
        ]
        hours = f"{run.rule}: {run.replica_hours:.2f} replica-hours, {run.attainment:.1%} within the SLO"
        series.append(Series(hours, steps or ready, "line", color))
        series.append(
            Series(
                f"{run.rule}: late requests", [at for at, _ in late], "dots", color, [tip for _, tip in late]
            )
        )
        load = load or [(looks[0].time_s / 60, looks[0].arrived / moments[0][0].time_s) for looks in moments]
    load_line = Series("requests/s", load, "line", 0)
    return Chart("Replicas and load over time", "minutes", "ready replicas", [load_line, *series])
