"""Rows and reports: the form every reporting verb shares."""

import io
import json
import math
from pathlib import Path

from rich.console import Console

from cumulo.cli.report import Row, machine, table, write_json


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
    assert lines[-2].split() == ["found", "no", "amiss", "see", "[here]"]
    assert lines[-1].split() == ["memory", "2.5", "GiB"]


def _lines(rows: list[Row]) -> list[str]:
    console = Console(width=120, file=io.StringIO())
    console.print(table("title", rows))
    return [line for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
