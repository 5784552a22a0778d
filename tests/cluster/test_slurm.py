"""Jobs on a real Slurm: gangs, a lost node, a controller that is gone, and submissions that happen once."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cumulo.cluster import launching
from cumulo.cluster.drivers.command import run_folder
from cumulo.cluster.drivers.driver import TargetLost
from cumulo.cluster.drivers.slurm import refusal
from cumulo.cluster.job_file import JobFile, job_from, resolved
from cumulo.cluster.job_history import job_history
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.errors import ConfigError
from cumulo.train.run.log import read_log
from tests.cli.conftest import ROOT
from tests.cluster.slurm_cluster import SlurmCluster, needs_slurm
from tests.models.cut_smollm import cut_smollm
from tests.serve.running_server import needs_built_in_model
from tests.serve.running_server import wait_for as wait_at_most

pytestmark = [needs_slurm, pytest.mark.long]
PATIENCE_S = 600.0  # a hang guard


def wait_for(condition: Callable[[], object], what: str) -> None:
    wait_at_most(condition, what, patience_s=PATIENCE_S)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobStore:
    monkeypatch.chdir(ROOT)  # the example's sources are relative to it
    return JobStore(tmp_path / "jobs")


def gang(name: str, steps: int = 40, **more: object) -> JobFile:
    job = {
        "name": name,
        "train": {
            "config": "train-tiny.yaml",
            "options": ["--set", "layout.dp=4", "--set", "micro_batch=2", "--steps", str(steps)],
        },
        "devices": {"count": 4, "kind": "cpu", "per_node": 1},
    }
    return resolved(job_from(job | more), ROOT / "examples")


def small(name: str, **more: object) -> JobFile:
    """A job that Slurm can place and that ends at once: `cumulo train --show-config` prints and exits."""
    train = {"config": "train-tiny.yaml", "options": ["--set", "layout.dp=1", "--show-config"]}
    job = {"name": name, "train": train, "devices": {"count": 1, "kind": "cpu"}}
    return resolved(job_from(job | more), ROOT / "examples")


def look(store: JobStore, record: JobRecord) -> JobRecord:
    launching.refreshed(store)
    return store.jobs()[record.job_id]


@pytest.mark.thorough
def test_a_gang_goes_on_after_its_node_died_and_another_one_waits_whole(
    slurm: SlurmCluster, store: JobStore
) -> None:
    first, _ = launching.launch(gang("first"), "slurm", store)
    wait_for(lambda: slurm.queue()["first-1"][0] == "RUNNING", "the first gang")
    second, _ = launching.launch(gang("second"), "slurm", store)
    log = run_folder(first) / "log.csv"
    seen = set()

    def watched(done: bool) -> bool:
        """Also: at no moment is a gang half placed."""
        for name, (state, nodes) in slurm.queue().items():
            if state in ("PENDING", "RUNNING"):
                seen.add((name, state, nodes))
        return done

    wait_for(lambda: watched(len(read_log(log)) >= 12), "12 steps of the first gang")
    assert "whole gang" in look(store, second).reason or look(store, second).state == "queued"
    slurm.kill_node("n3")
    wait_for(lambda: watched(slurm.restarts(store.jobs()[first.job_id].handle) > 0), "the requeue")
    assert len(read_log(log)) < 40
    slurm.start_node("n3")
    for record in (first, second):
        wait_for(lambda record=record: watched(look(store, record).ended), record.job_id)  # type: ignore[misc]
        assert look(store, record).state == "done", (Path(record.folder) / "output.log").read_text()
    assert {nodes for _, state, nodes in seen if state == "RUNNING"} == {4}
    assert {nodes for _, state, nodes in seen if state == "PENDING"} == {0}
    losses, undisturbed = ([record.loss for record in read_log(run_folder(one) / "log.csv")]
                           for one in (first, second))  # fmt: skip
    assert len(losses) == 40
    assert losses == undisturbed  # to the last bit
    assert "resuming after step" in (Path(first.folder) / "output.log").read_text()
    lost, last = job_history(look(store, first)).attempts
    assert lost.failed_first.endswith("n3") and lost.steps_repeated > 0 and lost.lost_device_s > 0
    assert (lost.devices, last.devices, last.cause) == (4, 4, "finished") and look(store, first).attempt == 2


def test_what_slurm_refuses_is_told_and_not_submitted(slurm: SlurmCluster, store: JobStore) -> None:
    before = slurm.queue()
    with pytest.raises(ConfigError, match=r"partition 'nowhere'.*there are: main"):
        launching.launch(small("lost", slurm={"partition": "nowhere"}), "slurm", store)
    assert store.jobs()["lost-1"].state == "failed"
    assert slurm.queue() == before
    for name, more in (
        ("h200", {"devices": {"count": 1, "kind": "h200", "per_node": 1}}),
        ("constraint", {"slurm": {"options": ["--constraint=ib"]}}),
    ):
        with pytest.raises(
            ConfigError, match=r"4 nodes have 2 cores, gpu:2\. Check devices and slurm\.options"
        ):
            launching.launch(small(name, **more), "slurm", store)
    assert not [state for state, _ in slurm.queue().values() if state in ("PENDING", "RUNNING")]


@pytest.mark.thorough
def test_a_job_survives_the_controller_and_is_submitted_once(slurm: SlurmCluster, store: JobStore) -> None:
    slurm.stop_controller()
    try:
        with pytest.raises(TargetLost, match="controller does not answer"):
            launching.launch(small("kept"), "slurm", store)
        with pytest.raises(TargetLost):
            launching.launch(small("kept"), "slurm", store)
        assert list(store.jobs()) == ["kept-1"]
        assert launching.refreshed(store)[1] != []
        # A job that Slurm has already is not said to be submitted again.
        told = refusal(
            "squeue", "Unable to contact slurm controller", replace(store.jobs()["kept-1"], handle="7")
        )
        assert "Slurm goes on with it" in str(told) and "submits it" not in str(told)
    finally:
        slurm.start_controller()
    record, is_new = launching.launch(small("kept"), "slurm", store)
    assert not is_new and record.handle
    assert [name for name in slurm.queue() if name.startswith("kept")] == ["kept-1"]


@pytest.mark.thorough
def test_an_answer_that_is_lost_on_the_way_submits_nothing_twice(
    slurm: SlurmCluster, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch hands the job over, and then cannot say so."""
    real = shutil.which("sbatch")
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\n{real} "$@" > /dev/null\necho "Unable to contact slurm controller" >&2\nexit 1\n'
    )
    tool.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        with pytest.raises(TargetLost):
            launching.launch(small("once"), "slurm", store)
    assert store.jobs()["once-1"].state == "submitting"
    record = look(store, store.jobs()["once-1"])
    assert record.handle and record.state != "submitting"
    assert [name for name in slurm.queue() if name.startswith("once")] == ["once-1"]


