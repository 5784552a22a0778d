"""A server that a plan file starts, over two ranks. Real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cumulo.cli.app import app
from cumulo.errors import CumuloError
from tests.serve.running_server import RunningServer, running_server
from tests.serve.tiny_model import save_tiny_model

pytestmark = pytest.mark.slow
# Too small for the whole model: the plan must take two.
CATALOGUE = """
devices:
  small-cpu:
    {generation: cpu, year: 2020, memory_bytes: 8000000, memory_bytes_per_s: 20.0e+9, link_kind: memory,
     link_bytes_per_s: 10.0e+9, host_bytes_per_s: 20.0e+9, processors: 1, power_w: 50, price_per_hour: 0.05,
     peak_flops: {float32: 37.0e+9}, source: an example}
nodes:
  small-machine: {device: small-cpu, gpus: 4, nic_bytes_per_s: 1.25e+9, power_w: 50}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    model, written = save_tiny_model(folder), folder / "plan.yaml"
    catalogue = folder / "catalogue.yaml"
    catalogue.write_text(CATALOGUE)
    words = [
        "plan", "serve", str(model), "--rate", "2", "--input", "200", "--output", "100", "--requests", "20",
        "--slo", "ttft=2s,itl=200ms", "--devices", "small-cpu", "--catalog", str(catalogue), "--out", str(written),
    ]  # fmt: skip
    assert CliRunner().invoke(app, words).exit_code == 0
    return written


@pytest.fixture(scope="module")
def server(plan: Path) -> Iterator[RunningServer]:
    options = ("--no-console", "--max-context", "512", "--kv-memory-gib", "0.02")
    with running_server("--plan", str(plan), *options) as running:
        yield running


def test_a_plan_starts_the_ranks_it_chose(plan: Path, server: RunningServer) -> None:
    assert "tp: 2" in plan.read_text()
    assert "the plan predicts: TTFT p99" in server.log
    assert "2 ranks (tp 2)" in server.log and "context 512" in server.log  # which was typed


def test_a_plan_for_devices_that_are_not_here_is_refused(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["serve", "--plan", str(plan), "--device", "cuda"]
    with pytest.raises(CumuloError, match="1 engine of 2 ranks, and this machine has 0 GPUs"):
        CliRunner().invoke(app, words, catch_exceptions=False)
