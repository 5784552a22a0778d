"""Where the verbs write: answers on stdout, everything else (status, progress, errors) on stderr."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from cumulo.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.progress import TextColumn

    from cumulo.base.report import Row
    from cumulo.engine.config import EngineConfig
    from cumulo.engine.llm import LLM

# What is printed may hold names and texts of users, which are never markup: `[1]` and `:1234:` stay as they are.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def marked(template: str, *values: object) -> Text:
    """A template with rich's markup, whose {} are filled with values that are none."""
    return Text.from_markup(template.format(*(escape(str(value)) for value in values)), emoji=False)


def only_json(json_file: Path | None) -> bool:
    """Whether the report goes to stdout as JSON, where a table would spoil it."""
    return str(json_file) == "-"


def present(rows: "Sequence[Row]", json_file: Path | None, *shown: Any, **more: Any) -> None:
    """What most verbs end with: the report as JSON where --json asks for it, and what people read on stdout."""
    from cumulo.base import report

    report.write_json(json_file, rows, **more)
    if not only_json(json_file):
        for one in shown:
            out.print(one, soft_wrap=isinstance(one, Text) and one.no_wrap)


def show_report(title: str, rows: "Sequence[Row]", json_file: Path | None, **more: Any) -> None:
    """The rows as a table and, where --json asks for it, as JSON."""
    from cumulo.base import report

    present(rows, json_file, report.table(title, rows), **more)


def dim(text: str) -> Text:
    return Text(text, "dim")


def unwrapped(text: str, style: str = "") -> Text:
    """For `present`: lines that stay whole, however long they are."""
    return Text(text, style, no_wrap=True)


def save(path: Path | None, text: Callable[[], str], what: str) -> None:
    """Write a file that an option asked for, and say so."""
    from cumulo.base.files import write_text_file

    if path is not None:
        write_text_file(path, text(), f"the {what} to")
        note(f"{what} written to {path}")


def print_error(error: Exception) -> None:
    """One clear line, never wrapped or marked up: it may hold file names and brackets."""
    message = " ".join(str(error).split())
    err.print(marked("[bold red]error:[/bold red]"), end=" ")
    err.print(message, soft_wrap=True)


def note(message: str) -> None:
    """A quiet remark on stderr."""
    err.print(message, style="dim", soft_wrap=True)


def read_stdin() -> str:
    """All of standard input as text; bytes that are not UTF-8 are the user's to fix, so say where."""
    return decode(sys.stdin.buffer.read(), "standard input")


def read_text(path: Path) -> str:
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error


def decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{source} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start}; "
            "convert it, for example with `iconv -t utf-8`"
        ) from error


def text_column(template: str, style: str = "none") -> "TextColumn":
    """A column of a progress display whose text is never markup."""
    from rich.progress import TextColumn

    return TextColumn(template, style, markup=False)


class WordWrap:
    """Text that comes in pieces, broken between words at a width; the last word waits for its end."""

    def __init__(self, width: float) -> None:
        self._width, self._column, self._word = width, 0, ""

    def add(self, text: str) -> str:
        """What can be shown now."""
        *whole, self._word = re.split(r"(?<=[\s\u2e80-\uffff])", self._word + text)  # Chinese has no spaces
        return "".join(map(self._placed, whole))

    def end(self) -> str:
        return self._placed(self._word)

    def _placed(self, word: str) -> str:
        fits = not self._column or self._column + cell_len(word.rstrip()) <= self._width
        self._column = (self._column if fits else 0) + cell_len(word)
        if word.endswith("\n") or (self._column > self._width and word.endswith(" ")):
            word, self._column = word[:-1] + "\n", 0
        return word if fits else f"\n{word}"


@contextmanager
def loading(lines: bool = False) -> Iterator[Callable[..., None]]:
    """A progress callback `(stage, done, total)` drawn as one bar on stderr that vanishes at the end.

    With `lines`, where stderr is no terminal, each new stage is a line: for what takes minutes.
    """
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), TimeElapsedColumn(), text_column("{task.description}", "dim"))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        last = ""

        def show(stage: str, done: int = 0, total: int = 0) -> None:
            nonlocal last
            if lines and not err.is_terminal and stage != last:
                note(stage)
            last = stage
            progress.update(task, description=stage, completed=done, total=total or None)

        yield show


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr whose words can be changed."""
    with err.status(Text(what)) as status:
        yield lambda text: status.update(Text(f"{what}: {text}"))


_ADAPTER = "lora"  # what the only adapter of a command is called in stories


def load_llm(model: str | None, config: "EngineConfig | None", lora: Path | None = None) -> "LLM":
    """Import the engine (seconds, because of torch) and load the model, visibly. `lora`: a folder with an adapter
    that all its requests use."""
    with working("starting"):
        from cumulo import LLM

    with loading() as progress:
        llm = LLM(
            model, config=config, progress=progress, lora={_ADAPTER: lora} if lora is not None else None
        )
    llm.default_adapter = _ADAPTER if lora is not None else None
    return llm


def warn_if_busy() -> None:
    """Other programs make every figure worse, and not every side's alike: say so before measuring."""
    from cumulo.base.report import available_cores

    load = os.getloadavg()[0]
    if load > 0.5 * available_cores():
        note(
            f"the machine is busy (load {load:.1f}): the results will be wrong; measure again when it is idle"
        )


def finish(title: str, rows: "Sequence[Row]", json_file: Path | None) -> None:
    """Show and write the rows; a missed `must` is exit code 1, so that scripts notice."""
    from cumulo.base import report

    facts = report.machine()
    console = err if only_json(json_file) else out
    console.print(report.table(title, rows))
    console.print(f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}", style="dim")
    report.write_json(json_file, rows)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)
