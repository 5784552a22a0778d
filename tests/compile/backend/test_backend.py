"""Kernels on the CPU back end: they run, agree with torch and with the interpreter, or say why they cannot run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.compile.backend.play import play


def cases(module: str) -> list[str]:
    lines = Path(__file__).with_name(f"cases_{module}.py").read_text().splitlines()
    return [line.split("def ")[1].split("(")[0] for line in lines if line.startswith("def case_")]


_played: dict[tuple[str, bool], dict[str, Any]] = {}


def played(module: str, folder: Path, interpreted: bool = False) -> dict[str, Any]:
    """Each module is played once, in a process of its own."""
    key = (module, interpreted)
    if key not in _played:
        _played[key] = play(f"tests.compile.backend.cases_{module}", folder / "results.pt", interpreted)
    return _played[key]


@pytest.mark.parametrize("case", cases("quick"))
def test_a_launch_runs_or_says_why_not(case: str, tmp_path: Path) -> None:
    assert isinstance(played("quick", tmp_path)[case], dict), played("quick", tmp_path)[case]


@pytest.mark.long
@pytest.mark.parametrize("case", cases("language"))
def test_the_languages_corners_agree_with_torch(case: str, tmp_path: Path) -> None:
    assert isinstance(played("language", tmp_path)[case], dict), played("language", tmp_path)[case]


@pytest.mark.long
@pytest.mark.parametrize("case", cases("foreign"))
def test_other_projects_kernels_run(case: str, tmp_path: Path) -> None:
    assert isinstance(played("foreign", tmp_path)[case], dict), played("foreign", tmp_path)[case]


@pytest.mark.long
@pytest.mark.parametrize("case", cases("own"))
def test_our_kernels_agree_with_torch_and_with_the_interpreter(case: str, tmp_path: Path) -> None:
    found, interpreted = played("own", tmp_path)[case], played("own", tmp_path, interpreted=True)[case]
    assert isinstance(found, dict), found
    assert isinstance(interpreted, dict), interpreted
    for name, value in found.items():
        torch.testing.assert_close(value, interpreted[name], rtol=2e-3, atol=2e-3)


@pytest.mark.long
def test_the_tours_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "compile-backend.md").read_text()
    script = tmp_path / "scaled.py"
    script.write_text(page.split("```python\n")[1].split("```")[0])
    shown = page.split("$ python scaled.py\n")[1].split("```")[0]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert result.stdout == shown, result.stderr