@pytest.mark.thorough
def test_an_identity_that_slurm_does_not_accept_is_named(slurm: SlurmCluster, store: JobStore) -> None:
    slurm.stop_identity()
    try:
        with pytest.raises(TargetLost, match="who you are"):
            launching.launch(small("who"), "slurm", store)
    finally:
        slurm.start_identity()
    assert look(store, store.jobs()["who-1"]).handle


@pytest.mark.thorough
def test_a_cancelled_job_ends(slurm: SlurmCluster, store: JobStore) -> None:
    record, _ = launching.launch(gang("gone", steps=4000), "slurm", store)
    wait_for(lambda: slurm.queue()["gone-1"][0] == "RUNNING", "the gang")
    launching.cancel(store, "gone")
    wait_for(lambda: look(store, record).ended, "the end")
    assert look(store, record).state == "cancelled"


@pytest.mark.thorough
def test_an_elastic_gang_goes_on_with_the_nodes_that_are_left(slurm: SlurmCluster, store: JobStore) -> None:
    record, _ = launching.launch(gang("elastic", elastic={"min": 2, "max": 4}), "slurm", store)
    log = run_folder(record) / "log.csv"
    wait_for(lambda: len(read_log(log)) >= 12, "12 steps")
    slurm.kill_node("n3")
    try:
        sizes = set()

        def ended() -> bool:
            found = look(store, record)
            sizes.add((found.state, len(found.places)))
            return found.ended

        wait_for(ended, "the end")
    finally:
        slurm.start_node("n3")
        wait_for(lambda: slurm.node_state("n3") == "idle", "the node")
    assert look(store, record).state == "done", (Path(record.folder) / "output.log").read_text()
    assert {size for state, size in sizes if state == "running"} >= {3}
    assert [one.step for one in read_log(log)] == list(range(1, 41))


