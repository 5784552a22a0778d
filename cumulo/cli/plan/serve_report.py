"""What `cumulo plan serve` prints: the deployment with its ranges and its reason, and how many users fit."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cumulo.base.files import write_text_file
from cumulo.base.quantities import between, number, quantity
from cumulo.base.report import Row, grid, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumulo.base.chart import Chart
    from cumulo.plan.serve.capacity import RateTrial
    from cumulo.plan.serve.deployment import Deployment, Promised
    from cumulo.plan.serve.search import ServePlan
    from cumulo.spec.slo import Slo

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1d2733}
h1{font-size:1.6rem}h2{margin-top:2.2rem;border-bottom:1px solid #ccd}
table{border-collapse:collapse;margin:.6rem 0}th,td{padding:.25rem .8rem;text-align:left;
border-bottom:1px solid #e3e6ec;vertical-align:top}td.r{text-align:right;white-space:nowrap}
"""

_USERS = ("users", "requests/s, total", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "")


def rows(plan: "ServePlan", slo: "Slo", think_s: float) -> list[Row]:
    """Figures of all replicas together, then of one of them; ranges are those of the predicted step times."""
    best = plan.best
    low, middle, high = plan.headroom
    users = tuple(best.replicas * one.users(think_s) for one in plan.capacity)
    several = (
        f"{best.replicas + best.prefill_replicas} replicas together" if best.replicas > 1 else "1 replica"
    )
    found = [
        Row("price, total", best.price_per_hour, "USD/h", "lower", note=_gpus(best)),
        Row(
            "price of output tokens",
            best.price_per_million_tokens,
            "USD/M tokens",
            "lower",
            note=f"in the steady state, range {_price_range(plan)} if all headroom is used",
        ),
        Row("request rate, total", best.rate, "requests/s", note=f"as asked, {several}"),
        Row(
            "output throughput, total",
            best.output_tok_s,
            "tok/s",
            note=f"what was asked, in the steady state: {quantity(best.output_tok_s / best.gpus, 'tok/s')} per GPU",
        ),
        Row(
            "headroom",
            100 * middle,
            "%",
            note=f"range {between(100 * low, 100 * high, '%')}; then {plan.capacity[1].limit(slo)}",
        ),
        Row(
            "concurrent users that fit, total",
            _three(users[1]),
            "users",
            note=f"range {between(users[0], users[2], 'users')}; each reads for {quantity(think_s, 's')} "
            "between an answer and the next question",
        ),
        Row("request rate per replica", best.rate / best.replicas, "requests/s"),
    ]
    found += _latencies(plan, slo)
    if plan.promise is not None:
        found.append(_promises(plan.promise, slo))
    middle_report = plan.share[1]
    found += [
        Row(
            "step time, mean",
            1e3 * middle_report.mean_step_s,
            "ms",
            "lower",
            note=_range(plan, lambda one: 1e3 * one.mean_step_s, "ms")
            + f", {_parts(middle_report.time_by_part)}",
        ),
        Row(
            "running sequences per replica, peak",
            float(middle_report.most_running),
            "sequences",
            note=_range(plan, lambda one: float(one.most_running), "sequences"),
        ),
        Row(
            "KV cache usage, peak",
            100 * middle_report.kv_used,
            "%",
            "lower",
            note=_range(plan, lambda one: 100 * one.kv_used, "%"),
        ),
    ]
    if middle_report.cached_share:
        note = _range(plan, lambda one: 100 * one.cached_share, "%")
        found.append(Row("prefix cache hit rate", 100 * middle_report.cached_share, "%", note=note))
    for second in plan.deployments[1:]:
        found.append(
            Row("second best, total", second.price_per_hour, "USD/h", "lower", note=_second(best, second))
        )
    return found


def _latencies(plan: "ServePlan", slo: "Slo") -> list[Row]:
    found = []
    for name, kind, bound in (("TTFT", "ttft_s", slo.ttft_s), ("ITL", "itl_s", slo.itl_s)):
        if getattr(plan.share[1], kind) is None:
            continue
        for label, field in (("p50", "p50"), (f"p{slo.percentile:g}", "at_slo")):

            def pick(one: Any, kind: str = kind, field: str = field) -> float:
                return 1e3 * float(getattr(getattr(one, kind), field))

            must = None if bound is None or field != "at_slo" else 1e3 * bound
            note = _range(plan, pick, "ms")
            found.append(Row(f"{name} {label}", pick(plan.share[1]), "ms", "lower", must=must, note=note))
    return found


def _promises(promise: "Promised", slo: "Slo") -> Row:
    then = "served without a promise" if promise.late == "queue" else "refused"
    others = f"{100 * promise.unpromised_share:.3g}% of requests are {then}"
    note = f"by `cumulo serve --slo`, at the pessimistic end; {others}"
    return Row("promises kept", 100 * promise.kept_share, "%", must=slo.percentile, note=note)


