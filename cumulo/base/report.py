"""The form that every reporting verb shares: rows with their bounds, and the machine they were measured on."""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cumulo.base import quantities
from cumulo.base.files import write_text_file

_GAP = 2  # columns between two cells


@dataclass(frozen=True, slots=True)
class ReportTable:
    title: str
    headings: Sequence[str]  # one for each cell of a row; "": none
    right: Sequence[bool]  # which cells line up on the right
    # Cells and a note; a text without a style is never markup.
    rows: Sequence[tuple[Sequence[str | Text], str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = self._wide()
        if Measurement.get(console, options.update(max_width=10_000), wide).maximum <= options.max_width:
            yield wide
            return
        cells = [list(map(_text, row)) for row, _ in self.rows]
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
        parts += [Text(note)] if note else []
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
            result.add_row(*map(_text, cells), Text(note))
        result.show_header = any(self.headings)
        return result


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `must` is the least acceptable value, `aim` the wanted one; None: information only."""

    name: str
    value: float | int | str | bool | None
    unit: str = ""
    better: Literal["higher", "lower"] = "higher"
    must: float | bool | None = None
    aim: float | bool | None = None
    note: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)  # further fields of the JSON row

    @property
    def ok(self) -> bool:
        return self.must is None or self.reaches(self.must)

    def reaches(self, bound: float | bool) -> bool:
        if self.value is None or isinstance(self.value, str) or math.isnan(self.value):
            return False
        return self.value >= bound if self.better == "higher" else self.value <= bound

    def as_dict(self) -> dict[str, Any]:
        fields = {
            "name": self.name, "value": self.value, "unit": self.unit, "better": self.better,
            "must": self.must, "aim": self.aim, "ok": self.ok,
        }  # fmt: skip
        return fields | ({"note": self.note} if self.note else {}) | dict(self.more)


def machine() -> dict[str, Any]:
    """What the figures were taken on. Package versions are read without importing the packages."""
    import platform

    model, features = _cpu()
    return {
        "platform": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": model,
        "cores": available_cores(),
        "cpu_features": features,
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "python": platform.python_version(),
    } | {name: package_version(name) for name in ("cumulo", "torch")}


def available_cores() -> int:
    """Cores this process may use, which in a container is often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_json(path: Path | None, rows: Sequence[Row], **extra: Any) -> None:
    """Write the report to `path` ('-': stdout; None: nowhere)."""
    if path is None:
        return
    report = {"machine": machine(), "rows": [row.as_dict() for row in rows]} | extra
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    write_text_file(path, text, "the report to")


def grid(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    title: str = "",
    left: Sequence[int] = (0,),
    caption: str = "",
) -> Table:
    """A table of figures, with a line for each row. `left`: the columns that line up on the left, counted from
    0."""
    result = Table(
        title=title or None, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False,
        caption=caption or None, caption_justify="left", caption_style="dim", show_header=any(headings),
    )  # fmt: skip
    for place, heading in enumerate(headings):
        result.add_column(
            heading, justify="left" if place in left else "right", no_wrap=place not in left[1:]
        )
    for row in rows:
        result.add_row(*map(_text, row))
    return result


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def table(title: str, rows: Sequence[Row]) -> ReportTable:
    """The rows for a terminal; columns that no row would fill are left out."""
    scales = [_scale(row) for row in rows]
    values = [_shown(row.value, *scale) for row, scale in zip(rows, scales, strict=True)]
    columns: list[tuple[str, bool, Sequence[str | Text]]] = [("", False, [row.name for row in rows])]
    if any(isinstance(row.value, (str, bool)) for row in rows):
        # Findings (words, yes or no) read from the left, figures line up on the right.
        found = [f"{value} {unit}".strip() for value, (_, unit) in zip(values, scales, strict=True)]
        columns.append(("", False, found))
    else:
        columns += [("", True, values), ("", False, [unit for _, unit in scales])]
        for name in ("must", "aim"):
            bounds = [_bound(row, name, *scale) for row, scale in zip(rows, scales, strict=True)]
            columns += [(name, True, bounds)] * any(bounds)
    verdicts = [_verdict(row) for row in rows]
    columns += [("", False, verdicts)] * any(verdicts)
    headings, right, cells = zip(*columns, strict=True)
    lines = zip(zip(*cells, strict=True), (row.note for row in rows), strict=True)
    return ReportTable(title, headings, right, list(lines))


def shown(row: Row) -> str:
    """The row's value with its unit."""
    size, unit = _scale(row)
    return f"{_shown(row.value, size, unit)} {unit}".strip()


def _verdict(row: Row) -> str | Text:
    if row.must is None and row.aim is None:
        return ""
    if not row.ok:
        return Text("failed" if isinstance(row.must, bool) else "misses must", "bold red")
    if row.aim is not None and row.reaches(row.aim):
        return Text("reaches aim", "bold green")
    return Text("ok", "green")


def _scale(row: Row) -> tuple[float, str]:
    """The unit that suits the value and its bounds, which are written in the same one."""
    if row.value is None or isinstance(row.value, (str, bool)):
        return 1.0, row.unit
    return quantities.scale(max(abs(row.value), row.must or 0, row.aim or 0), row.unit)


def _bound(row: Row, name: str, size: float, unit: str) -> str:
    """`name`: must or aim."""
    bound = getattr(row, name)
    if bound is None:
        return ""
    return f"{'≥' if row.better == 'higher' else '≤'} {_shown(bound, size, unit)}"


def _shown(value: float | int | str | bool | None, size: float, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return quantities.number(value if size == 1 else value / size, unit)


# The features that decide which matrix kernels are possible; a full x86 list has over a hundred.
_FEATURES = (
    "asimd", "asimddp", "asimdhp", "fphp", "i8mm", "bf16", "sve", "sve2", "fma", "avx", "avx2", "avx_vnni",
)  # fmt: skip


def _cpu() -> tuple[str, list[str]]:
    """Model name and instruction-set features, from lscpu, which knows ARM's part numbers, or /proc/cpuinfo."""
    import platform
    import subprocess

    text = ""
    with suppress(OSError):
        if path := shutil.which("lscpu"):
            text = subprocess.run(
                [path], capture_output=True, text=True, check=False, env={"LC_ALL": "C"}
            ).stdout
        text = text or Path("/proc/cpuinfo").read_text()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if value := value.strip(" -"):
            fields.setdefault(key.strip().lower(), value)
    features = (fields.get("flags") or fields.get("features") or "").split()
    return (
        fields.get("model name") or platform.processor() or platform.machine(),
        [item for item in features if item in _FEATURES or item.startswith(("avx512", "amx"))],
    )


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def package_version(package: str) -> str | None:
    from importlib import metadata  # every command's help would wait for it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
