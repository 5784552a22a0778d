"""The memory ledger: what every part was predicted to need, next to what it took. `plan_memory` fills it in."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cumulo.base.quantities import GIB, LedgerLine

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Ledger:
    rows: tuple[LedgerLine, ...]
    available_bytes: int  # when the plan was made

    @property
    def predicted_bytes(self) -> int:
        return int(sum(row.predicted for row in self.rows))

    @property
    def measured_bytes(self) -> int | None:
        """The measured rows' sum, once there is one."""
        measured = [row.measured for row in self.rows if row.measured is not None]
        return int(sum(measured)) if measured else None

    def __getitem__(self, name: str) -> LedgerLine:
        return next(row for row in self.rows if row.name == name)

    def measured(self, measured_bytes: Mapping[str, int | None]) -> "Ledger":
        """A copy with measurements entered by row name; None leaves a row as it is."""
        unknown = set(measured_bytes) - {row.name for row in self.rows}
        if unknown:
            raise ValueError(f"the ledger has no row {', '.join(sorted(unknown))}")
        rows = (
            dataclasses.replace(row, measured=measured_bytes[row.name])
            if measured_bytes.get(row.name) is not None
            else row
            for row in self.rows
        )
        return dataclasses.replace(self, rows=tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        return {
            "available_bytes": self.available_bytes,
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "rows": [
                {
                    "name": row.name,
                    "predicted_bytes": row.predicted,
                    "measured_bytes": row.measured,
                    "how": row.how,
                }
                for row in self.rows
            ],
        }

    def __rich__(self) -> "Table":
        return ledger_table(self)


def ledger_table(ledger: Ledger) -> "Table":
    """The ledger for a terminal: predicted beside measured, and their ratio."""
    from rich.table import Table

    table = Table(title="Memory ledger", title_justify="left")
    table.add_column("part")
    for column in ("predicted", "measured", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("how", style="dim")
    for row in ledger.rows:
        table.add_row(row.name, *_cells(row.predicted, row.measured), row.how)
    table.add_section()
    compared = sum(row.predicted for row in ledger.rows if row.measured is not None)
    ratio = _cells(compared, ledger.measured_bytes)[2]
    measured = _cells(compared, ledger.measured_bytes)[1]
    of = f"of {format_bytes(ledger.available_bytes)} available"
    table.add_row("total", format_bytes(ledger.predicted_bytes), measured, ratio, of, style="bold")
    return table


def format_bytes(count: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _cells(predicted: float, measured: float | None) -> tuple[str, str, str]:
    if measured is None:
        return format_bytes(predicted), "", ""
    ratio = f"{measured / predicted:.2f}" if predicted else ""
    return format_bytes(predicted), format_bytes(measured), ratio
