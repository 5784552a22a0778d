"""`cumulo diagnose`: what a pasted output says about a network, and what to run next."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cumulo.base import report
from cumulo.base.report import Row
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import dim, marked, only_json, out, present, read_stdin, read_text, working
from cumulo.errors import InvalidRequest

if TYPE_CHECKING:
    from cumulo.diagnose.diagnosis import Diagnosis

EXAMPLE = "Example: [bold]cumulo diagnose examples/network/slow_all_reduce.txt[/bold]"


def diagnose(
    file: Path | None = typer.Argument(
        None,
        metavar="FILE",
        help="Output of nccl-tests, perftest or a flight recorder, or an NCCL log; '-': standard input.",
    ),
    live: bool = typer.Option(
        False,
        "--live",
        help="Measure here: all_reduce_perf where it is installed, otherwise processes over shared memory.",
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Name the likely cause of a slow or stuck collective from the output of the usual tools.

    The answer names the evidence, compares with what such machines reach, and says what to run next. Where the
    text is not enough, it says so.
    """
    from cumulo.diagnose.diagnose import diagnose as judge

    if live:
        _live(json_file)
        return
    if file is None:
        raise InvalidRequest("name a file with the output, or - for standard input; --live measures here")
    _show(judge(read_stdin() if str(file) == "-" else read_text(file)), json_file)


def _show(found: "Diagnosis", json_file: Path | None) -> None:
    rows = [
        Row("cause", found.cause, note=found.sentence),
        Row("confidence", found.confidence),
        Row("ranks", found.ranks),
        Row("share of the expected bus bandwidth", found.share),
    ]
    title = marked(
        "[bold]{}[/bold] (confidence: {})", found.title[0].upper() + found.title[1:], found.confidence
    )
    more = {"cause": found.cause, "evidence": found.evidence, "next": found.next_steps}
    present(rows, json_file, title, found.sentence, **more)
    if not only_json(json_file):
        _list("Evidence", found.evidence)
        _list("Next", found.next_steps)


def _list(title: str, lines: "tuple[str, ...]") -> None:
    if lines:
        out.print(f"\n{title}", style="dim")
        for line in lines:
            out.print(f"  {line}", soft_wrap=not sys.stdout.isatty())


def _live(json_file: Path | None) -> None:
    """GPUs where nccl-tests is installed; else what processes reach over shared memory, next to gloo."""
    import subprocess

    if path := shutil.which("all_reduce_perf"):
        with working("running all_reduce_perf"):
            done = subprocess.run(
                [path, "-b", "1M", "-e", "1G", "-f", "4", "-g", _gpus()],
                capture_output=True,
                text=True,
                check=False,
            )
        from cumulo.diagnose.diagnose import diagnose as judge

        _show(judge(done.stdout + done.stderr), json_file)
        return
    from cumulo.bench.collectives import measure

    with working("measuring") as tell:
        rows = measure(2, (1 << 20, 16 << 20), ("ring",), "shm", 5, None, tell)
    missing = "Install nccl-tests to measure GPUs and network cards: there is no all_reduce_perf here."
    title = "All-reduce of two processes on this machine"
    present(rows, json_file, report.table(title, rows), dim(missing))


def _gpus() -> str:
    from cumulo.base.machine import gpus_here

    return str(max(1, len(gpus_here())))
