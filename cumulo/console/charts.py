"""TimeChart: a card of the live page with columns or lines over time, drawn by ECharts in the browser."""

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from nicegui import ui

from cumulo.base import svg
from cumulo.console.shell import show
from cumulo.console.values import heading, short_id
from cumulo.serve.engine_link.messages import BlockMap

_MOST_CELLS = 1536
_FEWEST_COLUMNS, _MOST_COLUMNS = 56, 80
_INKS = 8  # owners' colours; they repeat beyond
_NAMED_OWNERS = 8


def block_chart(blocks: BlockMap, may_see: Callable[[str], bool]) -> str:
    """A cell per block, or per few blocks where there are many; owners that may not be seen keep their names."""
    total = len(blocks.owner_of)
    per_cell = max(1, -(-total // _MOST_CELLS))
    inks = [
        _cell_ink(blocks.owner_of[start : start + per_cell], blocks.cached[start : start + per_cell])
        for start in range(0, total, per_cell)
    ]
    columns = columns_for(len(inks))
    rows = -(-len(inks) // columns)
    cells = "".join(
        f'<rect class="ink-{ink}" x="{start % columns}" y="{start // columns}" width="{length}" height="1"/>'
        for ink, start, length in _runs(inks, columns)
    )
    grid = "".join(f"M{column} 0V{rows}" for column in range(columns + 1))
    grid += "".join(f"M0 {row}H{columns}" for row in range(rows + 1))
    lines = svg.tag("path", d=grid, stroke="var(--card)", stroke_width=".14")
    held = Counter(owner for owner in blocks.owner_of if owner >= 0)
    names = "".join(
        f'<span><i class="ink-{owner % _INKS}"></i>{_owner(blocks.owners[owner], may_see)} ({count:,})</span>'
        for owner, count in held.most_common(_NAMED_OWNERS)
    )
    if len(held) > _NAMED_OWNERS:
        names += f"<span>and {len(held) - _NAMED_OWNERS} more requests</span>"
    free_cached = sum(
        1 for owner, kept in zip(blocks.owner_of, blocks.cached, strict=True) if owner < 0 and kept
    )
    free = total - sum(held.values()) - free_cached
    size = "1 block" if per_cell == 1 else f"{per_cell} blocks"
    return (
        svg.picture(columns, rows, cells, lines, class_="chart") + '<div class="legend">'
        f'<span title="Free blocks that still hold a prefix which a later request can share">'
        f'<i class="ink-cached"></i>cached, reusable ({free_cached:,})</span>'
        f'<span><i class="ink-free"></i>free ({free:,})</span>{names}<span>1 cell = {size}</span></div>'
    )


def columns_for(cells: int) -> int:
    """As many columns as leave the last row full, or nearly so."""
    if cells <= _FEWEST_COLUMNS:
        return max(1, cells)
    return min(range(_MOST_COLUMNS, _FEWEST_COLUMNS - 1, -1), key=lambda columns: -cells % columns)


def _cell_ink(owners: Sequence[int], cached: bytes) -> str:
    """The owner if there is one, else whether something cached is there."""
    owner = max(owners)
    return str(owner % _INKS) if owner >= 0 else "cached" if any(cached) else "free"


def _runs(inks: Sequence[str], columns: int) -> list[tuple[str, int, int]]:
    """Equal cells next to each other in a row are one rectangle: an idle cache is a short drawing."""
    runs: list[tuple[str, int, int]] = []
    for index, ink in enumerate(inks):
        if runs and index % columns and ink == runs[-1][0]:
            runs[-1] = ink, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((ink, index, 1))
    return runs


def _owner(request_id: str, may_see: Callable[[str], bool]) -> str:
    if not may_see(request_id):
        return "another key"
    return f'<a href="/requests/{escape(request_id)}">{escape(short_id(request_id, 8))}</a>'


# Colours by what is drawn; style.css has the same for maps and legends of other pages.
INKS = {
    "decode": "var(--accent)", "prefill": "#c08a3e", "2": "#5b7fb8", "3": "#a8648c", "4": "#7f9a44", "5": "#b9694f",
    "6": "#7b72b5", "7": "#4f8fa3", "0": "#3d8f86", "1": "#c08a3e",
}  # fmt: skip
_TEXT = {"color": "var(--soft)", "fontSize": 11, "fontFamily": "system-ui, sans-serif"}
_NOTHING = {"text": "nothing in this time", "left": "center", "top": "40%", "textStyle": _TEXT}
_ENDS = {**_TEXT, "interval": 0, "alignMinLabel": "left", "alignMaxLabel": "right"}


class TimeChart:
    """`floor`: the scale never ends below this, so that small values look small; `most`: where it always ends."""

    def __init__(
        self, title: str, explained: str, unit: str, floor: float, most: float | None = None
    ) -> None:
        self._unit, self._floor, self._most = unit, floor, most
        with ui.element("div").classes("card"):
            show(heading(title, explained))
            self._chart = ui.echart({}, renderer="svg").classes("time-chart")
            self.below = show("")

    def columns(
        self, values: Sequence[float], ends: tuple[str, str], ink: str, tips: Sequence[str] = ()
    ) -> None:
        """One column per value, oldest left; `ends` are the labels below the left and the right end."""
        bars = {"type": "bar", "data": list(values), "barCategoryGap": "10%", "color": INKS[ink]}
        self._show(columns_option(self._unit, [bars], ends, self._scale(values), tips))

    def lines(self, lines: Sequence[tuple[str, str, Sequence[float | None]]], ends: tuple[str, str]) -> None:
        """Lines of one scale, each with its name, its ink and its values; None leaves a gap."""
        series = [
            {"type": "line", "name": name, "data": list(points), "showSymbol": False, "color": INKS[ink]}
            for name, ink, points in lines
        ]
        known = [value for _, _, points in lines for value in points if value is not None]
        self._show(columns_option(self._unit, series, ends, self._scale(known), (), legend=True))

    def _scale(self, values: Sequence[float]) -> float | None:
        """Where the scale ends; None: as ECharts finds fit."""
        return self._most or (self._floor if max(values, default=0.0) < self._floor else None)

    def _show(self, option: dict[str, Any]) -> None:
        self._chart.options.clear()
        self._chart.options.update(option)
        self._chart.update()


def columns_option(
    unit: str,
    series: list[dict[str, Any]],
    ends: tuple[str, str],
    most: float | None,
    tips: Sequence[str],
    legend: bool = False,
) -> dict[str, Any]:
    """ECharts' option. `tips`: what the pointer tells at each column, instead of its value."""
    count = max((len(one["data"]) for one in series), default=0)
    names = list(tips) or [""] * count
    if count and not tips:
        names[0], names[-1] = ends
    nothing = not any(value for one in series for value in one["data"])
    return {
        "animation": False,
        "grid": {"left": 46, "right": 8, "top": 10, "bottom": 46 if legend else 22},
        "title": _NOTHING if nothing else {},
        "tooltip": {"trigger": "axis", "confine": True},
        "legend": {"show": legend, "bottom": 0, "left": 0, "textStyle": _TEXT, "icon": "roundRect"},
        "xAxis": {
            "type": "category", "data": names, "axisTick": {"show": False},
            "axisLabel": {**_ENDS, "show": not tips},
            "axisLine": {"lineStyle": {"color": "var(--line)"}},
        },
        "yAxis": {
            "type": "value", "name": unit, "nameTextStyle": {"color": "transparent"}, "min": 0, "max": most,
            "splitNumber": 3, "interval": 50 if most == 100 else None,
            "minInterval": 1 if unit == "sequences" else 0, "axisLabel": _TEXT,
            "splitLine": {"show": True, "lineStyle": {"color": "var(--line)"}},
        },
        "series": [{**one, "emphasis": {"disabled": True}} for one in series],
    }  # fmt: skip
