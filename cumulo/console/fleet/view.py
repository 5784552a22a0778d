"""The fleet page's tables as HTML: replicas, how far their caches overlap, and routing decisions."""

from html import escape
from typing import Any

from cumulo.console.shell import empty
from cumulo.console.tiles import tile
from cumulo.console.words import clock_time, milliseconds, short_id

_BADGES = {
    "ready": "running",
    "draining": "queued",
    "starting": "",
    "restarting": "error",
    "removing": "queued",
}


def tiles_html(replicas: list[dict[str, Any]], policy: str, moved: int) -> str:
    ready = sum(one["state"] == "ready" for one in replicas)
    prompts = sum(one["prompt_tokens"] for one in replicas)
    cached = 100 * sum(one["cached_tokens"] for one in replicas) / prompts if prompts else None
    given = [one["prompt_tokens"] - one["cached_tokens"] for one in replicas]
    busiest = max(given) * len(given) / sum(given) if sum(given) else None
    tiles = (
        ("Replicas ready", f"{ready} of {len(replicas)}", "", "Replicas that take requests."),
        ("Router", policy, "", "How the replica of a request is chosen (--router)."),
        ("Running", sum(one["running"] for one in replicas), "", "Sequences that all replicas compute now."),
        ("Cached", cached, "%", "Prompt tokens that the router found in the chosen replica's prefix cache."),
        ("Busiest", busiest, "×", "Prompt tokens given to the busiest replica to compute, over the mean."),
        ("Moved", moved, "", "Requests that another replica took over in mid-answer."),
    )
    return "".join(tile(*one) for one in tiles)


_COLUMNS = (  # name, classes, tooltip
    ("replica", "", "Its name, and the id of its engine process."),
    ("state", "", "starting, ready, draining, restarting or removing."),
    ("running", "right", "Sequences that it computes now."),
    ("queue", "right", "Sequences that wait there for a place."),
    ("prefill", "right wide-only", "Prompt tokens that it has accepted and not computed yet."),
    ("KV usage", "right", "Share of its KV blocks that running requests hold."),
    ("cached blocks", "right wide-only", "KV blocks that hold a prefix that later requests can share."),
    ("requests", "right wide-only", "Requests that it was given since the server started."),
    ("cached", "right", "Share of their prompt tokens that the router found in its prefix cache."),
    ("step", "right wide-only", "Time of a step that only decodes."),
    ("restarts", "right wide-only", "Times its engine process was replaced after a failure."),
)


