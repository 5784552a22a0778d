"""The report of `cumulo bench quality`: a table with a line per variant, a plot, JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cumulo.base import report
from cumulo.base.chart import chart_file
from cumulo.base.files import write_text_file
from cumulo.base.quantities import number, quantity
from cumulo.cli.shared.terminal import err, note, out

if TYPE_CHECKING:
    from cumulo.bench.quantised import Figures


def print_figures(found: "Sequence[Figures]", plot: Path | None, json_file: Path | None) -> None:
    """Exit code 1 where a calibrated method is worse than rounding to nearest."""
    import typer
    from rich.table import Table

    from cumulo.bench.quantised import chart, rows

    table = Table(title="quality against 16 bits", title_justify="left", header_style="dim", box=None)
    table.add_column("")
    for name in ("perplexity", "mean KL, nats", "top-1", "weights", "decode", "over 16 bits"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            one.name,
            number(one.perplexity),
            number(one.kl),
            f"{100 * one.agreement:.1f}%",
            quantity(one.weight_bytes, "B"),
            quantity(one.decode_tok_s, "tok/s"),
            f"{one.relative_speed:.2f}x",
        )
    console = err if str(json_file) == "-" else out
    console.print(table)
    result = rows(found)
    failed = [row for row in result if not row.ok]
    for row in failed:
        note(f"{row.name}: {row.value:.2f}, must be at most {row.must:g}")
    if plot is not None:
        write_text_file(plot, chart_file(chart(found)))
    report.write_json(json_file, result)
    if failed:
        raise typer.Exit(1)
