"""Published serving throughputs, predicted."""

import random
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
    predict_served,
    replica_of,
    saturated_rate,
    saturated_tokens_per_s,
    served_rows,
    served_rows_of,
    wide_rows,
)
from cumulo.plan.serve.profile import constants, fitted_file

pytestmark = pytest.mark.long


@pytest.mark.parametrize("key", ["model", "device", "source"])
def test_groups_that_constants_and_ranges_never_saw_are_within_the_bar(key: str) -> None:
    found = [predict_served(row, key) for row in served_rows()]
    errors = sorted(abs(one.error) for one in found)
    assert len(errors) == 592
    assert quantile(errors, 0.5) <= 0.12
    assert quantile(errors, 0.9) <= 0.30
    assert 0.85 <= sum(one.covered for one in found) / len(found) <= 0.95


def test_experts_shared_by_many_gpus_are_predicted_without_a_constant_fitted_to_them() -> None:
    """DeepSeek's and SGLang's figures of a node, and vLLM's of prompts."""
    found = [predict_served(row) for row in wide_rows()]
    assert max(row.dp for row in wide_rows()) == 144
    assert all(abs(one.error) <= 0.25 and one.covered for one in found)


def test_a_mixture_on_several_gpus_has_attention_of_its_own_on_each_where_a_table_does_not_say() -> None:
    line = {"model": "qwen3-30b-a3b", "gpu": "h200", "tp": "4", "weights": "fp8", "input": "100", "output": "10",
            "requests": "10", "output_tok_s": "1"}  # fmt: skip
    (plain,), (said,) = served_rows_of([line]), served_rows_of([{**line, "dp": "1", "kv": "bf16"}])
    assert (plain.tp, plain.dp) == (1, 4) and (said.tp, said.dp) == (4, 1)
    assert saturated_tokens_per_s(plain, constants()) != saturated_tokens_per_s(said, constants())


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
    """The range of its predictions is the error of rows whose model the constants never saw; of more GPUs than any
    table has, it is wider."""
    for model, kind in (("llama-3.1-8b", "dense"), ("qwen3-30b-a3b", "mixture")):
        one = replica_of(model, "h100-sxm", 1, "fp8", 1024)
        assert one.confidence.error == fitted_file()["errors"]["model"][kind]
    wide = replica_of("deepseek-v3", "h100-sxm", 1, "fp8", 1024, dp=64).confidence
    assert wide.error > one.confidence.error and "extrapolated" in wide.evidence


def test_a_simulated_replica_that_never_waits_reaches_the_saturated_throughput() -> None:
    """Both go through the same step costs; the simulation also has a scheduler, a start and an end."""
    given = constants()
    one = replace(
        replica_of("llama-3.1-8b", "h200", 1, "fp8", 2048), max_running=128, max_tokens_per_step=2048
    )
    lengths = [
        random.Random(number).randint(512, 1536) for number in range(1024)
    ]  # so that few begin together
    run, _ = one.serve(tuple(Arrival(0.0, 256, length) for length in lengths))
    steady = saturated_rate(one, 128, 256, 1024, given)
    assert sum(lengths) / run.ended_s == pytest.approx(steady, rel=0.1)


def test_our_own_runs_that_were_held_out_are_within_a_tenth() -> None:
    errors = [
        abs(run.predicted_tokens_per_s() / run.tokens_per_s - 1) for run in own_runs() if not run.fitted
    ]
    assert len(errors) == 4 and max(errors) < 0.1
