"""A server that a plan file starts, over two ranks: `kill -9` of one of them under streams changes no token. Real
processes, real signals."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cumulo.errors import CumuloError
from tests.serve.rank_pids import rank_pids
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.test_streams_survive import KINDS, Stream, said
from tests.serve.tiny_model import NAME, save_tiny_model
from tests.whole_command import app

pytestmark = pytest.mark.long
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
        "--slo", "ttft=300s,itl=300s", "--devices", "small-cpu", "--catalog", str(catalogue), "--out", str(written),
    ]  # fmt: skip
    assert CliRunner().invoke(app, words).exit_code == 0
    return written


@pytest.fixture(scope="module")
def server(plan: Path) -> Iterator[RunningServer]:
    options = ("--no-console", "--max-context", "512", "--kv-memory-gib", "0.02")
    with running_server("--plan", str(plan), *options) as running:
        yield running


def test_a_plan_starts_the_ranks_it_chose(plan: Path, server: RunningServer) -> None:
    assert "tp: 2" in plan.read_text() and "slo: ttft=300000ms,itl=300000ms" in plan.read_text()
    assert "the plan predicts: TTFT p99" in server.log
    assert "2 ranks (tp 2)" in server.log and "context 512" in server.log  # which was typed


def test_a_plan_for_devices_that_are_not_here_is_refused(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["serve", "--plan", str(plan), "--device", "cuda"]
    with pytest.raises(CumuloError, match="1 engine of 2 ranks, and this machine has 0 GPUs"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.long
def test_a_killed_rank_changes_no_stream(server: RunningServer) -> None:
    kinds = ("greedy", "seeded", "logprobs", "guided", "samples")
    undisturbed = {}
    for name in kinds:
        (calm := Stream(server, *KINDS[name])).join()
        undisturbed[name] = said(calm.events)
    restarts = server.sample("cumulo:engine_restarts")
    streams = {name: Stream(server, *KINDS[name]) for name in kinds}
    for stream in streams.values():
        stream.speaks.wait()
    (rank,) = rank_pids(server.engine_pid())
    os.kill(rank, signal.SIGKILL)
    for name, stream in streams.items():
        stream.join()
        assert said(stream.events) == undisturbed[name], name
    wait_for(lambda: server.sample("cumulo:engine_restarts") > restarts, "the count of restarts", server)
    assert "rank 1: died, exit code -9" in server.log


def test_ranks_say_how_long_they_wait_and_what_they_hold(server: RunningServer) -> None:
    asked = {"model": NAME, "prompt": "the cat", "max_tokens": 8, "ignore_eos": True}
    for rank in ("0", "1"):
        labels = {"replica": "engine", "rank": rank}

        def told(labels: dict[str, str] = labels) -> bool:  # a report tells what the steps before it took
            assert server.post("/v1/completions", asked).status_code == 200
            return server.sample("cumulo:rank_steps_total", **labels) > 2

        wait_for(told, "the rank's figures", server)
        steps_s = server.sample("cumulo:rank_step_seconds_total", **labels)
        waited_s = server.sample("cumulo:rank_wait_seconds_total", **labels)
        assert 0 < waited_s < steps_s
        assert server.sample("cumulo:rank_memory_bytes", **labels) > 1 << 20
