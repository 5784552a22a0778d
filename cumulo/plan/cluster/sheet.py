"""Sheet: numbers that know where they come from. The cluster planner fills one; its report shows the formulas.

    sheet = Sheet()
    sheet.given("nodes", 12500, "", "nodes", "--gpus")
    sheet.work_out("mttf_h", "24 / (nodes * failures_per_node_day)", "h", "mean time to failure")
    sheet.inserted("mttf_h")    # "24 / (12,500 × 0.00379)"

A formula is evaluated as it is shown, from figures that are in the sheet already, so that what a reader can check
is what was computed.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cumulo.base import quantities
from cumulo.base.strict import package_yaml

_OPERATORS: dict[type[ast.operator], tuple[Callable[[float, float], float], str]] = {
    ast.Add: (operator.add, "+"),
    ast.Sub: (operator.sub, "−"),
    ast.Mult: (operator.mul, "×"),
    ast.Div: (operator.truediv, "/"),
    ast.Pow: (operator.pow, "^"),
}


def _exp(power: float) -> float:
    """Without bound: what a formula divides by it comes to nothing."""
    return math.exp(power) if power < 700 else math.inf


def _log(ratio: float) -> float:
    """A range ends at a ten-thousandth, so that what follows from it stays finite."""
    return math.log(max(ratio, 1e-4))


_FUNCTIONS: dict[str, Callable[..., float]] = {
    "sqrt": math.sqrt,
    "exp": _exp,
    "log": _log,
    "ceil": math.ceil,
    "floor": math.floor,
    "log2": math.log2,
    "min": min,
    "max": max,
}
_BINDING = {"+": 1, "−": 1, "×": 2, "/": 2, "^": 3}
# A figure, its low and its high end, each with the opposite end: what grows as another figure falls.
_ENDS = (("", ""), ("_low", "_high"), ("_high", "_low"))


def groups() -> Any:
    """The content of `cluster_sheet.yaml`: figures by group."""
    return package_yaml("cumulo.plan", "data/cluster_sheet.yaml")


@dataclass(frozen=True, slots=True)
class Figure:
    name: str  # as formulas call it
    label: str  # as people call it
    value: float
    unit: str
    formula: str  # empty: given, measured or simulated
    inputs: tuple[str, ...]  # figures that the formula names
    source: str  # of a given number, or of the formula
    # Why it goes beyond what was published; also where it follows from figures that do.
    extrapolated: tuple[str, ...] = ()


class Sheet:
    """Figures by name, in the order they were made."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def fill(self, group: str, given: Mapping[str, float] | None = None, **words: str) -> None:
        """Adds the figures of a group of `cluster_sheet.yaml`: those with a formula are worked out, and `given` has
        the values of the others. `words` take the places of {names} in the group's texts."""
        for pattern, entry in groups()[group].items():
            for end, other in _ENDS if entry.get("ends") else _ENDS[:1]:
                unit, label, formula, source = (
                    entry.get(part, "").format(**words, end=end, other=other)
                    for part in ("unit", "label", "formula", "source")
                )
                name = pattern.format(**words) + end
                if end:
                    label += f", {end[1:]} end"
                if formula:
                    self.work_out(name, formula, unit, label, source)
                else:
                    amount = entry["value"] if "value" in entry else (given or {})[name]
                    self.given(name, amount, unit, label, source)
                if why := self._beyond(entry):
                    figure = self.figures[name]
                    told = tuple(dict.fromkeys((*figure.extrapolated, *why)))
                    self.figures[name] = replace(figure, extrapolated=told)

    def _beyond(self, entry: Mapping[str, Any]) -> tuple[str, ...]:
        """`beyond` is the figure of the largest published size, `like` one that has the same reasons."""
        limit = self.figures.get(entry.get("beyond", ""))
        if limit is not None and self["job_gpus"] > limit.value:
            return (f"{limit.label}: {value(limit)}",)
        return self.figures[entry["like"]].extrapolated if "like" in entry else ()

    def given(self, name: str, value: float, unit: str, label: str, source: str) -> float:
        self._keep(Figure(name, label, value, unit, "", (), source))
        return value

    def work_out(self, name: str, formula: str, unit: str, label: str, source: str = "") -> float:
        tree = ast.parse(formula, mode="eval").body
        inputs = dict.fromkeys(
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in _FUNCTIONS
        )
        value = self._value(tree)
        why = dict.fromkeys(reason for one in inputs for reason in self.figures[one].extrapolated)
        self._keep(Figure(name, label, value, unit, formula, tuple(inputs), source, tuple(why)))
        return value

    def shown(self, name: str) -> str:
        """The formula as people write it."""
        return _written(ast.parse(self.figures[name].formula, mode="eval").body, lambda name: name)

    def inserted(self, name: str) -> str:
        """The formula with numbers in place of names, each in the unit that the formula reckons with."""
        tree = ast.parse(self.figures[name].formula, mode="eval").body
        return _written(tree, lambda name: in_own_unit(self.figures[name]))

    def _keep(self, figure: Figure) -> None:
        if figure.name in self.figures:
            raise ValueError(f"the sheet has a figure {figure.name!r} already")
        self.figures[figure.name] = figure

    def _value(self, node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.Name(id=name):
                return self.figures[name].value
            case ast.BinOp(left, op, right):
                return _OPERATORS[type(op)][0](self._value(left), self._value(right))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return _FUNCTIONS[name](*map(self._value, arguments))
        raise ValueError(f"a formula cannot contain {ast.unparse(node)!r}")


def _written(node: ast.expr, name_of: Callable[[str], str]) -> str:
    match node:
        case ast.Constant(value=int() | float() as value):
            return quantities.number(value)
        case ast.Name(id=name):
            return name_of(name)
        case ast.BinOp(left, op, right):
            sign = _OPERATORS[type(op)][1]
            before, after = (_written(side, name_of) for side in (left, right))
            if _strength(left) < _BINDING[sign]:
                before = f"({before})"
            if _strength(right) <= _BINDING[sign] and not (
                sign in "+×" and _strength(right) == _BINDING[sign]
            ):
                after = f"({after})"
            return f"{before} {sign} {after}"
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return f"{name}({', '.join(_written(argument, name_of) for argument in arguments)})"
    raise ValueError(f"a formula cannot contain {ast.unparse(node)!r}")


def _strength(node: ast.expr) -> int:
    return _BINDING[_OPERATORS[type(node.op)][1]] if isinstance(node, ast.BinOp) else 9


_ROUNDED = ("s", "h", "W", "B", "B/s", "tokens/s", "USD", "GB/s", "MWh", "days")


def value(figure: Figure) -> str:
    """A figure as people read it, with its unit: percent, MW, TB, minutes."""
    amount, unit = figure.value, figure.unit.replace("bytes", "B")
    if unit == "share":
        return f"{quantities.number(100.0 * amount, '%')}%"
    if amount == int(amount) and abs(amount) < 1e6 and unit not in _ROUNDED:
        return f"{int(amount):,} {unit}".strip()  # counts are exact
    return quantities.quantity(*_decimal(float(amount), unit))


def in_own_unit(figure: Figure) -> str:
    """A figure in the unit that formulas reckon with."""
    amount, unit = figure.value, "" if figure.unit == "share" else figure.unit
    if amount == int(amount) and abs(amount) < 1e6 and unit not in _ROUNDED:
        return f"{int(amount):,} {unit}".strip()
    return f"{quantities.number(float(amount))} {unit}".strip()


def _decimal(amount: float, unit: str) -> tuple[float, str]:
    """Storage and networks are sold in powers of ten."""
    return (amount / 1e9, f"G{unit}") if unit in ("B", "B/s") else (amount, unit)


def value_range(sheet: Sheet, name: str) -> str:
    """Where nine of ten results are expected; empty: the figure has no range of its own."""
    low, high = sheet.figures.get(f"{name}_low"), sheet.figures.get(f"{name}_high")
    if low is None or high is None or low.value == high.value:
        return ""
    unit = low.unit.replace("bytes", "B")
    if unit == "share":
        return quantities.between(100 * low.value, 100 * high.value, "%")
    high_value, shown_unit = _decimal(high.value, unit)
    return quantities.between(_decimal(low.value, unit)[0], high_value, shown_unit)
