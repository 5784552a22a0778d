"""Numbers that know where they come from: cumulo/plan/cluster/sheet.py."""

import math

import pytest

from cumulo.plan.cluster.sheet import Sheet


def sheet_of(**values):
    sheet = Sheet()
    for name, value in values.items():
        sheet.given(name, value, "", name, "test")
    return sheet


def test_a_formula_is_computed_as_it_is_shown():
    sheet = sheet_of(nodes=12288, rate=0.00379)
    sheet.work_out("mttf_h", "24 / (nodes * rate)", "h", "mean time to failure")
    assert sheet["mttf_h"] == pytest.approx(24 / (12288 * 0.00379))
    assert sheet.shown("mttf_h") == "24 / (nodes × rate)"
    assert sheet.inserted("mttf_h") == "24 / (12,288 × 0.00379)"
    assert sheet.figures["mttf_h"].inputs == ("nodes", "rate")


@pytest.mark.parametrize(
    "formula",
    ["a - (b - c)", "a / (b * c)", "a / b / c", "(a + b) * c", "a - b * c", "a ** b / c", "a / (b / c)"],
)
def test_brackets_are_kept_where_they_matter(formula):
    sheet = sheet_of(a=7, b=3, c=2)
    sheet.work_out("x", formula, "", "x")
    shown = sheet.shown("x")
    for sign, python in (("×", "*"), ("−", "-"), ("^", "**")):
        shown = shown.replace(sign, python)
    assert eval(shown, {"a": 7, "b": 3, "c": 2}) == pytest.approx(eval(formula, {"a": 7, "b": 3, "c": 2}))
    assert shown.count("(") <= formula.count("(")


def test_functions_work():
    sheet = sheet_of(x=2.0)
    sheet.work_out("y", "sqrt(x) + ceil(x / 3) + max(x, 3) + exp(x - x)", "", "y")
    assert sheet["y"] == pytest.approx(math.sqrt(2) + 1 + 3 + 1)


def test_what_is_no_arithmetic_is_refused():
    sheet = sheet_of(x=2.0)
    for formula in ("x.real", "[x]", "x if x else x", "'x'"):
        with pytest.raises(ValueError, match="cannot contain"):
            sheet.work_out("y", formula, "", "y")
    with pytest.raises(KeyError):
        sheet.work_out("y", "z + 1", "", "y")
    with pytest.raises(ValueError, match="already"):
        sheet.given("x", 1, "", "x", "test")


def test_what_is_divided_by_more_than_a_float_holds_is_nothing():
    sheet = Sheet()
    sheet.given("restart_s", 1e6, "s", "", "test")
    assert sheet.work_out("share", "1 / exp(restart_s)", "share", "") == 0
