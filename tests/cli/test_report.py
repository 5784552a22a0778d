"""Rows and reports: the form every reporting verb shares."""

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
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(
        table("t", [Row("slow", 1.0, must=2.0), Row("fine", 2.0, must=1, aim=3), Row("best", 4.0, aim=3)])
    )
    lines = console.export_text().splitlines()
    assert [line.split("  ")[-1].strip() or line for line in lines if "slow" in line] == ["misses must"]
    assert any("fine" in line and "ok" in line for line in lines)
    assert any("best" in line and "reaches aim" in line for line in lines)
