"""The table of a report in a terminal: notes in a last column; those that are too long for it, below their rows."""

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
        if sum(widths) + _GAP * len(widths) > options.max_width:
            yield wide  # its cells are folded
            return
        yield Text(self.title, style="bold")
        if any(self.headings):
            yield self._line(headings, widths)
        for row, (_, note) in zip(cells, self.rows, strict=True):
            line, told = self._line(row, widths), Text.from_markup(note, style="dim")
            fits = sum(widths) + _GAP * (len(widths) + 1) + told.cell_len <= options.max_width
            if note and fits:
                line.append(" ").append(told)
            line.rstrip()
            yield line
            if note and not fits:
                yield Padding(told, (0, 0, 0, 4), expand=False)

    def _line(self, cells: list[Text], widths: list[int]) -> Text:
        line = Text(no_wrap=True)
        for cell, width, right in zip(cells, widths, self.right, strict=True):
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