def _range(plan: "ServePlan", pick: Any, unit: str) -> str:
    # Queues are chaotic: slower steps can, by chance, make a percentile better.
    low, *_, high = sorted(map(pick, plan.share))
    return f"range {between(low, high, unit)}"


def _price_range(plan: "ServePlan") -> str:
    best = plan.best
    prices = [best.price_per_million_tokens / (1 + max(0.0, share)) for share in plan.headroom]
    return between(min(prices), max(prices), "USD/M tokens")


def _parts(shares: Any) -> str:
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest)


def _gpus(one: "Deployment") -> str:
    what = "CPU" if one.replica.device.generation == "cpu" else "GPU"
    each = quantity(one.replica.device.price_per_hour, "USD/h")
    return f"{one.gpus:,} {what}{'s' if one.gpus > 1 else ''} × {each}"


def _second(best: "Deployment", second: "Deployment") -> str:
    more = second.price_per_hour / best.price_per_hour - 1
    # Which of two is cheaper cannot be told where they are closer than the predictions.
    unsure = more < best.replica.confidence.error + second.replica.confidence.error
    told = f"{more:.0%} more expensive" if more >= 0.005 else "the same price"
    return f"{second}: {told}" + (", within the prediction error" if unsure else "")


def _three(value: float) -> float:
    return float(f"{value:.3g}")


def why(plan: "ServePlan") -> str:
    best = plan.best
    found = (
        f"the cheapest of {plan.enumerated:,} kinds of replica; {plan.simulated:,} were simulated, the others "
        "cannot be cheaper"
    )
    if tokens := best.replica.max_tokens_per_step:
        found += f". Steps of {tokens:,} tokens, where the engine's default is larger, keep the ITL"
    return found


def promised(plan: "ServePlan") -> str:
    """What the plan file promises."""
    best = plan.best
    if plan.promise is not None:
        return ""
    if best.prefill_replicas:
        return (
            "the plan file does not promise the SLO: promises of servers with prefill on replicas of its own have "
            "not been tested. Type `cumulo serve --slo` to make them"
        )
    if best.replica.engine == "cumulo":
        return (
            "the plan file does not promise the SLO: it could not be promised to any request when it arrives"
        )
    return f"the plan file does not promise the SLO: {best.replica.engine} is not Cumulo's engine"


def rejected(plan: "ServePlan") -> str:
    if not plan.rejected:
        return ""
    reasons = dict.fromkeys(f"{one.replica}: {one.why_not}" for one in plan.rejected)
    few = "; ".join(list(reasons)[:2])
    return f"{len(plan.rejected):,} cannot be used, for example {few}"


def users_table(curve: "Sequence[RateTrial]", best: "Deployment", think_s: float) -> Any:
    """One line for each rate that was played."""
    lines: list[list[str | Text]] = [
        [*cells[:-1], Text(cells[-1], "green" if cells[-1] == "meets SLO" else "red")]
        for cells in users_lines(curve, best, think_s)
    ]
    return grid(_USERS, lines, "How many users fit", left=())


def users_lines(curve: "Sequence[RateTrial]", best: "Deployment", think_s: float) -> list[tuple[str, ...]]:
    found = []
    for one in curve:
        spreads = [spread for spread in (one.report.ttft_s, one.report.itl_s) if spread is not None]
        times = [f"{number(1e3 * value)} ms" for spread in spreads for value in (spread.p50, spread.p99)]
        found.append(
            (
                number(float(round(best.replicas * one.users(think_s))), "users"),
                number(one.rate * best.replicas, "requests/s"),
                *times,
                *[""] * (4 - len(times)),
                "meets SLO" if one.holds else "misses SLO",
            )
        )
    return found


def users_chart(curve: "Sequence[RateTrial]", best: "Deployment", slo: "Slo", think_s: float) -> "Chart":
    """Latencies over the number of users, with the SLO."""
    from cumulo.cli.simulate.serve_report import latency_chart

    reports = ((best.replicas * one.users(think_s), one.report) for one in curve)
    return latency_chart("Latency over users", "users", reports, slo)


def write_report(path: Path, heading: str, table: "Sequence[Row]", notes: "Sequence[str]", chart: "Chart",
                 lines: "Sequence[tuple[str, ...]]") -> None:  # fmt: skip
    """Write the report as one HTML page without scripts."""
    from cumulo.base.chart import chart_file

    figures = "".join(
        f'<tr><td>{escape(row.name)}</td><td class="r">{escape(shown(row))}</td><td>{escape(row.note)}</td></tr>'
        for row in table
    )
    heads = "".join(f"<th>{name}</th>" for name in _USERS)
    users = "".join(
        "<tr>" + "".join(f'<td class="r">{escape(cell)}</td>' for cell in line) + "</tr>" for line in lines
    )
    told = "".join(f"<p>{escape(note)}</p>" for note in notes if note)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(heading)}</h1>{told}<table>{figures}</table>"
        f"<h2>How many users fit</h2>{chart_file(chart)}<table><tr>{heads}</tr>{users}</table></body></html>\n"
    )
    write_text_file(path, page, "the report to")
