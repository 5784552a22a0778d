"""`cumulo diagnose`: what a pasted output says about a network, and what to run next."""

import sys
import time
from pathlib import Path

import typer

from cumulo.base.report import Row
from cumulo.cli.launch import StoreOption
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import marked, note, only_json, out, present, read_stdin, read_text

EXAMPLE = "Example: [bold]cumulo diagnose examples/network/slow_all_reduce.txt[/bold]"


def diagnose(
    file: Path = typer.Argument(
        ...,
        metavar="FILE",
        help="Output of nccl-tests, perftest or a flight recorder, or an NCCL log; '-': standard input.",
    ),
    node: str = typer.Option("", help="Node whose log it is: one with a fault is cordoned or drained."),
    store: StoreOption = None,
    json_file: options.JsonOption = None,
) -> None:
    """Name the likely cause of a slow or stuck collective from the output of the usual tools.

    The answer names the evidence, compares with what such machines reach, and says what to run next. Where the
    text is not enough, it says so.
    """
    from cumulo.diagnose.diagnose import diagnose as judge

    text = read_stdin() if str(file) == "-" else read_text(file)
    found = judge(text)
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
    if node:
        from cumulo.cluster.job_store import JobStore, default_store
        from cumulo.cluster.node_health import NodeHealth, log_signals

        for signal in log_signals(node, text, time.time()):
            act, _ = NodeHealth(JobStore(store or default_store())).tell(signal)
            note(f"{node}: {act}")
