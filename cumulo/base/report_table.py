"""The table of a report: in a narrow terminal, notes and columns that do not fit stand below their rows."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2  # columns between two cells


@dataclass(frozen=True, slots=True)
class ReportTable:
    title: str
    headings: list[str]  # one for each cell of a row; "": none
    right: list[bool]  # which cells line up on the right
    rows: list[tuple[list[str], str]]  # cells and a note, which can have rich's markup

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = self._wide()
        if Measurement.get(console, options.update(max_width=10_000), wide).maximum <= options.max_width:
            yield wide
            return
        cells = [[Text.from_markup(cell) for cell in row] for row, _ in self.rows]
        headings = [Text(one, style="dim") for one in self.headings]
        widths = [max(one.cell_len for one in column) for column in zip(headings, *cells, strict=True)]
        fitting = len(widths)
        while sum(widths[:fitting]) + _GAP * fitting > options.max_width and self.headings[fitting - 1]:
            fitting -= 1
        if not fitting or sum(widths[:fitting]) + _GAP * fitting > options.max_width:
            yield wide  # its cells are folded
            return
        if self.title:
            yield Text(self.title, style="bold")
        if any(self.headings):
            yield self._line(headings[:fitting], widths)
        for row, (_, note) in zip(cells, self.rows, strict=True):
            line, told = self._line(row[:fitting], widths), self._told(row, fitting, note)
            fits = sum(widths[:fitting]) + _GAP * (fitting + 1) + told.cell_len <= options.max_width
            if told and fits and fitting == len(widths):
                line.append(" ").append(told)
                told = Text()
            line.rstrip()
            yield line
            if told:
                yield Padding(told, (0, 0, 0, 4), expand=False)

    def _told(self, row: list[Text], fitting: int, note: str) -> Text:
        """What is below a row: its columns that do not fit, then its note."""
        parts = [
            Text(f"{heading}: ").append(cell)
            for heading, cell in zip(self.headings[fitting:], row[fitting:], strict=True)
            if cell
        ]
        parts += [Text.from_markup(note)] if note else []
        told = Text("; ").join(parts)
        told.style = "dim"
        return told

    def _line(self, cells: list[Text], widths: list[int]) -> Text:
        line = Text(no_wrap=True)
        for cell, width, right in zip(cells, widths, self.right, strict=False):
            space = " " * (width - cell.cell_len)
            line.append(" ").append(space if right else "").append(cell).append(
                "" if right else space
            ).append(" ")
        return line

    def _wide(self) -> Table:
        result = Table(
            title=self.title, title_justify="left", title_style="bold", header_style="dim", box=None
        )
        for heading, right in zip(self.headings, self.right, strict=True):
            result.add_column(
                heading, justify="right" if right else "left", overflow="fold", no_wrap=bool(heading)
            )
        result.add_column("", style="dim", overflow="fold")
        for cells, note in self.rows:
            result.add_row(*cells, note)
        result.show_header = any(self.headings)
        return result
