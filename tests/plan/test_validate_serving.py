"""Published serving throughputs, predicted."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cumulo.base.quantiles import quantile
from cumulo.cli.plan.validate import validate
from cumulo.engine.simulate.run import Arrival
from cumulo.plan.evidence.serving import (
    own_runs,
    replica_of,
    saturated_rate,
    saturated_tokens_per_s,
    served_rows,
)
from cumulo.plan.serve.profile import constants, fitted_file

pytestmark = pytest.mark.long


@pytest.mark.parametrize("key", ["model", "device"])
def test_models_and_devices_that_the_constants_never_saw_are_within_the_bar(key: str) -> None:
    errors = sorted(
        abs(saturated_tokens_per_s(row, constants(f"{key} {getattr(row, key)}")) / row.tokens_per_s - 1)
        for row in served_rows()
    )
    assert len(errors) == 87
    assert fitted_file()["errors"][key] == pytest.approx(quantile(errors, 0.9), abs=0.002)
    assert quantile(errors, 0.5) <= 0.12
    assert quantile(errors, 0.9) <= 0.25


def test_longer_answers_and_more_memory_do_what_they_must() -> None:
    rows = {row.name: row for row in served_rows()}
    given = constants()
    small, large = (
        saturated_tokens_per_s(rows[f"llama-3.1-8b {device} tp1 fp8 20000/2000"], given)
        for device in ("h100-sxm", "h200")
    )
    assert large > 1.2 * small


def test_the_command_prints_models_devices_and_the_whole(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(validate)
    ran = CliRunner().invoke(
        app, ["serving", "--left-out", "--worst", "1", "--json", str(tmp_path / "out.json")]
    )
    assert ran.exit_code == 0, ran.output
    assert "qwen3-235b-a22b" in ran.output
    assert "all, by device" in ran.output


def test_what_plan_serve_believes_is_what_validation_found() -> None:
    """The range of its predictions is the error of rows whose model the constants never saw."""
    one = replica_of("llama-3.1-8b", "h100-sxm", 1, "fp8", 1024)
    assert one.confidence.error == fitted_file()["errors"]["model"]


def test_a_simulated_replica_that_never_waits_reaches_the_saturated_throughput() -> None:
    """Both go through the same step costs; the simulation also has a scheduler, a start and an end."""
    given = constants()
    one = replace(
        replica_of("llama-3.1-8b", "h200", 1, "fp8", 384), max_running=128, max_tokens_per_step=2048
    )
    run, _ = one.serve(tuple(Arrival(0.0, 256, 128) for _ in range(1024)))
    steady = saturated_rate(one, 128, 256, 128, given)
    assert 1024 * 128 / run.ended_s == pytest.approx(steady, rel=0.1)


def test_our_own_runs_that_were_held_out_are_within_a_tenth() -> None:
    errors = [
        abs(run.predicted_tokens_per_s() / run.tokens_per_s - 1) for run in own_runs() if not run.fitted
    ]
    assert len(errors) == 4 and max(errors) < 0.1
