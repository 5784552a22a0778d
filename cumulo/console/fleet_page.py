"""The fleet page: replicas with their load and caches, recent routing decisions with their reasons, and buttons to
drain and restart replicas."""

import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.console.front import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.console.values import actions, clock_time, heading, milliseconds, percent, short_id, table, tile
from cumulo.ranks.rank_meter import RankState
from cumulo.serve.observe.fleet_report import decision_report, overlaps, prefill_reports, replica_reports
from cumulo.serve.replicas import operations
from cumulo.serve.replicas.fleet import Fleet

_BADGES = {"ready": "running", "draining": "queued", "restarting": "error", "removing": "queued"}
_ACTIONS = {"ready": ("drain", "restart", "remove"), "draining": ("undrain", "restart", "remove")}


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
        ("Busiest replica", busiest, "× mean", "Prompt tokens it was given to compute, over the mean: 1 is even."),
        ("Moved requests", moved, "", "Answers that another replica continued: theirs failed or restarted."),
    )  # fmt: skip
    return "".join(tile(*one) for one in tiles)


_COLUMNS = (
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
    columns = (*_COLUMNS, ("", "actions", "")) if may_operate else _COLUMNS
    rows = [_replica(one)[: len(columns)] for one in replicas]
    return heading("Replicas", "Engine processes, each with its own copy of the model.") + table(
        columns, rows, "fleet"
    )


def _replica(one: dict[str, Any]) -> list[str]:
    blocks, state = one["blocks"], one["state"]
    trouble = one["detail"] or (one["last_failure"] if state != "ready" else None)
    told = f'<div class="small soft">{escape(trouble)}</div>' if trouble else ""
    return [
        f'<b>{escape(one["name"])}</b> <span class="small soft wide-only num">{one["pid"] or ""}</span>',
        f'<span class="badge {_BADGES.get(state, "")}">{state}</span>{told}',
        f"{one['running']:,}",
        f"{one['waiting']:,}",
        f"{one['waiting_tokens']:,}",
        percent(blocks["used"], blocks["total"]),
        f"{blocks['cached']:,}",
        f"{one['requests']:,}",
        percent(one["cached_tokens"], one["prompt_tokens"]),
        "–" if one["step_ms"] is None else f"{one['step_ms']:.3g} ms",
        f"{one['restarts']}",
        actions("operate", _ACTIONS.get(state, ()), one["name"]),
    ]


def overlap_html(replicas: list[dict[str, Any]], shared: dict[str, dict[str, int]]) -> str:
    """The share of each replica's cached blocks that each other replica holds, too."""
    cached = {one["name"]: one["blocks"]["cached"] for one in replicas}
    title = heading("Cache overlap", "A block that several replicas hold takes room in each of them.") + (
        '<p class="soft small told-above">Of the cached blocks of the replica in the row, the share that the one '
        "in the column holds, too. A prefix-aware router keeps this low.</p>"
    )
    if not any(cached.values()):
        return title + empty(
            "Nothing is cached yet", "Prompts of at least one block are kept for the next request."
        )
    columns = (("", "", ""), ("blocks", "right", ""), *((escape(name), "right", "") for name in cached))
    rows = [
        [f"<b>{escape(row)}</b>", f"{blocks:,}"]
        + ["–" if row == name else _overlap(shared[row].get(name, 0), blocks) for name in cached]
        for row, blocks in cached.items()
    ]
    return title + table(columns, rows, "overlap")


def _overlap(part: int, whole: int) -> str:
    share = 45 * part / whole if whole else 0.0
    tint = f"color-mix(in srgb, var(--accent) {share:.0f}%, transparent)"
    return f'<span style="background: {tint}">{percent(part, whole)}</span>'


_DECISION_COLUMNS = (
    ("sent at", "wide-only", "When the replica was chosen."),
    ("request", "", "The beginning of its id; the link leads to its story."),
    ("replica", "", "The one that was chosen."),
    ("cached", "right", "Prompt tokens found there, of all."),
    ("expected TTFT", "right", "Time to first token that the router expected there."),
    ("measured", "right wide-only", "Time to first token that came."),
    ("second choice", "right wide-only", "The next best replica, and the TTFT expected there."),
    ("why", "why wide-only", "The reason of the decision."),
)


def decisions_html(decisions: list[dict[str, Any]]) -> str:
    title = heading("Routing decisions", "The last decisions of the router, newest first.")
    if not decisions:
        return title + empty("No request yet", "Each request's replica and the reason for it appear here.")
    return title + table(_DECISION_COLUMNS, map(_decision, decisions), "requests")


def _decision(one: dict[str, Any]) -> list[str]:
    name, short, second = escape(one["request_id"]), short_id(one["request_id"], 10), one["second"]
    moved = f"moved because {one['moved_because']}; " if one["moved_because"] else ""
    return [
        f'<span class="num">{clock_time(one["time_s"])}</span>',
        f'<a class="mono" href="/requests/{name}" title="{name}">{escape(short)}</a>',
        f"<b>{escape(one['replica'])}</b>",
        f"{one['cached_tokens']:,} of {one['prompt_tokens']:,}",
        milliseconds(one["ttft_ms"] / 1e3),
        milliseconds(one["measured_s"]),
        "–" if second is None else f"{escape(second['replica'])}, {milliseconds(second['ttft_ms'] / 1e3)}",
        escape(moved + one["why"]),
    ]


_ENGINES = (
    ("prefill engine", "", "Its name, and the id of its engine process."),
    ("state", "right", "starting, ready or restarting."),
    ("running", "right", "Prompts that it computes now."),
    ("queue", "right", "Prompts that wait there for a place."),
    ("held", "right", "Prompts whose KV blocks it keeps until a replica has copied them."),
    ("restarts", "right", "Times its engine process was replaced after a failure."),
)
_REPLICAS = (
    ("replica", "", "Its name."),
    ("receiving", "right", "Prompts that prefill engines compute for it now."),
    ("received", "right", "Prompts whose KV blocks arrived since its process began."),
    ("failed", "right", "Prompts that did not arrive and were computed by another engine."),
    ("copy rate", "right", "KV that it copied from prefill engines, for each second of copying."),
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
            f"{one['restarts']}",
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
    title = "Engine processes that compute prompts and hand their KV blocks to the replicas."
    tables = table(_ENGINES, rows, "fleet") + table(_REPLICAS, received, "fleet")
    return heading("Prefill engines", title) + tables


def _copy_rate(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3g} GB/s"


_WAITING = "Share of that time in which it waited for other ranks. The rank that waits least is the slowest."
_RANK_COLUMNS = (
    ("rank", "", "Its engine and number; rank 0 is the engine's own process."),
    ("process", "right", "The id of its process."),
    ("memory", "right", "Memory of the process, or what it holds on its GPU."),
    ("steps", "right", "Steps that it played since it started."),
    ("step", "right", "Mean time of a step, with what it waited."),
    ("waiting", "right", _WAITING),
)


def ranks_html(engines: Mapping[str, Sequence[RankState]]) -> str:
    """Empty where every engine is one process."""
    rows = [
        [
            f"<b>{escape(name)}</b> rank {one.rank}",
            f"{one.pid}",
            f"{one.memory_bytes / (1 << 30):.2f} GiB",
            f"{one.steps:,}",
            milliseconds(one.step_s / one.steps if one.steps else None),
            percent(one.wait_s, one.step_s),
        ]
        for name, ranks in engines.items()
        for one in ranks
    ]
    explained = "Processes that share one copy of the model: --tp, --pp, --dp and --ep."
    return heading("Ranks", explained) + table(_RANK_COLUMNS, rows, "fleet") if rows else ""


_REFRESH_S = 1.0
_DECISIONS = 40
_NO_FLEET = (
    "Start the server with --replicas 2 or more to run several engines; the page then shows each of them."
)


def register(shell: Shell, app: FastAPI) -> None:
    @ui.page("/fleet", title="Fleet · Cumulo")
    def fleet(request: Request) -> None:
        with shell.page(request, "/fleet") as visitor:
            if shell.service.fleet is None:
                show(empty("This server has a single engine", _NO_FLEET), "card")
                shell.clock(visitor, _REFRESH_S, _ranks_card(shell))
                return
            page = _FleetPage(shell, visitor, shell.service.fleet)
            shell.clock(visitor, _REFRESH_S, page.draw)


def _ranks_card(shell: Shell) -> Callable[[], None]:
    """Draws the processes of engines that run over several; nothing is shown where none does."""
    card = show("", "card")

    def draw() -> None:
        text = ranks_html(shell.service.rank_states())
        card.set_visibility(bool(text))
        card.set_content(text)

    draw()
    return draw


class _FleetPage:
    def __init__(self, shell: Shell, visitor: Visitor, fleet: Fleet) -> None:
        self._shell, self._visitor, self._fleet = shell, visitor, fleet
        self._tiles = show("", "tiles six")
        if visitor.may_operate:
            with ui.element("div").classes("filters"):
                _button("Add replica", "add", lambda: self._operate("add", "")).tooltip(
                    "Starts one more engine process; it gets requests when its model is loaded."
                )
                _button("Restart all", "restart_alt", lambda: self._operate("restart all", "")).tooltip(
                    "Restarts the replicas one after the other. No request fails."
                )
        self._replicas = show("", "card")
        self._draw_ranks = _ranks_card(shell)
        self._prefill = show("", "card") if fleet.prefill is not None else None
        self._overlap, self._decisions = show("", "card"), show("", "card")
        ui.on("operate", lambda event: self._operate(*map(str, event.args)))

    def draw(self) -> None:
        fleet, now_s = self._fleet, time.perf_counter()
        reports = replica_reports(fleet)
        moved = self._shell.service.metrics.requests_moved
        self._tiles.set_content(tiles_html(reports, fleet.policy, moved))
        self._replicas.set_content(replicas_html(reports, self._visitor.may_operate))
        self._draw_ranks()
        if self._prefill is not None:
            self._prefill.set_content(prefill_html(prefill_reports(fleet), reports))
        self._overlap.set_content(overlap_html(reports, overlaps(fleet)))
        self._decisions.set_content(decisions_html(self._seen(now_s)))

    def _seen(self, now_s: float) -> list[dict[str, Any]]:
        """Decisions about requests that this visitor may see, with the TTFT that came."""
        rows = []
        for request_id, dispatch in reversed(self._fleet.decisions):
            record = self._shell.service.stories.get(request_id)
            if record is None or not self._visitor.may_see(record.caller):
                continue
            measured_s = record.story.ttft_s if record.story is not None else None
            rows.append(
                decision_report(request_id, dispatch, now_s)
                | {"time_s": dispatch.time_s, "measured_s": measured_s, "prompt_tokens": record.prompt_tokens}
            )
        return rows[:_DECISIONS]

    async def _operate(self, what: str, name: str) -> None:
        fleet, patience_s = self._fleet, self._shell.service.options.drain_timeout_s
        later = f"when its requests have finished, after {patience_s:g} s at the latest"
        actions: dict[str, tuple[Callable[[], object], str]] = {
            "drain": (lambda: operations.drain(fleet, name), f"{name} gets no new requests"),
            "undrain": (lambda: operations.undrain(fleet, name), f"{name} gets requests again"),
            "restart": (
                lambda: operations.begin_restart(fleet, name, patience_s),
                f"{name} restarts {later}",
            ),
            "remove": (lambda: operations.begin_removal(fleet, name, patience_s), f"{name} ends {later}"),
            "add": (lambda: operations.add(fleet), "A new replica loads its model"),
            "restart all": (
                lambda: operations.begin_rolling_restart(fleet, patience_s),
                "The replicas restart one after the other",
            ),
        }
        if what not in actions:
            return

        def act() -> str:
            actions[what][0]()
            return actions[what][1]

        await self._shell.operate(self._visitor, act)
        self.draw()


def _button(text: str, icon: str, act: Callable[[], Any]) -> ui.button:
    return ui.button(text, icon=icon, on_click=act).props("flat dense no-caps").classes("quiet")
