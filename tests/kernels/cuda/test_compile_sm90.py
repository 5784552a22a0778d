"""The kernels of a step compile for a Hopper GPU as they are launched: nothing spills, shared memory suffices.

Attention's and the linears' own tests compile theirs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cuda.compile_sm90 import ROOT, Case, Compiled, compile_for_sm90

pytestmark = pytest.mark.long


def compiled(tmp_path: Path, *groups: str) -> list[tuple[Case, Compiled]]:
    """Recorded and compiled in processes of their own: this one plays kernels with the interpreter."""
    path = tmp_path / "cases.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.cuda.record_launches", str(path), *groups]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    cases = [Case(**case) for case in json.loads(path.read_text())]
    return list(zip(cases, compile_for_sm90(cases), strict=True))


@pytest.mark.parametrize(
    "group",
    [
        pytest.param("draws, bfloat16", marks=pytest.mark.long),
        pytest.param("draws, float32", marks=pytest.mark.thorough),
        pytest.param("small steps", marks=pytest.mark.thorough),
    ],
)
def test_the_small_kernels_of_a_step_fit(group: str, tmp_path: Path) -> None:
    for case, found in compiled(tmp_path, group):
        # A draw from a whole row has 16 warps, and Triton 3.6 puts two of its registers aside.
        found.check_fits(spilled_bytes=8 if case.num_warps == 16 else 0)


@pytest.mark.thorough
def test_a_mixtures_products_fit_and_use_the_matrix_units(tmp_path: Path) -> None:
    for case, found in compiled(tmp_path, "mixtures"):
        found.check_fits()
        if case.kernel.endswith(":_grouped"):
            assert found.count("HGMMA") or found.count("HMMA"), case
