"""The fleet page: replicas with their load and caches, recent routing decisions with their reasons, and buttons to
drain and restart replicas."""

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from nicegui import ui
from starlette.requests import Request

from cumulo.console.fleet_view import (
    decisions_html,
    overlap_html,
    prefill_html,
    ranks_html,
    replicas_html,
    tiles_html,
)
from cumulo.console.front import Visitor
from cumulo.console.shell import Shell, empty, show
from cumulo.serve.observe.fleet_report import decision_report, overlaps, prefill_reports, replica_reports
from cumulo.serve.replicas import operations
from cumulo.serve.replicas.fleet import Fleet

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
                draw_ranks = _ranks_card(shell)

                async def tick() -> None:
                    draw_ranks()

                shell.clock(visitor, _REFRESH_S, tick)
                return
            page = _FleetPage(shell, visitor, shell.service.fleet)
            shell.clock(visitor, _REFRESH_S, page.tick)


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

    async def tick(self) -> None:
        self._draw()

    def _draw(self) -> None:
        fleet, now_s = self._fleet, time.perf_counter()
        reports = replica_reports(fleet)
        metrics = self._shell.service.fleet_metrics
        self._tiles.set_content(tiles_html(reports, fleet.policy, metrics.moved if metrics else 0))
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
        self._draw()


def _button(text: str, icon: str, act: Callable[[], Any]) -> ui.button:
    return ui.button(text, icon=icon, on_click=act).props("flat dense no-caps").classes("quiet")
