"""`cumulo compile stages` and `kernels`: what they print, keep and refuse."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

from cumulo.compile.stages.launch import recorded
from tests.cli.conftest import Run

PLANTED = Path(__file__).parents[1] / "compile/stages/planted.py"


def test_the_command_prints_keeps_and_compares(cumulo: Run, tmp_path: Path) -> None:
    words = ("compile", "stages", f"{PLANTED}:strided", "--set", "BLOCK=1024")
    kept, page = tmp_path / "kept.json", tmp_path / "page.html"
    first = cumulo(*words, "--json", str(kept), "--out", str(page))
    assert first.code == 0 and "uncoalesced load" in first.out and "were guessed" in first.out
    assert json.loads(kept.read_text())["rows"][0]["name"].startswith("uncoalesced in line")
    assert "<script>" in page.read_text() and "data-line=" in page.read_text()
    second = cumulo(*words, "--warps", "8", "--diff", str(kept))
    assert second.code == 0 and re.search(r"warps\s+4\s+8", second.out)


def test_foreign_records_and_halves_of_options_are_refused(cumulo: Run, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    refused = cumulo(
        "compile", "stages", f"{PLANTED}:strided", "--set", "BLOCK=64", "--diff", str(tmp_path / "x.json")
    )
    assert refused.code == 2 and "no record of `cumulo compile stages --json`" in refused.err
    assert cumulo("compile", "stages", f"{PLANTED}:strided", "--set", "BLOCK").code == 2


def test_kernels_are_listed_by_the_names_that_stages_takes(cumulo: Run) -> None:
    listed = [line.split()[0] for line in cumulo("compile", "kernels").out.splitlines()]
    assert set(recorded()) <= set(listed)
