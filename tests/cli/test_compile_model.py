"""`cumulo compile model`: what it prints and writes, and how it refuses a bad file."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Run


@pytest.mark.long
def test_the_example_is_compiled_with_report_and_page(cumulo: Run, tmp_path: Path) -> None:
    page, kept = tmp_path / "block.html", tmp_path / "block.json"
    block = f"{ROOT}/examples/compile/block.py:Block"
    run = cumulo("compile", "model", block, "--report", str(page), "--json", str(kept))
    assert run.code == 0
    assert "12 operations became 6 kernels; 6.51 MiB less traffic" in run.out
    assert "these could not fuse, because" in run.out and "block.py:18" in run.out
    assert page.read_text().count("<svg") == 2
    rows = {row["name"]: row["value"] for row in json.loads(kept.read_text())["rows"]}
    assert rows["inference: kernels after"] == 6 and rows["difference from eager"] < 1e-5


def test_a_name_that_a_file_lacks_is_refused_with_those_it_has(cumulo: Run) -> None:
    run = cumulo("compile", "model", f"{ROOT}/examples/compile/block.py:Blok")
    assert run.code != 0 and "did you mean Block?" in run.err