def replicas_html(replicas: list[dict[str, Any]], may_operate: bool) -> str:
    head = "".join(f'<th class="{classes}" title="{tip}">{name}</th>' for name, classes, tip in _COLUMNS)
    body = "".join(_replica(one, may_operate) for one in replicas)
    return (
        '<h2 title="Engine processes, each with its own copy of the model.">Replicas</h2>'
        f'<table class="plain fleet"><thead><tr>{head}{"<th></th>" if may_operate else ""}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _replica(one: dict[str, Any], may_operate: bool) -> str:
    blocks, name, state = one["blocks"], escape(one["name"]), one["state"]
    trouble = one["detail"] or (one["last_failure"] if state != "ready" else None)
    told = f'<div class="small soft">{escape(trouble)}</div>' if trouble else ""
    step = "–" if one["step_ms"] is None else f"{one['step_ms']:.3g} ms"
    return (
        f'<tr><td><b>{name}</b> <span class="small soft wide-only num">{one["pid"] or ""}</span></td>'
        f'<td><span class="badge {_BADGES.get(state, "")}">{state}</span>{told}</td>'
        f'<td class="right num">{one["running"]:,}</td><td class="right num">{one["waiting"]:,}</td>'
        f'<td class="right num wide-only">{one["waiting_tokens"]:,}</td>'
        f'<td class="right num">{_percent(blocks["used"], blocks["total"])}</td>'
        f'<td class="right num wide-only">{blocks["cached"]:,}</td>'
        f'<td class="right num wide-only">{one["requests"]:,}</td>'
        f'<td class="right num">{_percent(one["cached_tokens"], one["prompt_tokens"])}</td>'
        f'<td class="right num wide-only">{step}</td>'
        f'<td class="right num wide-only">{one["restarts"]}</td>'
        f"{_actions(name, state) if may_operate else ''}</tr>"
    )


def _actions(name: str, state: str) -> str:
    actions = ["undrain"] if state == "draining" else ["drain"] if state == "ready" else []
    if state in ("ready", "draining"):
        actions += ["restart", "remove"]
    buttons = "".join(
        f'<button aria-label="{what.capitalize()} {name}" '
        f"onclick=\"emitEvent('operate', ['{what}', '{name}'])\">{what.capitalize()}</button>"
        for what in actions
    )
    return f'<td class="actions">{buttons}</td>'


def overlap_html(replicas: list[dict[str, Any]], shared: dict[str, dict[str, int]]) -> str:
    """Of each replica's cached blocks, the share that each other replica holds, too."""
    names = [one["name"] for one in replicas]
    cached = {one["name"]: one["blocks"]["cached"] for one in replicas}
    title = (
        '<h2 title="A block that several replicas hold takes room in each of them.">Cache overlap</h2>'
        '<p class="soft small told-above">Of the cached blocks of the replica in the row, the share that the one '
        "in the column holds, too. A prefix-aware router keeps this low.</p>"
    )
    if not any(cached.values()):
        return title + empty(
            "Nothing is cached yet", "Prompts of at least one block are kept for the next request."
        )
    head = "".join(f'<th class="right">{escape(name)}</th>' for name in names)
    rows = "".join(
        f'<tr><td><b>{escape(row)}</b></td><td class="right num">{cached[row]:,}</td>'
        + "".join(
            '<td class="right num soft">–</td>'
            if row == column
            else f'<td class="right num" style="background: color-mix(in srgb, var(--accent) '
            f'{45 * _share(shared[row].get(column, 0), cached[row]):.0f}%, transparent)">'
            f"{_percent(shared[row].get(column, 0), cached[row])}</td>"
            for column in names
        )
        + "</tr>"
        for row in names
    )
    return (
        f'{title}<table class="plain overlap"><thead><tr><th></th><th class="right">blocks</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


_DECISION_COLUMNS = (
    ("sent at", "wide-only", "When the replica was chosen."),
    ("request", "", "The beginning of its id; the link leads to its story."),
    ("replica", "", "The one that was chosen."),
    ("cached", "right", "Prompt tokens found there, of all."),
    ("expected TTFT", "right", "Time to first token that the router expected there."),
    ("measured", "right wide-only", "Time to first token that came."),
    ("second choice", "right wide-only", "The next best replica, and the TTFT expected there."),
    ("why", "wide-only", "The reason of the decision."),
)


def decisions_html(decisions: list[dict[str, Any]]) -> str:
    title = '<h2 title="The last decisions of the router, newest first.">Routing decisions</h2>'
    if not decisions:
        return title + empty("No request yet", "Each request's replica and the reason for it appear here.")
    head = "".join(
        f'<th class="{classes}" title="{tip}">{name}</th>' for name, classes, tip in _DECISION_COLUMNS
    )
    body = "".join(_decision(one) for one in decisions)
    return f'{title}<table class="plain requests"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _decision(one: dict[str, Any]) -> str:
    name, short, second = escape(one["request_id"]), short_id(one["request_id"], 10), one["second"]
    moved = f"moved because {one['moved_because']}; " if one["moved_because"] else ""
    other = "–" if second is None else f"{escape(second['replica'])}, {milliseconds(second['ttft_ms'] / 1e3)}"
    return (
        f'<tr><td class="num wide-only">{clock_time(one["time_s"])}</td>'
        f'<td><a class="mono" href="/requests/{name}" title="{name}">{escape(short)}</a></td>'
        f"<td><b>{escape(one['replica'])}</b></td>"
        f'<td class="right num">{one["cached_tokens"]:,} of {one["prompt_tokens"]:,}</td>'
        f'<td class="right num">{milliseconds(one["ttft_ms"] / 1e3)}</td>'
        f'<td class="right num wide-only">{milliseconds(one["measured_s"])}</td>'
        f'<td class="right num wide-only">{other}</td>'
        f'<td class="why wide-only">{escape(moved + one["why"])}</td></tr>'
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "–"
