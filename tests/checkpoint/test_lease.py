"""A run's folder has one owner: on one machine by a lock, across machines by heartbeats, and by fencing always."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from cumulo.checkpoint.play import lease as lease_module
from cumulo.checkpoint.play.held import held_whole, own_parts
from cumulo.checkpoint.play.lease import RunLease, take_lease
from cumulo.checkpoint.play.store import CheckpointStore
from cumulo.errors import ConfigError, CumuloError, TrainingError
from tests.serve.running_server import wait_for

_CONTEXT = multiprocessing.get_context("spawn")


def _hold(folder: Path, pipe: Connection, beat_s: float) -> None:
    """A process that takes the lease, says how that went, and keeps it until it is told to end."""
    try:
        lease = take_lease(folder, beat_s=beat_s)
    except CumuloError as error:
        pipe.send(str(error))
        return
    pipe.send("taken")
    pipe.recv()
    try:
        lease.check()
        pipe.send("mine")
    except TrainingError as error:
        pipe.send(str(error))
    lease.release()


def _holder(folder: Path, beat_s: float = 5.0) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_hold, args=(folder, theirs, beat_s), daemon=True)
    process.start()
    return process, ours


@pytest.mark.long
def test_a_second_process_is_told_who_has_the_run_and_a_killed_one_leaves_it(tmp_path: Path) -> None:
    process, pipe = _holder(tmp_path)
    assert pipe.recv() == "taken"
    with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on .* since 2.*--take-over"):
        take_lease(tmp_path)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    take_lease(tmp_path).release()  # at once: the lock says that it is gone


@pytest.mark.long
def test_of_many_that_come_at_once_one_has_the_run(tmp_path: Path) -> None:
    holders = [_holder(tmp_path) for _ in range(6)]
    said = [pipe.recv() for _, pipe in holders]
    assert said.count("taken") == 1
    assert all("in use by" in one for one in said if one != "taken")
    for process, _ in holders:
        process.kill()
        process.join()


def test_a_folder_into_which_nothing_came_goes_with_its_lease(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    take_lease(run).release()
    assert not run.exists()
    lease = take_lease(run)
    (run / "config.yaml").touch()
    lease.release()
    assert {path.name for path in run.iterdir()} == {"config.yaml", "owner"}


def test_a_lease_that_was_released_is_had_at_once_and_old_claims_go(tmp_path: Path) -> None:
    for _ in range(4):
        take_lease(tmp_path).release()
    assert sorted(path.name for path in (tmp_path / "owner").iterdir()) == [
        "000003.json",
        "000004.json",
        "lock",
    ]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Machines of a file system without locks: whatever is called next is on that one."""

    def be(name: str) -> None:
        monkeypatch.setattr(lease_module, "_machine", lambda: name)

    monkeypatch.setattr(lease_module, "_locked", lambda lock: None)
    return be


def test_an_owner_on_another_machine_is_known_by_its_heartbeats(
    elsewhere: Callable[[str], None], tmp_path: Path
) -> None:
    elsewhere("a")
    first = take_lease(tmp_path, beat_s=0.05)
    elsewhere("b")
    told: list[str] = []
    with pytest.raises(ConfigError, match="in use by"):
        take_lease(tmp_path, told.append, patience_s=30)
    assert "sign of life" in told[0]
    first._closed.set()  # its machine is lost: it does not release
    first._thread.join()
    second = take_lease(tmp_path, patience_s=0.3)
    with pytest.raises(TrainingError, match=r"belongs to process .* now"):
        first.check()
    second.check()
    second.release()


def test_whoever_takes_over_fences_the_owner_off(elsewhere: Callable[[str], None], tmp_path: Path) -> None:
    elsewhere("a")
    first = take_lease(tmp_path, beat_s=0.02)
    elsewhere("b")
    second = take_lease(tmp_path, by_force=True)
    wait_for(lambda: first.taken_by is not None, "the heartbeat that finds it")
    with pytest.raises(TrainingError, match="took it over"):
        first.refuse_if_taken()
    first.release()
    second.check()
    second.release()


@pytest.mark.long
def test_a_take_over_on_one_machine_waits_until_the_owner_has_ended(tmp_path: Path) -> None:
    process, pipe = _holder(tmp_path, beat_s=0.05)
    assert pipe.recv() == "taken"
    taking = ThreadPoolExecutor(1).submit(take_lease, tmp_path, by_force=True)
    wait_for(lambda: (tmp_path / "owner/000002.json").exists(), "the claim")
    assert not taking.done()
    pipe.send("end")
    lease = taking.result()
    process.join()
    assert "took it over" in pipe.recv()
    lease.check()
    lease.release()


def test_a_checkpoint_of_a_fenced_owner_does_not_appear(tmp_path: Path) -> None:
    lease: RunLease = take_lease(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", 2, lambda text: None, may_publish=lease.check)
    parts = own_parts(held_whole({"weight": torch.ones(3)}), 0)
    store.write(1, parts, {})
    (tmp_path / "owner/000002.json").write_text("{}")
    with pytest.raises(TrainingError, match="this process stops"):
        store.write(2, parts, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]
    lease.release()
