"""`cumulo schedule`: the picture, the figures beside the formula, the files, and refusals."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Run


def test_it_draws_the_timeline_and_gives_the_published_bubble_beside_its_own(cumulo: Run) -> None:
    ran = cumulo("schedule", "1f1b", "--stages", "2", "--micro-batches", "3")
    assert ran.code == 0
    assert "0 F0F1    B0··F2B1··  B2··" in ran.out
    assert "published bubble" in ran.out
    assert "(p-1)(f+b)" in ran.out


def test_its_report_has_bubble_and_memory(cumulo: Run) -> None:
    ran = cumulo(
        "schedule", "zb-h1", "--stages", "4", "--micro-batches", "8", "--forward-ms", "2", "--json", "-"
    )
    rows = {row["name"]: row["value"] for row in json.loads(ran.out)["rows"]}
    assert rows["bubble of the worst stage"] == pytest.approx(6.0)  # (4 - 1)(2 + 1 - 1)
    assert rows["published bubble"] == pytest.approx(6.0)
    assert rows["peak live activations"] == rows["published peak"] == 4


def test_a_formula_is_not_claimed_where_its_assumptions_fail(cumulo: Run) -> None:
    ran = cumulo("schedule", "1f1b", "--latency-us", "100", "--json", "-")
    rows = {row["name"]: row for row in json.loads(ran.out)["rows"]}
    assert rows["published bubble"]["value"] is None
    assert "free communication" in rows["published bubble"]["note"]


def test_it_writes_the_picture_and_the_trace(cumulo: Run, tmp_path: Path) -> None:
    svg, trace = tmp_path / "dualpipe.svg", tmp_path / "dualpipe.json"
    assert cumulo("schedule", "dualpipe", "--svg", str(svg), "--perfetto", str(trace)).code == 0
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dualpip",), "did you mean dualpipe?"),
        (("dualpipe", "--stages", "3"), "use 4"),
        (("zb-v", "--forward-ms", "-1"), "forward_s"),
        (("zb-v", "--bandwidth-gb-s", "0"), "bandwidth"),
        (("zb-v", "--svg", "/nowhere/at/all.svg"), "cannot write"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_so(cumulo: Run, arguments: tuple[str, ...], words: str) -> None:
    ran = cumulo("schedule", *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.splitlines()) == 1


def test_help_has_an_example(cumulo: Run) -> None:
    ran = cumulo("schedule", "--help")
    assert ran.code == 0
    assert "cumulo schedule zb-v" in ran.out.split("Example:")[1]
