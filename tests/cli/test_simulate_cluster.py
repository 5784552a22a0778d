"""`cumulo simulate cluster` on a cluster that is too small for its jobs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cumulo.cluster.simulate import play
from cumulo.errors import ConfigError, CumuloError
from tests.cli.conftest import ROOT
from tests.whole_command import app

SLURM = ROOT / "examples/cluster"


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


def test_what_decisions_cost_is_told_for_every_policy(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    words = ["simulate", "cluster", "--synthetic", "60", "--policy", "backfill,las", "--json", str(file)]
    CliRunner().invoke(app, words, catch_exceptions=False)
    rows = {row["name"]: row["value"] for row in json.loads(file.read_text("utf-8"))["rows"]}
    assert rows["las: slowest decision"] > 0 and rows["backfill: CPU time of the simulation"] > 0


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--synthetic", "5", "--load", "0"], "--load must be more than 0, such as 0.9, got 0"),
        (["--synthetic", "5", "--load", "nan"], "--load must be more than 0"),
        (["--synthetic", "5", "--interval", "1e-9"], "--interval must be 0 or 0.001 seconds or more"),
        (["--synthetic", "5", "--failures", "-3"], "--failures -3: known are rsc-1"),
        (["--synthetic", "5", "--failures", "inf"], "--failures inf: known are rsc-1"),
        (["--synthetic", "5", "--quota", "a=-5"], "--quota a=-5: write TENANT=GPUS"),
        (["--synthetic", "5", "--quota", "a=nan"], "--quota a=nan: write TENANT=GPUS"),
        (["--synthetic", "5", "--html", "/nowhere/at/all.html"], "is in a folder that does not exist"),
        (["--synthetic", "5", "--log", "/"], "--log /: / is a folder"),
        (["--synthetic", "5", "--nodes", "1000000000"], "less than or equal to 1000000"),
    ],
)
def test_amounts_and_files_that_cannot_be_meant_are_refused_before_the_run(
    words: list[str], said: str
) -> None:
    found = CliRunner().invoke(app, ["simulate", "cluster", *words])
    told = " ".join((found.output + str(found.exception)).split())
    assert isinstance(found.exception, (CumuloError, SystemExit)) and said in told, told


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 5", "returned something that is no list of decisions: TypeError"),
        ("return 1 / 0", "own.py:2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_policy_of_the_user_that_fails_is_told_with_its_line(tmp_path: Path, body: str, said: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def decide(snapshot):\n    {body}\n")
    words = ["simulate", "cluster", "--synthetic", "5", "--policy", f"{file}:decide"]
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, ConfigError) and said in str(found.exception), found.exception


def test_no_failures_at_all_is_a_rate_too() -> None:
    words = ["simulate", "cluster", "--synthetic", "5", "--failures", "0", "--policy", "fifo"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0


def test_las_decides_in_rounds_where_jobs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every event it would look at every running job."""

    def mean_wait_s(*more: str) -> float:
        words = [
            "simulate",
            "cluster",
            "--synthetic",
            "20",
            "--nodes",
            "200",
            "--policy",
            "las",
            "--json",
            "-",
        ]
        found = CliRunner().invoke(app, [*words, *more])
        (wait,) = [row for row in json.loads(found.stdout)["rows"] if row["name"] == "las: mean wait"]
        return float(wait["value"])

    assert mean_wait_s() == 0.0
    monkeypatch.setattr(play, "_MANY_JOBS", 20)
    assert 10.0 < mean_wait_s() < 50.0
    assert mean_wait_s("--interval", "0") == 0.0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--synthetic", "5"], "needs a list of Slurm's jobs as TRACE"),
        (
            [str(SLURM / "slurm-jobs.txt"), "--slurm-config", str(SLURM / "gangs.csv")],
            "what scontrol show config prints",
        ),
        ([str(SLURM / "gangs.csv"), "--slurm-config", str(SLURM / "slurm-config.txt")], "the column"),
        (
            [str(SLURM / "slurm-jobs.txt")],
            "there is no scontrol here: give its output with --slurm-config FILE",
        ),
    ],
)
def test_the_policy_slurm_says_what_it_lacks(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=told):
        CliRunner().invoke(app, ["simulate", "cluster", "--policy", "slurm", *words], catch_exceptions=False)


def test_a_rehearsal_of_slurm_says_how_well_it_predicts(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    words = [
        "simulate", "cluster", str(SLURM / "slurm-jobs.txt"), "--slurm-config", str(SLURM / "slurm-config.txt"),
        "--nodes", "4", "--gpus-per-node", "4", "--policy", "slurm,backfill", "--json", str(file),
    ]  # fmt: skip
    CliRunner().invoke(app, words, catch_exceptions=False)
    rows = {row["name"]: row["value"] for row in json.loads(file.read_text("utf-8"))["rows"]}
    real_s, error = rows["slurm: mean wait that happened"], rows["slurm: error of the predicted mean wait"]
    assert error == pytest.approx(100 * abs(rows["slurm: mean wait"] / real_s - 1)) and error < 15
