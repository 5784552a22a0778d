"""`cumulo plan validate serving`: published serving throughputs, predicted."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def validate_serving(console: "Console", left_out: bool, worst: int, json: Path | None) -> None:
    """By model and by device; `left_out`: each under constants that never saw it."""
    from rich.table import Table

    from cumulo.base import report
    from cumulo.plan.evidence.serving import saturated_tokens_per_s, served_rows
    from cumulo.plan.evidence.validate import quantile
    from cumulo.plan.serve.published_engine import constants

    title = "Published throughputs, each group left out" if left_out else "Published throughputs, as fitted"
    table = Table(title=title, box=None)
    table.add_column("", no_wrap=True)
    for heading in ("rows", "median", "p90", "bias"):
        table.add_column(heading, justify="right")
    found: list[report.Row] = []
    largest: list[tuple[float, str]] = []
    for key in ("model", "device"):
        errors: dict[str, list[float]] = {}
        for row in served_rows():
            name = str(getattr(row, key))
            given = constants(f"{key} {name}" if left_out else "")
            error = saturated_tokens_per_s(row, given) / row.tokens_per_s - 1
            errors.setdefault(name, []).append(error)
            largest.append((error, row.name))
        errors[f"all, by {key}"] = [error for some in list(errors.values()) for error in some]
        for name, some in errors.items():
            sizes, whole = sorted(map(abs, some)), name.startswith("all")
            median, p90, bias = quantile(sizes, 0.5), quantile(sizes, 0.9), quantile(sorted(some), 0.5)
            table.add_row(name, str(len(some)), f"{median:.1%}", f"{p90:.1%}", f"{bias:+.1%}")
            bars = (0.12, 0.25) if left_out and whole else (None, None)
            found.append(report.Row(f"{name}: median error", median, "share", "lower", bars[0]))
            found.append(report.Row(f"{name}: 90th percentile", p90, "share", "lower", bars[1]))
        table.add_section()
    console.print(table)
    for error, name in sorted(set(largest), key=lambda each: -abs(each[0]))[:worst]:
        console.print(f"{error:+7.1%}  {name}", highlight=False)
    report.write_json(json, found)
