"""`cumulo simulate cluster` on a cluster that is too small for its jobs."""

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
    assert "120 jobs never end under fifo; the first is gang-0, which needs" in " ".join(found.output.split())
