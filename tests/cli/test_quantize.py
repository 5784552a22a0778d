"""`cumulo quantize` as it is typed: an option that says nothing to the method is named, not ignored in silence."""

from pathlib import Path

from tests.cli.conftest import Run
from tests.engine.ranked_models import save_model


def test_options_of_other_methods_are_named(cumulo: Run, tmp_path: Path) -> None:
    model = str(save_model("dense", tmp_path))
    ran = cumulo("quantize", model, "--method", "int8", "--group", "64", "-o", str(tmp_path / "int8"))
    assert ran.code == 0 and "int8, a scale per row" in ran.out
    assert "--group is ignored: it is for rtn, gptq, awq, not for int8" in ran.err
    ran = cumulo("quantize", model, "--method", "rtn", "--group", "16", "-o", str(tmp_path / "rtn"))
    assert ran.code == 0 and "groups of 16" in ran.out and "ignored" not in ran.err
