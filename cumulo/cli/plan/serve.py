"""`cumulo plan serve`: the cheapest deployment that meets an SLO, why it is, and which one comes second."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.text import Text

from cumulo.base import report as reports
from cumulo.base.chart import Chart, chart_file
from cumulo.base.figures import RunFigure, figure_html, figure_table
from cumulo.base.nearest import names_in
from cumulo.base.page import card, html_table, page
from cumulo.base.quantities import between, number, parse_duration_s, quantity
from cumulo.base.report import Row
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import Panel, group, takes_options, typed_flags
from cumulo.cli.shared.figures import latency_chart, latency_rows, range_words, trial_columns
from cumulo.cli.shared.terminal import dim, note, only_json, present, save, working
from cumulo.errors import ConfigError
from cumulo.load.simulated import parse_objective
from cumulo.plan.serve.capacity import RateTrial
from cumulo.plan.serve.deployment import Deployment, Promised
from cumulo.plan.serve.kinds import ReplicaChoices, kinds, obstacle
from cumulo.plan.serve.options import weigh
from cumulo.plan.serve.plan_file import differing, plan_file, plan_text
from cumulo.plan.serve.replica import FORMATS, Replica
from cumulo.plan.serve.search import ServePlan, Wanted, search
from cumulo.plan.serve.traffic import check_rate
from cumulo.spec.catalog import Catalog, shipped
from cumulo.spec.model import ModelSpec
from cumulo.spec.slo import Slo

EXAMPLE = (
    "Example: [bold]cumulo plan serve llama-3.1-8b --rate 50 --input lognormal:400,0.8,4000 --output 200 "
    "--slo ttft=500ms,itl=40ms[/bold]"
)
_WHERE, _REPORT = shared.DEPLOYMENT, Panel("Report")
_NOT_FOR_RENT = ("a800", "h800")  # sold in China only, and their prices are a guess and a paper's


@dataclass(frozen=True, kw_only=True)
class PlanServeOptions:
    model: shared.ModelName
    rate: float | None = shared.TRAFFIC(
        "Request rate of all replicas together, in requests/s. This or --users is needed.", None
    )
    users: float | None = shared.TRAFFIC(
        "Number of people who use it at the same time, in place of --rate: each asks, reads the answer for "
        "--think, and asks again.",
        None,
    )
    slo: shared.SloOption
    devices: str = _WHERE(
        "Devices to consider, separated by commas. Default: every GPU in the catalogue but a800 and h800.", ""
    )
    weights: str = _WHERE(
        "Weight formats to consider, separated by commas: bfloat16, float8, int4; with --hypothetical also float4 "
        "and mxfp4. Default: all of them; float32 on CPUs.",
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
        "Also consider what `cumulo serve` cannot run: 8-bit experts, GPT-OSS's 4-bit experts, and 4-bit weights "
        "on Blackwell, as fast as TensorRT-LLM's published throughputs."
    )
    max_gpus: int | None = _WHERE("Maximum number of GPUs. Default: no limit.", None)
    traffic: shared.TrafficOptions = shared.TrafficOptions(requests=400)
    slo_percentile: shared.SloPercentile = 99.0
    think: str = shared.TRAFFIC("Time a user waits between an answer and the next question.", "30s")
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
    wanted = _wanted(chosen, catalog, think_s)
    choices = _choices(chosen, catalog, wanted.spec)
    with working("planning") as tell:
        every = kinds(wanted.spec, wanted.traffic, wanted.slo, catalog, choices)
        plan = search(wanted, every, tell, promises=True)
        tell("options")
        options_chosen = weigh(plan, wanted, choices)
    best, rows = plan.best, _rows(plan, wanted.slo, think_s)
    short = _in_short(plan, wanted.slo)
    by_users = ((best.replicas * one.users(think_s), one.report) for one in plan.curve)
    chart = latency_chart("Latency over users", "users", by_users, wanted.slo)
    users = [(number(best.replicas * one.users(think_s)), one) for one in plan.curve]
    total = RunFigure("", lambda one: one.rate * best.replicas, heading="requests/s, total", shown="{:.3g}")
    columns = total, *trial_columns()
    heading = f"{chosen.model}, {number(wanted.rate)} requests/s: {best}"
    asked = _asked(chosen, wanted, think_s)
    notes = (
        f"why: {_why(plan)}.",
        f"evidence: {best.replica.confidence.evidence.rstrip('.')}.",
        _promised(plan),
        _sixteen_bits(best.replica),
        *map(str, options_chosen),
        _rejected(plan),
    )
    planned = plan_file(best, chosen.model, wanted.slo, plan.promise)
    asked += f" The server takes contexts of up to {planned.max_context or wanted.spec.max_context:,} tokens."
    save(chosen.svg, lambda: chart_file(chart), "chart")
    save(
        chosen.report_file,
        lambda: _report_page(heading, rows, (asked, *notes), chart, users, columns),
        "report",
    )
    save(chosen.out, lambda: plan_text(planned, shlex.join(["cumulo", *sys.argv[1:]])), "plan")
    present(
        rows,
        chosen.json_file,
        Text(heading, "bold"),
        dim(asked),
        reports.grid(("", ""), short.items(), left=(0, 1)),
        reports.table("Details", rows),
        figure_table("users", users, columns, "How many users fit"),
        dim("\n".join(filter(None, notes))),
        plans=[_as_dict(one, plan) for one in plan.deployments],
        options=[asdict(one) for one in options_chosen],
        asked=asked,
        in_short=short,
    )
    if only_json(chosen.json_file):
        return
    if why_not := obstacle(best.replica, best.prefill_replicas > 0):
        note(f"this is hypothetical: `cumulo serve` cannot run it: {why_not}")
        return
    model_word = "" if planned.model and chosen.out else f" {planned.model or 'MODEL'}"
    words = f" --plan {chosen.out}"
    if chosen.out is None:  # what differs from a plain `cumulo serve`
        words = "".join(f" --{name.replace('_', '-')} {value}" for name, value in differing(planned).items())
    note(f"start it with: cumulo serve{model_word}{words}")


def _wanted(chosen: PlanServeOptions, catalog: Catalog, think_s: float) -> Wanted:
    if (chosen.rate is None) == (chosen.users is None):
        raise ConfigError("say how much is asked: --rate in requests/s or --users, one of them")
    if chosen.users is not None and not 0 < chosen.users < float("inf"):
        raise ConfigError(f"--users must be more than 0, got {chosen.users:g}")
    if chosen.users is not None and think_s <= 0:
        raise ConfigError(
            "--users needs a --think of more than 0 s; give --rate for programs that never wait"
        )
    rate = chosen.rate if chosen.rate is not None else (chosen.users or 0.0) / think_s
    check_rate(rate)
    if chosen.max_gpus is not None and chosen.max_gpus < 1:
        raise ConfigError(f"--max-gpus must be 1 or more, got {chosen.max_gpus}; omit it for no limit")
    objective = parse_objective(chosen.slo, chosen.slo_percentile)
    if objective is None:
        raise ConfigError("a deployment plan needs an SLO: add --slo, for example --slo ttft=500ms,itl=50ms")
    spec = catalog.model_or_file(chosen.model)
    return Wanted(spec, chosen.traffic.traffic(spec.max_context), rate, objective, chosen.max_gpus)


def _asked(chosen: PlanServeOptions, wanted: Wanted, think_s: float) -> str:
    """What was planned for, where it is easily overlooked: the traffic, and how users become a rate."""
    prompt, output, shared_tokens = wanted.traffic.means()
    typed, told = typed_flags(), f"{number(prompt)} tokens and answers of {number(output)} on average"
    if shared_tokens:
        told += f", {number(shared_tokens)} of a prompt known from an earlier one"
    usual = not {"trace", "input_tokens", "output_tokens"} & set(typed)
    traffic = f"Planned for prompts of {told}" + (
        ", the defaults: --input, --output or --trace say otherwise." if usual else "."
    )
    if chosen.users is None:
        return traffic
    return (
        f"{number(chosen.users)} users who each ask again {quantity(think_s, 's')} after an answer ask at most "
        f"{number(wanted.rate)} requests/s. {traffic}"
    )


def _choices(chosen: PlanServeOptions, catalog: Catalog, spec: ModelSpec) -> ReplicaChoices:
    names = names_in(chosen.devices) or [
        name
        for name in catalog.names("devices")
        if catalog.device(name).generation != "cpu" and name not in _NOT_FOR_RENT
    ]
    on_cpus = all(catalog.device(name).generation == "cpu" for name in names)
    usual = ["float32"] if on_cpus else ["bfloat16", "float8", "int4"]
    if chosen.hypothetical and not on_cpus:
        usual += ["float4", *["mxfp4"] * (spec.family == "gpt_oss")]  # which alone is published so
    return ReplicaChoices(
        tuple(names),
        tuple(names_in(chosen.weights, "--weights", FORMATS) or usual),
        tuple(map(shared.kv_format, names_in(chosen.kv))) or ("",),
        chosen.split,
        chosen.hypothetical,
        **chosen.engines.fields(),
    )


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


def _in_short(plan: ServePlan, slo: Slo) -> dict[str, str]:
    """The answer in five lines: what to use, how fast, at what price, how sure that is, and what limits it."""
    best, (fast, middle, slow) = plan.best, plan.share
    speeds = [
        f"{name.upper()} p{slo.percentile:g} {quantity(one.at_slo, 's')} ({between(low.at_slo, high.at_slo, 's')})"
        for name in ("ttft", "itl")
        for low, one, high in [[getattr(report, f"{name}_s") for report in (fast, middle, slow)]]
        if low and one and high
    ]
    more, month = number(100 * plan.headroom[1]), quantity(best.price_per_hour * 24 * 30, "USD")
    price = f"{quantity(best.price_per_hour, 'USD/h')}, {month} per 30 days"
    kept = f"the SLO is kept if steps take up to {best.replica.confidence.error:.0%} longer than predicted"
    return {
        "use": f"{_gpus(best).partition(' ×')[0]}: {best}",
        "speed": f"{', '.join(speeds)}; {number(best.rate)} requests/s, {more}% more would fit",
        "price": f"{price}; {quantity(best.price_per_million_tokens, 'USD/M')} output tokens at this rate",
        "how sure": f"{kept}, as in 9 of 10 measurements",
        "limit": plan.capacity[1].limit(slo),
    }


_USE = (
    RunFigure("step time, mean", lambda one: 1e3 * one.mean_step_s, "ms", "lower"),
    RunFigure("running sequences per replica, peak", lambda one: float(one.most_running), "sequences"),
    RunFigure("KV cache usage, peak", lambda one: 100 * one.kv_used, "%", "lower"),
    RunFigure("prefix cache hit rate", lambda one: 100 * one.cached_share, "%"),
)


def _rows(plan: ServePlan, slo: Slo, think_s: float) -> list[Row]:
    """Figures of all replicas together, then of one of them; ranges are those of the predicted step times."""
    best, middle = plan.best, plan.share[1]
    headroom = [100 * share for share in plan.headroom]
    users = [best.replicas * one.users(think_s) for one in plan.capacity]
    several = (
        f"{best.replicas + best.prefill_replicas} replicas together" if best.replicas > 1 else "1 replica"
    )
    prices = [best.price_per_million_tokens / (1 + max(0.0, share)) for share in plan.headroom]
    price_range = between(min(prices), max(prices), "USD/M tokens")
    per_gpu, think = quantity(best.output_tok_s / best.gpus, "tok/s"), quantity(think_s, "s")
    notes = {
        "price": f"at this rate; {price_range} if all headroom is used",
        "tokens": f"what was asked, in the steady state: {per_gpu} per GPU",
        "headroom": f"range {between(headroom[0], headroom[2], '%')}; then {plan.capacity[1].limit(slo)}",
        "users": f"range {between(users[0], users[2], 'users')}; each reads for {think} between an answer "
        "and the next question",
    }
    found = [
        Row("price, total", best.price_per_hour, "USD/h", "lower", note=_gpus(best)),
        Row(
            "price of output tokens",
            best.price_per_million_tokens,
            "USD/M tokens",
            "lower",
            note=notes["price"],
        ),
        Row("request rate, total", best.rate, "requests/s", note=f"as asked, {several}"),
        Row("output throughput, total", best.output_tok_s, "tok/s", note=notes["tokens"]),
        Row("headroom", headroom[1], "%", note=notes["headroom"]),
        Row("concurrent users that fit, total", float(f"{users[1]:.3g}"), "users", note=notes["users"]),
        Row("request rate per replica", best.rate / best.replicas, "requests/s"),
        *latency_rows((middle, *plan.share), slo, (("TTFT", "ttft_s"), ("ITL", "itl_s")), ("p50",)),
    ]
    if plan.promise is not None:
        found.append(_promises(plan.promise, slo))
    parts = sorted(middle.time_by_part.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts)
    for one in _USE:
        if value := one.pick(middle):
            note = range_words(one.pick, plan.share, one.unit) + (
                f", {shares}" if "step" in one.label else ""
            )
            room = best.replica.memory().kv_blocks * best.replica.engine_config().block_size
            note += f", of {quantity(float(room), 'tokens')} per replica" if "KV" in one.label else ""
            found.append(Row(one.label, value, one.unit, one.better, note=note))
    for second in plan.deployments[1:]:
        found.append(
            Row("second best, total", second.price_per_hour, "USD/h", "lower", note=_second(best, second))
        )
    return found


def _promises(promise: Promised, slo: Slo) -> Row:
    then = "served without a promise" if promise.late == "queue" else "refused"
    others = f"{100 * promise.unpromised_share:.3g}% of requests are {then}"
    note = f"by `cumulo serve --slo`, at the pessimistic end; {others}"
    return Row("promises kept", 100 * promise.kept_share, "%", must=slo.percentile, note=note)


def _gpus(one: Deployment) -> str:
    what = "CPU" if one.replica.device.generation == "cpu" else "GPU"
    each = quantity(one.replica.device.price_per_hour, "USD/h")
    return f"{one.gpus:,} {what}{'s' if one.gpus > 1 else ''} × {each}"


def _second(best: Deployment, second: Deployment) -> str:
    more = second.price_per_hour / best.price_per_hour - 1
    # Which of two is cheaper cannot be told where they are closer than the predictions.
    unsure = more < best.replica.confidence.error + second.replica.confidence.error
    told = f"{more:.0%} more expensive" if more >= 0.005 else "the same price"
    return f"{second}: {told}" + (", within the prediction error" if unsure else "")


def _why(plan: ServePlan) -> str:
    best = plan.best
    found = (
        f"the cheapest of {plan.enumerated:,} kinds of replica; {plan.simulated:,} were simulated, the others "
        "cannot be cheaper"
    )
    if tokens := best.replica.max_tokens_per_step:
        found += f". Steps of {tokens:,} tokens, where the engine's default is larger, keep the ITL"
    return found


def _promised(plan: ServePlan) -> str:
    """What the plan file promises."""
    best = plan.best
    if plan.promise is not None:
        return ""
    if best.replica.engine != "cumulo":
        return f"the plan file does not promise the SLO: {best.replica.engine} is not Cumulo's engine"
    if best.prefill_replicas:
        return (
            "the plan file does not promise the SLO: promises of servers with prefill on replicas of its own have "
            "not been tested. Type `cumulo serve --slo` to make them"
        )
    return "the plan file does not promise the SLO: it could not be promised to any request when it arrives"


def _sixteen_bits(replica: Replica) -> str:
    if replica.engine != "cumulo" or replica.spec.moe is None:
        return ""
    return (
        "`cumulo serve` keeps experts in 16 bits; --hypothetical shows what engines with narrower ones need"
    )


def _rejected(plan: ServePlan) -> str:
    if not plan.rejected:
        return ""
    reasons = dict.fromkeys(f"{one.replica}: {one.why_not}" for one in plan.rejected)
    few = "; ".join(list(reasons)[:2])
    return f"{len(plan.rejected):,} cannot be used, for example {few}"


def _report_page(
    heading: str,
    rows: Sequence[Row],
    notes: Sequence[str],
    chart: Chart,
    users: Sequence[tuple[str, RateTrial]],
    columns: Sequence[RunFigure],
) -> str:
    """The report as one HTML page without scripts."""
    told = (f"<p>{escape(note)}</p>" for note in notes if note)
    figures = html_table(("",) * 3, [(row.name, reports.shown(row), row.note) for row in rows])
    fit = "<h2>How many users fit</h2>", card(chart), figure_html("users", users, columns)
    return page(heading, *told, figures, *fit, style="td{text-align:left;white-space:normal}")
