"""LedgerLine: a figure as predicted, beside how it turned out. The ledgers of the planner, the engine and the
trainer are made of such lines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedgerLine:
    name: str
    predicted: float
    measured: float | None = None
    how: str = ""  # what the prediction rests on, in words
    unit: str = "bytes"
