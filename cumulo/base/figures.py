"""Figures of runs that are compared, each declared once: a row of the JSON report, a column of the table in a
terminal or on an HTML page, or all of them.

FIGURES = (
    RunFigure("mean JCT", lambda run: run.mean_jct_s, "s", "lower", heading="mean JCT"),
    RunFigure("fairness", lambda run: run.fairness, heading="fairness", shown="{:.3f}"),
)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from cumulo.base.page import html_table
from cumulo.base.quantities import quantity
from cumulo.base.report import Row, grid

Runs = Iterable[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class RunFigure:
    label: str  # of the row; "": the tables alone show it
    pick: Callable[[Any], Any]  # from a run; None: the run has no such figure
    unit: str = ""
    better: Literal["higher", "lower"] = "higher"
    heading: str = ""  # of the column; "": the report alone has it
    shown: str = ""  # how the tables write it, such as "{:.1f} %"; "": in the unit that suits the value
    note: str = ""
    style: Callable[[Any], str | None] | None = None  # red or green, by the value

    def cell(self, run: Any) -> str | Text:
        value = self.pick(run)
        if value is None:
            return "–"
        text = self.shown.format(value) if self.shown else quantity(value, self.unit)
        return Text(text, style) if self.style and (style := self.style(value)) else text


def figure_rows(name: str, run: Any, figures: Sequence[RunFigure]) -> list[Row]:
    prefix = f"{name}: " if name else ""
    return [
        Row(prefix + one.label, value, one.unit, one.better, note=one.note)
        for one in figures
        if one.label and (value := one.pick(run)) is not None
    ]


def figure_table(
    first: str, runs: Runs, figures: Sequence[RunFigure], title: str = "", caption: str = ""
) -> Table:
    """One line for each run; `first`: the heading of their names."""
    return grid(*_columns(first, runs, figures), title, caption=caption)


def figure_html(first: str, runs: Runs, figures: Sequence[RunFigure]) -> str:
    return html_table(*_columns(first, runs, figures))


def _columns(
    first: str, runs: Runs, figures: Sequence[RunFigure]
) -> tuple[list[str], list[tuple[str | Text, ...]]]:
    shown = [one for one in figures if one.heading]
    lines = [(name, *(one.cell(run) for one in shown)) for name, run in runs]
    return [first, *(one.heading for one in shown)], lines
