"""`cumulo doctor`: what it finds, and what it does when a check fails."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, needs_built_in_model


@pytest.mark.long
@needs_built_in_model
def test_a_well_machine_is_told_so_with_its_ledger(cumulo: Run, tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    ran = cumulo("doctor", "--json", str(path))
    assert ran.code == 0, ran.out
    assert "all checks passed" in ran.out
    assert "Memory ledger" in ran.out
    report = json.loads(path.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["answer"]["ok"]
    predicted, measured = (rows[f"memory, kv cache: {kind}"]["value"] for kind in ("predicted", "measured"))
    assert measured == pytest.approx(predicted, rel=0.05)
    assert report["ledger"]["rows"]


def test_a_missing_model_is_a_failed_check(cumulo: Run) -> None:
    ran = cumulo("doctor", "nowhere/model.gguf")
    assert ran.code == 1
    assert "nowhere/model.gguf" in " ".join(ran.out.split())
    assert "1 check failed: found" in ran.out
