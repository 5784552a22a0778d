"""`cumulo diagnose`: what a pasted output says about a network, and what to run next."""

import sys
from pathlib import Path

import typer

from cumulo.base.report import Row
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import marked, only_json, out, present, read_stdin, read_text

EXAMPLE = "Example: [bold]cumulo diagnose examples/network/slow_all_reduce.txt[/bold]"


def diagnose(
    file: Path = typer.Argument(
        ...,
        metavar="FILE",
        help="Output of nccl-tests, perftest or a flight recorder, or an NCCL log; '-': standard input.",
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Name the likely cause of a slow or stuck collective from the output of the usual tools.

    The answer names the evidence, compares with what such machines reach, and says what to run next. Where the
    text is not enough, it says so.
    """
    from cumulo.diagnose.diagnose import diagnose as judge

    found = judge(read_stdin() if str(file) == "-" else read_text(file))
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
        for heading, lines in (("Evidence", found.evidence), ("Next", found.next_steps)):
            if lines:
                out.print(f"\n{heading}", style="dim")
            for line in lines:
                out.print(f"  {line}", soft_wrap=not sys.stdout.isatty())
