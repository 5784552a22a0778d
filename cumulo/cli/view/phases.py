"""What `cumulo plan train --phases` prints: every collective of a step, its bytes, its time, and what bounds it."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from cumulo.base.quantities import MIB, column
from cumulo.plan.time.phases import CommunicationPhase


def phase_tables(phases: Sequence[CommunicationPhase]) -> list[Table]:
    """One for each pass, narrow enough for 80 columns."""
    titles = {
        "forward": "Communication of a forward pass",
        "backward": "Communication of a backward pass",
        "step": "Communication once per step",
    }
    present = [when for when in titles if any(phase.when == when for phase in phases)]
    return [_table(titles[when], [phase for phase in phases if phase.when == when]) for when in present]


def _table(title: str, phases: Sequence[CommunicationPhase]) -> Table:
    found = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        padding=(0, 1, 0, 0),
    )
    for heading in ("block", "collective"):
        found.add_column(heading, no_wrap=True)
    for heading in ("ranks", "buffer", "1 call", "compute", "calls"):
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_column("bound by", no_wrap=True)
    sizes, size_unit = column([phase.size_bytes / MIB for phase in phases], "MiB")
    # Both in one unit: whether compute hides a call is read off by comparing them.
    seconds, time_unit = column([each for phase in phases for each in (phase.call_s, phase.compute_s)], "s")
    for number, phase in enumerate(phases):
        found.add_row(
            phase.where,
            f"{phase.axis} {phase.collective.replace('_', '-')}",
            f"{phase.ranks:,}",
            f"{sizes[number]} {size_unit}",
            f"{seconds[2 * number]} {time_unit}",
            f"{seconds[2 * number + 1]} {time_unit}",
            f"{phase.calls:,}",
            phase.bound,
        )
    return found


def phases_as_dicts(phases: Sequence[CommunicationPhase]) -> list[dict[str, Any]]:
    return [
        {
            "pass": phase.when,
            "block": phase.where,
            "axis": phase.axis,
            "collective": phase.collective,
            "ranks": phase.ranks,
            "leaves_domain": phase.leaves_domain,
            "buffer_bytes": phase.size_bytes,
            "sent_bytes": phase.sent_bytes,
            "call_s": phase.call_s,
            "compute_s": phase.compute_s,
            "calls": phase.calls,
            "bound": phase.bound,
        }
        for phase in phases
    ]