@pytest.mark.thorough
def test_a_job_that_is_asked_to_save_is_queued_again_and_goes_on(
    slurm: SlurmCluster, store: JobStore
) -> None:
    """What `--signal` does before the time limit, done by hand: the steps of the job are signalled."""
    record, _ = launching.launch(resolved(job_from({
        "name": "limited", "train": {"config": "train-tiny.yaml", "options": ["--set", "checkpoint.every_steps=0"]},
        "devices": {"count": 2, "kind": "cpu", "per_node": 1}, "time_limit": "2h",
    }), ROOT / "examples"), "slurm", store)  # fmt: skip
    log = run_folder(record) / "log.csv"
    wait_for(lambda: len(read_log(log)) >= 7, "7 steps")
    subprocess.run(["scancel", "--signal=TERM", store.jobs()[record.job_id].handle], check=True)
    wait_for(lambda: look(store, record).ended, "the job")
    assert look(store, record).state == "done", (Path(record.folder) / "output.log").read_text()
    assert slurm.restarts(record.handle) == 1
    assert [one.step for one in read_log(log)] == list(range(1, 41))
    assert "saved a checkpoint after step" in (Path(record.folder) / "output.log").read_text()


@pytest.mark.thorough
@needs_built_in_model
def test_a_service_is_servers_on_its_nodes_behind_one_gateway(
    slurm: SlurmCluster, store: JobStore, tmp_path: Path
) -> None:
    model = cut_smollm(tmp_path / "tiny.gguf")
    with socket.socket() as line:
        line.bind(("", 0))
        port = line.getsockname()[1]
    serve = {"model": str(model), "port": port, "options": ["--threads", "1", "--name", "tiny"]}
    devices = {"count": 2, "kind": "cpu", "per_node": 1}
    record, _ = launching.launch(
        job_from({"name": "web", "serve": serve, "devices": devices}), "slurm", store
    )

    def ready() -> bool:
        try:
            fleet = httpx.get(f"http://127.0.0.1:{port}/v1/fleet", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return False
        return [one["state"] for one in fleet["replicas"]] == ["ready", "ready"]

    wait_for(lambda: ready() or look(store, record).ended, "two servers behind the gateway")
    asked = {"model": "tiny", "prompt": "One two", "max_tokens": 4}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=120)
    assert answer.status_code == 200, (Path(record.folder) / "output.log").read_text()
    assert look(store, record).url.endswith(f":{port}")
    launching.cancel(store, "web")
    wait_for(lambda: look(store, record).ended, "the end")
    assert look(store, record).state == "cancelled"


@pytest.mark.thorough
def test_two_kinds_of_devices_are_one_heterogeneous_job(slurm: SlurmCluster, store: JobStore) -> None:
    devices = [{"count": 1, "kind": "cpu", "per_node": 1}, {"count": 1, "kind": "gpu", "per_node": 1}]
    train = {"config": "train-tiny.yaml", "options": ["--steps", "6"]}
    job = resolved(job_from({"name": "mixed", "train": train, "devices": devices}), ROOT / "examples")
    record, _ = launching.launch(job, "slurm", store)
    wait_for(lambda: look(store, record).ended, "the job")
    assert look(store, record).state == "done", (Path(record.folder) / "output.log").read_text()
    assert len(read_log(run_folder(record) / "log.csv")) == 6
    assert "\x1b" not in (Path(record.folder) / "output.log").read_text()  # no colours in a file
