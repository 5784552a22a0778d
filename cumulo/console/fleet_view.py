"""The fleet page's tables as HTML: replicas, how far their caches overlap, and routing decisions."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cumulo.console.shell import empty
from cumulo.console.values import clock_time, milliseconds, short_id, tile
from cumulo.ranks.rank_meter import RankState

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
    """The share of each replica's cached blocks that each other replica holds, too."""
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


_ENGINES = (  # name, tooltip
    ("prefill engine", "Its name, and the id of its engine process."),
    ("state", "starting, ready or restarting."),
    ("running", "Prompts that it computes now."),
    ("queue", "Prompts that wait there for a place."),
    ("held", "Prompts whose KV blocks it keeps until a replica has copied them."),
    ("restarts", "Times its engine process was replaced after a failure."),
)
_REPLICAS = (
    ("replica", "Its name."),
    ("receiving", "Prompts that prefill engines compute for it now."),
    ("received", "Prompts whose KV blocks arrived since its process began."),
    ("failed", "Prompts that did not arrive and were computed by another engine."),
    ("copy rate", "KV that it copied from prefill engines, for each second of copying."),
)


def prefill_html(engines: list[dict[str, Any]], replicas: list[dict[str, Any]]) -> str:
    """Empty where every replica computes its own prompts."""
    if not engines:
        return ""
    rows = [
        [
            f"<b>{escape(one['name'])}</b> <span class='small soft num'>{one['pid'] or ''}</span>",
            escape(one["state"]),
            f"{one['running']:,}",
            f"{one['waiting']:,}",
            f"{(one['transfers'] or {}).get('sending', 0):,}",
            str(one["restarts"]),
        ]
        for one in engines
    ]
    received = [
        [
            f"<b>{escape(one['name'])}</b>",
            *(f"{(one['transfers'] or {}).get(name, 0):,}" for name in ("receiving", "received", "failed")),
            _copy_rate((one["transfers"] or {}).get("bytes_per_s")),
        ]
        for one in replicas
    ]
    return (
        '<h2 title="Engine processes that compute prompts and hand their KV blocks to the replicas.">'
        f"Prefill engines</h2>{_prefill_table(_ENGINES, rows)}{_prefill_table(_REPLICAS, received)}"
    )


def _prefill_table(columns: tuple[tuple[str, str], ...], rows: list[list[str]]) -> str:
    head = "".join(
        f'<th class="{"right" if at else ""}" title="{tip}">{name}</th>'
        for at, (name, tip) in enumerate(columns)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{"right num" if at else ""}">{cell}</td>' for at, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<table class="plain fleet"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _copy_rate(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3g} GB/s"


_RANK_COLUMNS = (  # name, tooltip
    ("rank", "Its engine and number; rank 0 is the engine's own process."),
    ("process", "The id of its process."),
    ("memory", "Memory of the process, or what it holds on its GPU."),
    ("steps", "Steps that it played since it started."),
    ("step", "Mean time of a step, with what it waited."),
    (
        "waiting",
        "Share of that time in which it waited for other ranks. The rank that waits least is the slowest.",
    ),
)


def ranks_html(engines: Mapping[str, Sequence[RankState]]) -> str:
    """Empty where every engine is one process."""
    rows = "".join(_rank(name, one) for name, ranks in engines.items() for one in ranks)
    if not rows:
        return ""
    head = "".join(
        f'<th class="{"right" if at else ""}" title="{tip}">{name}</th>'
        for at, (name, tip) in enumerate(_RANK_COLUMNS)
    )
    return (
        '<h2 title="Processes that share one copy of the model: --tp, --pp, --dp and --ep.">Ranks</h2>'
        f'<table class="plain fleet"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _rank(engine: str, one: RankState) -> str:
    step_s = one.step_s / one.steps if one.steps else None
    waiting = f"{100 * one.wait_s / one.step_s:.0f}%" if one.step_s else "–"
    cells = (
        str(one.pid),
        f"{one.memory_bytes / (1 << 30):.2f} GiB",
        f"{one.steps:,}",
        milliseconds(step_s),
        waiting,
    )
    numbers = "".join(f'<td class="right num">{cell}</td>' for cell in cells)
    return f"<tr><td><b>{escape(engine)}</b> rank {one.rank}</td>{numbers}</tr>"
