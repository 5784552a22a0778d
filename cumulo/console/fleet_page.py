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
from cumulo.errors import CumuloError
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
                ranks = _RanksCard(shell)
                shell.clock(visitor, _REFRESH_S, ranks.tick)
                return
            page = _FleetPage(shell, visitor, shell.service.fleet)
            shell.clock(visitor, _REFRESH_S, page.tick)


class _RanksCard:
    """The processes of engines that run over several; nothing is shown where none does."""

    def __init__(self, shell: Shell) -> None:
        self._shell, self._card = shell, show("", "card")
        self._card.set_visibility(False)

    async def tick(self) -> None:
        self.draw()

    def draw(self) -> None:
        text = ranks_html(self._shell.service.rank_states())
        self._card.set_visibility(bool(text))
        self._card.set_content(text)


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
        self._ranks = _RanksCard(shell)
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
        self._ranks.draw()
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

    def _operate(self, what: str, name: str) -> None:
        """What a button asks for. Checked here, because a page can be made to send anything."""
        valid = self._shell.sessions.still_valid(self._visitor)
        if not (self._visitor.may_operate and valid):
            ui.notify("Your key may not operate the server.", type="negative", position="top")
            return
        patience_s = self._shell.service.options.drain_timeout_s
        actions: dict[str, tuple[Callable[[], object], str]] = {
            "drain": (lambda: operations.drain(self._fleet, name), f"{name} gets no new requests"),
            "undrain": (lambda: operations.undrain(self._fleet, name), f"{name} gets requests again"),
            "restart": (
                lambda: operations.begin_restart(self._fleet, name, patience_s),
                f"{name} restarts when its requests have finished, after {patience_s:g} s at the latest",
            ),
            "remove": (
                lambda: operations.begin_removal(self._fleet, name, patience_s),
                f"{name} ends when its requests have finished, after {patience_s:g} s at the latest",
            ),
            "add": (lambda: operations.add(self._fleet), "A new replica loads its model"),
            "restart all": (
                lambda: operations.begin_rolling_restart(self._fleet, patience_s),
                "The replicas restart one after the other",
            ),
        }
        if what not in actions:
            return
        act, told = actions[what]
        try:
            act()
            ui.notify(told, position="top")
        except CumuloError as error:
            ui.notify(str(error).capitalize(), type="negative", position="top", multi_line=True)
        self._draw()


def _button(text: str, icon: str, act: Callable[[], None]) -> ui.button:
    return ui.button(text, icon=icon, on_click=act).props("flat dense no-caps").classes("quiet")
