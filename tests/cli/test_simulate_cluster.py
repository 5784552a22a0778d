"""`cumulo simulate cluster` on a cluster that is too small for its jobs."""

import json

from typer.testing import CliRunner

from cumulo.cli.app import app
from tests.cli.conftest import ROOT


def test_jobs_that_never_fit_are_told_and_nothing_breaks() -> None:
    trace = str(ROOT / "examples/cluster/gangs.csv")
    words = [
        "simulate",
        "cluster",
        trace,
        "--nodes",
        "2",
        "--nodes-per-leaf",
        "1",
        "--policy",
        "fifo,backfill",
    ]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0
    told = " ".join(found.output.split())
    assert (
        "83 jobs were left out: the whole cluster is too small for them. The first is gang-0, which needs"
        in told
    )


def test_a_mix_that_is_not_known_is_named() -> None:
    trace = str(ROOT / "examples/cluster/gangs.csv")
    found = CliRunner().invoke(app, ["simulate", "cluster", trace, "--fill", "--mix", "shares=2"])
    assert found.exit_code != 0


def test_what_decisions_cost_is_measured_next_to_its_bounds() -> None:
    words = [
        "bench",
        "cluster",
        "--nodes",
        "20",
        "--jobs",
        "60",
        "--loads",
        "0.9,2",
        "--policy",
        "backfill,las",
    ]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0
    assert "las, load 2: slowest decision" in found.output and "≤ 50" in found.output


def test_wrong_predictions_mislead_only_policies_that_read_them() -> None:
    def mean_jct_s(error: str) -> dict[str, float]:
        words = [
            "simulate",
            "cluster",
            "--synthetic",
            "80",
            "--nodes",
            "2",
            "--load",
            "2",
            "--policy",
            "shortest,fifo",
            "--json",
            "-",
        ]
        found = CliRunner().invoke(app, [*words, "--prediction-error", error])
        assert found.exit_code == 0, found.output
        return {
            row["name"].partition(":")[0]: row["value"]
            for row in json.loads(found.stdout)["rows"]
            if row["name"].endswith("mean JCT")
        }

    right, wrong = mean_jct_s("0"), mean_jct_s("2")
    assert wrong["shortest"] > 1.05 * right["shortest"] and wrong["fifo"] == right["fifo"]
