"""The examples run as they are, and the Makefile helps and refuses."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import processes
from tests.cli.conftest import ROOT, needs_built_in_model

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What each must show, so that an example that prints nothing useful fails.
EXPECTED = {
    "quickstart.py": "Paris",
    "adapters.py": "1-random-1: ",
    "batch.py": "arrived with",
    "stream.py": "ended by",
    "json_report.py": '"ttft_s"',
    "several_models.py": "second: The capital of France is Paris",
    "quantize.py": "gptq, 4 bits, groups of 64",
}


# Writes the whole model; tests/quant quantizes and asks tiny ones by all methods.
LONG = {"quantize.py"}


@needs_built_in_model
@pytest.mark.long
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.long if path.name in LONG else ()) for path in EXAMPLES],
    ids=lambda path: path.name,
)
def test_the_example_runs(path: Path) -> None:
    done = processes.run_program(path)
    assert done.returncode == 0, done.stderr
    assert EXPECTED[path.name] in done.stdout


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
def test_make_alone_lists_its_targets() -> None:
    done = subprocess.run(["make"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert all(f"make {target}" in done.stdout for target in ("run", "chat", "test", "lint", "bench"))


@needs_make
def test_a_machine_without_a_fitting_python_is_told_what_to_do(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        [shutil.which("make") or "make", "chat", f"VENV={tmp_path}/venv"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode != 0
    assert "Cumulo needs Python 3.11" in done.stderr
    assert done.stdout == ""
