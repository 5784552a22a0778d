"""`cumulo check node`: what it measures, whom it names, and what it tells the scheduler."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cumulo.bench import node_check
from cumulo.cluster.decide.health import HealthSignal, NodeCheck
from cumulo.cluster.job_store import JobStore
from cumulo.cluster.node_health import NodeHealth
from tests.cli.conftest import ROOT, Run
from tests.ports import reserved_port

RATES = ("memory bandwidth", "matrix product")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on this machine: each thing is done, and takes a thousandth of a second."""
    monkeypatch.setattr(node_check, "_OTHERS", 2.0)
    fastest = node_check._fastest_s
    monkeypatch.setattr(node_check, "_fastest_s", lambda run, *_: (fastest(run, 0.0), 1e-3)[1])


def others(tmp_path: Path, found: dict[str, Any], times: float) -> Path:
    """The report of another node, so many times as fast."""
    check = found["checks"][0]
    rates = {name: rate * times for name, rate in check["rates"].items()}
    path = tmp_path / f"other-{times}.json"
    path.write_text(json.dumps({"checks": [{**check, "node": "other", "rates": rates}]}))
    return path


def test_a_slow_node_is_named_cordoned_and_brought_back_when_it_passes(cumulo: Run, tmp_path: Path) -> None:
    clean, report = tmp_path / "clean.log", tmp_path / "found.json"
    clean.write_text("usb 1-1: new device\n")
    store = ("--store", str(tmp_path / "jobs"))
    check = ("check", "node", "--quick", "--node", "n1", "--log", str(clean), *store)
    first = cumulo(*check, "--json", str(report))
    assert first.code == 0 and "the first check" in first.out
    found = json.loads(report.read_text())
    assert [row["name"] for row in found["rows"]] == [*RATES, "no fault in the log"]
    fast, slow = others(tmp_path, found, 100.0), others(tmp_path, found, 0.01)
    refused = cumulo(*check, "--against", str(fast), "--cordon", "--exit-code", "5")
    assert refused.code == 5 and "n1: cordon: memory bandwidth is 0.0" in refused.err
    health = NodeHealth(JobStore(tmp_path / "jobs"))
    assert health.states()["n1"].shown == "cordoned"
    stays = cumulo(*check, "--against", str(fast), "--uncordon", "--on", "kubernetes")
    assert stays.code == 1 and health.states()["n1"].closed
    back = cumulo(*check, "--against", str(slow), "--uncordon", "--on", "kubernetes")
    assert back.code == 0 and "run: kubectl uncordon n1" in back.err
    assert health.states()["n1"].back == "it passed its check"


def test_an_xid_in_the_nodes_log_drains_it_and_slurm_is_told(
    cumulo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, told = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n", tmp_path / "told"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {told}\nexit $(cat {tmp_path}/code)\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check = (
        "check",
        "node",
        "--quick",
        "--node",
        "n7",
        "--log",
        "-",
        "--store",
        str(tmp_path),
        "--on",
        "slurm",
    )
    (tmp_path / "code").write_text("0")
    assert cumulo(*check, "--cordon", stdin=log).code == 1
    assert told.read_text().startswith("update NodeName=n7 State=DRAIN Reason=Xid 79: ")
    assert NodeHealth(JobStore(tmp_path)).states()["n7"].shown == "draining"
    (tmp_path / "code").write_text("1")
    assert "an operator runs: scontrol update NodeName=n7 State=RESUME" in cumulo(
        *check, "--uncordon", stdin="all is well\n").err  # fmt: skip


def test_a_busy_machine_is_not_judged_and_not_brought_back(
    cumulo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_check, "_OTHERS", -1.0)
    health = NodeHealth(JobStore(tmp_path))
    health.add_passed(NodeCheck("n1", "any", dict.fromkeys(RATES, 1e30)))
    health.tell(HealthSignal("n1", "check", "slow", time.time(), "cordon"))
    done = cumulo("check", "node", "--quick", "--node", "n1", "--store", str(tmp_path), "--uncordon")
    assert done.code == 0 and "other programs took" in done.out and "when it is idle" in done.err
    assert health.states()["n1"].closed and len(health.checks()) == 1


def test_a_wrong_product_drains_the_node(
    cumulo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(np.ndarray[Any, Any]):
        def __matmul__(self, other: Any) -> Any:
            return super().__matmul__(other) + (1 if other.shape[1] > 1 else 0)

    class Chance:
        def integers(self, low: int, high: int, shape: tuple[int, int]) -> Any:
            return np.ones(shape).view(Wrong)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Chance())
    done = cumulo("check", "node", "--quick", "--node", "n1", "--store", str(tmp_path), "--cordon")
    assert done.code == 1 and "n1: drain: a matrix product on the CPU is wrong" in done.err


def test_a_verdict_on_a_nodes_log_reaches_the_scheduler(cumulo: Run, tmp_path: Path) -> None:
    health = NodeHealth(JobStore(tmp_path))
    for log, act in (("NVRM: Xid (PCI:0000:3b:00): 94, Contained\n", "cordon"), ("CUDA out of memory\n", "")):
        done = cumulo("diagnose", "-", "--node", f"n{act}", "--store", str(tmp_path), stdin=log)
        assert done.code == 0 and (f"ncordon: {act}" in done.err) == bool(act)
    assert {name: one.shown for name, one in health.states().items()} == {"ncordon": "cordoned"}
    shown = cumulo("jobs", "nodes", "--store", str(tmp_path), "--json", str(tmp_path / "nodes.json"))
    assert "ncordon  cordoned  log" in shown.out and "ncordon: Xid 48, 94 or 95" in shown.out
    assert json.loads((tmp_path / "nodes.json").read_text())["nodes"][0]["state"] == "cordoned"
    assert "No node was cordoned" in cumulo("jobs", "nodes", "--store", str(tmp_path / "other")).out


def test_what_cannot_be_is_refused(cumulo: Run, tmp_path: Path) -> None:
    assert "did you mean slurm" in cumulo("check", "node", "--on", "slrum").err
    (tmp_path / "x.json").write_text("{}")
    refused = cumulo("check", "node", "--against", str(tmp_path / "x.json"), "--store", str(tmp_path))
    assert refused.code == 2 and "is no report of `cumulo check node --json`" in refused.err


@pytest.mark.long
def test_two_processes_exchange_and_nodes_are_each_others_neighbours(tmp_path: Path) -> None:
    def check(*more: str, **environment: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "cumulo", "check", "node", "--store", str(tmp_path / "jobs"), *more]
        return subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)  # fmt: skip

    alone = check("--json", str(tmp_path / "one.json"))
    assert alone.wait() in (0, 1)
    rows = json.loads((tmp_path / "one.json").read_text())["rows"]
    assert [row["name"] for row in rows][:3] == [*RATES, "all-reduce of 2 processes"]
    port = str(reserved_port())
    ranks = [
        check("--quick", "--node", f"n{rank}", *(["--json", str(tmp_path / "all.json")] if rank == 0 else []),
              RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(3)
    ]  # fmt: skip
    assert [process.communicate()[0].count("all-reduce with a neighbour") for process in ranks] == [3, 0, 0]
    checks = json.loads((tmp_path / "all.json").read_text())["checks"]
    assert [one["node"] for one in checks] == ["n0", "n1", "n2"]
    assert all(one["rates"]["all-reduce with a neighbour"] > 0 for one in checks)
