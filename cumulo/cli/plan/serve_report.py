"""What `cumulo plan serve` prints: the deployment with its ranges and its reason, and how many users fit."""

from collections.abc import Sequence
from html import escape

from cumulo.base.chart import Chart
from cumulo.base.figures import RunFigure, figure_html
from cumulo.base.page import card, html_table, page
from cumulo.base.quantities import between, quantity
from cumulo.base.report import Row, shown
from cumulo.cli.shared.figures import latency_rows, range_words, trial_columns
from cumulo.plan.serve.capacity import RateTrial
from cumulo.plan.serve.deployment import Deployment, Promised
from cumulo.plan.serve.search import ServePlan
from cumulo.spec.slo import Slo

_USE = (
    RunFigure("step time, mean", lambda one: 1e3 * one.mean_step_s, "ms", "lower"),
    RunFigure("running sequences per replica, peak", lambda one: float(one.most_running), "sequences"),
    RunFigure("KV cache usage, peak", lambda one: 100 * one.kv_used, "%", "lower"),
    RunFigure("prefix cache hit rate", lambda one: 100 * one.cached_share, "%"),
)


def rows(plan: ServePlan, slo: Slo, think_s: float) -> list[Row]:
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
        "price": f"in the steady state, range {price_range} if all headroom is used",
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


def why(plan: ServePlan) -> str:
    best = plan.best
    found = (
        f"the cheapest of {plan.enumerated:,} kinds of replica; {plan.simulated:,} were simulated, the others "
        "cannot be cheaper"
    )
    if tokens := best.replica.max_tokens_per_step:
        found += f". Steps of {tokens:,} tokens, where the engine's default is larger, keep the ITL"
    return found


def promised(plan: ServePlan) -> str:
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


def rejected(plan: ServePlan) -> str:
    if not plan.rejected:
        return ""
    reasons = dict.fromkeys(f"{one.replica}: {one.why_not}" for one in plan.rejected)
    few = "; ".join(list(reasons)[:2])
    return f"{len(plan.rejected):,} cannot be used, for example {few}"


def users_columns(best: Deployment) -> list[RunFigure]:
    total = RunFigure("", lambda one: one.rate * best.replicas, heading="requests/s, total", shown="{:.3g}")
    return [total, *trial_columns()]


def report_page(
    heading: str,
    table: Sequence[Row],
    notes: Sequence[str],
    chart: Chart,
    users: Sequence[tuple[str, RateTrial]],
    columns: Sequence[RunFigure],
) -> str:
    """The report as one HTML page without scripts."""
    told = (f"<p>{escape(note)}</p>" for note in notes if note)
    figures = html_table(("",) * 3, [(row.name, shown(row), row.note) for row in table])
    fit = "<h2>How many users fit</h2>", card(chart), figure_html("users", users, columns)
    return page(heading, *told, figures, *fit, style="td{text-align:left;white-space:normal}")
