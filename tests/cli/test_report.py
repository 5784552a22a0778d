"""Rows and reports: the form every reporting verb shares."""

import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cumulo.base.quantities import between, column, quantity, scale
from cumulo.base.report import ReportTable, Row, machine, table, write_json


def test_a_row_without_a_bound_is_ok() -> None:
    assert Row("speed", 1.0).ok
    assert Row("name", "text").ok


def test_a_bound_is_met_in_the_better_direction() -> None:
    assert Row("speed", 2.0, better="higher", must=2.0).ok
    assert not Row("speed", 1.9, better="higher", must=2.0).ok
    assert Row("time", 2.0, better="lower", must=2.0).ok
    assert not Row("time", 2.1, better="lower", must=2.0).ok
    assert Row("found", True, must=True).ok
    assert not Row("found", False, must=True).ok


def test_what_was_not_measured_meets_no_bound() -> None:
    assert not Row("speed", None, must=1.0).ok
    assert not Row("speed", math.nan, must=1.0).ok


def test_the_report_has_the_documented_form(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, [Row("speed", 3.0, "tok/s", must=2.0, aim=4.0)], outputs=[1])
    report = json.loads(path.read_text())
    assert report["rows"] == [
        {
            "name": "speed",
            "value": 3.0,
            "unit": "tok/s",
            "better": "higher",
            "must": 2.0,
            "aim": 4.0,
            "ok": True,
        }
    ]
    assert report["machine"] == machine()
    assert report["machine"]["cores"] >= 1
    assert report["outputs"] == [1]


def test_the_table_says_what_is_missed_and_what_is_reached() -> None:
    rows = [
        Row("slow", 1.0, must=2.0),
        Row("fine", 2.0, must=1, aim=3),
        Row("best", 4.0, aim=3),
        Row("plain", 5),
    ]
    lines = _lines(rows)
    for name, words in (("slow", "misses must"), ("fine", "ok"), ("best", "reaches aim")):
        assert next(line for line in lines if name in line).rstrip().endswith(words)
    assert next(line for line in lines if "plain" in line).split() == ["plain", "5"]


def test_findings_are_shown_in_words() -> None:
    lines = _lines([Row("found", False, must=True, note="see [here]"), Row("memory", 2.5, "GiB")])
    assert lines[-2].split() == ["found", "no", "failed", "see", "[here]"]
    assert lines[-1].split() == ["memory", "2.5", "GiB"]


def test_in_a_narrow_window_notes_stand_below_their_rows() -> None:
    rows = [
        Row("gloo, 64 KiB", 2.7, "ms", "lower", note="a note of many words " * 3),
        Row("ring, 64 KiB", 12.0, "ms", note="short"),
    ]
    lines = _lines(rows, width=50)
    assert lines[1].split() == ["gloo,", "64", "KiB", "2.7", "ms"] and lines[-1].split()[-3:] == [
        "12",
        "ms",
        "short",
    ]
    assert lines[2].startswith("    a note of many words") and max(map(len, lines)) <= 50


def test_in_a_narrow_window_columns_that_do_not_fit_stand_below_their_rows_and_no_word_is_cut() -> None:
    headings = ["axis", "in a step", "far", "busiest"]
    rows = [(["dp", "1.2 s", "50%", "from leaf 3 to spine 12"], ""), (["tp", "3 ms", "0%", ""], "a note")]
    wide, narrow = io.StringIO(), io.StringIO()
    for width, file in ((70, wide), (30, narrow)):
        Console(width=width, file=file).print(ReportTable("", headings, [False, True, True, False], rows))
    assert wide.getvalue().split("\n")[0].split() == ["axis", "in", "a", "step", "far", "busiest"]
    assert [line.split() for line in narrow.getvalue().splitlines()] == [
        ["axis", "in", "a", "step", "far"],
        ["dp", "1.2", "s", "50%"],
        ["busiest:", "from", "leaf", "3", "to"],
        ["spine", "12"],
        ["tp", "3", "ms", "0%"],
        ["a", "note"],
    ]


def _lines(rows: list[Row], width: int = 120) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table("title", rows))
    return [line for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (5680.0, "GB", "5.68 TB"),
        (28.0, "s", "28 s"),
        (16.7, "requests/s", "16.7 requests/s"),
        (0.00184, "s", "1.84 ms"),
        (5.52e-6, "s/step", "5.52 µs/step"),
        (0.0258, "days", "37.2 min"),
        (1e9, "tokens", "1 B tokens"),
        (449_001, "tokens/s", "449,001 tokens/s"),
        (2.22e-14, "%", "< 0.01 %"),
        (14.8, "$", "14.8 $"),
        (0.0, "s", "0 s"),
        (999.7, "ms", "1 s"),
        (8192, "tokens", "8,192 tokens"),
    ],
)
def test_numbers_are_written_as_people_read_them(value: float, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown


def test_bounds_are_written_in_the_unit_of_their_figure() -> None:
    lines = _lines(
        [Row("TTFT p99", 424.4, "ms", "lower", must=500.0), Row("search", 1500.0, "ms", "lower", must=2000.0)]
    )
    assert lines[-2].split() == ["TTFT", "p99", "424", "ms", "≤", "500", "ok"]
    assert lines[-1].split() == ["search", "1.5", "s", "≤", "2", "ok"]


@given(st.floats(1e-9, 1e15), st.sampled_from(["s", "ms", "GiB", "GB/s", "tokens", "days", "MWh"]))
def test_a_scaled_number_is_the_number_it_was(value: float, unit: str) -> None:
    size, name = scale(value, unit)
    back, same = scale(value / size, name)
    assert back == 1 and same == name


def test_figures_of_a_column_are_in_the_unit_of_the_largest() -> None:
    assert column([13.6, 0.0435, 2e-4, 0.0], "s") == (["13.6", "0.0435", "< 0.001", "0"], "s")
    assert column([0.0435, 2.66e-6], "s") == (["43.5", "0.00266"], "ms")
    assert column([0.5, 0.25], "GiB") == (["512", "256"], "MiB")
    assert column([], "s") == ([], "s")


def test_a_range_has_one_unit_where_both_ends_have_digits_in_it() -> None:
    assert between(3.1, 4.2, "s") == "3.1 to 4.2 s"
    assert between(0.288, 150.0, "s") == "288 ms to 2.5 min"
