"""Before and after a measurement of `cumulo bench`: is the machine idle, and the rows as a table and as JSON."""

import typer

from cumulo.cli.shared import options


def warn_if_busy() -> None:
    """Other programs make every figure worse, and not every side's alike: say so before measuring."""
    import os

    from cumulo.base.report import available_cores
    from cumulo.cli.shared.terminal import note

    load = os.getloadavg()[0]
    if load > 0.5 * available_cores():
        note(
            f"the machine is busy (load {load:.1f}): the results will be wrong; measure again when it is idle"
        )


def finish(title: str, rows: list, json_file: options.JsonOption) -> None:  # type: ignore[type-arg]
    """Show and write the rows; a missed `must` is exit code 1, so that scripts notice."""
    from cumulo.base import report
    from cumulo.cli.shared.terminal import err, out

    facts = report.machine()
    console = err if str(json_file) == "-" else out
    console.print(report.table(title, rows))
    console.print(f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}", style="dim")
    report.write_json(json_file, rows)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)
