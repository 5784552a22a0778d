"""Where the verbs write: answers on stdout, everything else (status, progress, errors) on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from cumulo.engine.config import EngineConfig
    from cumulo.engine.llm import LLM

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_error(error: Exception) -> None:
    """One clear line, never wrapped or marked up: it may hold file names and brackets."""
    message = " ".join(str(error).split())
    err.print("[bold red]error:[/bold red]", end=" ")
    err.print(message, markup=False, soft_wrap=True)


def note(message: str) -> None:
    """A quiet remark on stderr."""
    err.print(message, style="dim", markup=False, soft_wrap=True)


def read_stdin() -> str:
    """All of standard input as text; bytes that are not UTF-8 are the user's to fix, so say where."""
    return decode(sys.stdin.buffer.read(), "standard input")


def read_text(path: Path) -> str:
    from cumulo.errors import InvalidRequest

    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error


def decode(data: bytes, source: str) -> str:
    from cumulo.errors import InvalidRequest

    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{source} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start}; "
            "convert it, for example with `iconv -t utf-8`"
        ) from error


@contextmanager
def loading(lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress callback `(stage, done, total)` drawn as one bar on stderr that vanishes at the end.

    With `lines`, where stderr is no terminal, each new stage is a line: for what takes minutes.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("[dim]{task.description}"))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        last = ""

        def show(stage: str, done: int, total: int) -> None:
            nonlocal last
            if lines and not err.is_terminal and stage != last:
                note(stage)
            last = stage
            progress.update(task, description=stage, completed=done, total=total or None)

        yield show


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr whose words can be changed."""
    with err.status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")


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
