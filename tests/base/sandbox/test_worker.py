"""Killable workers: what breaks a limit is ended, the next job is served, nothing outlives its owner."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socket import socketpair

import pytest

from cumulo.base.sandbox.frames import receive_reply, reply_frame
from cumulo.base.sandbox.worker import MIB, JobEnded, JobFailed, Limits, Worker, WorkerUnavailable

JOBS = "tests.base.sandbox.jobs:make"
AMPLE = Limits(cpu_s=30, wall_s=60, memory_bytes=256 * MIB)
TIGHT = Limits(cpu_s=0.2, wall_s=30, memory_bytes=256 * MIB)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(JOBS, lambda: {"words": ["a", b"\xff"][:1]})
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def wait_until_gone(*pids: int) -> None:
    deadline_s = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, f"still alive: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.01)


def wait_until_stopped(pid: int) -> None:
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline_s, "it still runs"
        time.sleep(0.01)


def test_a_job_gets_what_was_sent_and_its_answer_comes_back(worker: Worker) -> None:
    value = {"text": "Straße \ud800", "numbers": [1, 2.5, None, True]}
    header, payload = worker.call(("echo", value), AMPLE)
    assert header == {"value": value, "setup": {"words": ["a"]}} and payload == b"raw \x00 bytes"
    long = "x" * 5_000_000
    assert worker.call(("echo", long), AMPLE)[0]["value"] == long


@pytest.mark.parametrize(
    ("kind", "limits", "reason"),
    [
        ("spin", TIGHT, "cpu time"),
        ("sleep", Limits(cpu_s=30, wall_s=0.2, memory_bytes=256 * MIB), "time"),
        ("memory", AMPLE, "memory"),
        ("segfault", AMPLE, "stack"),
        ("exit", AMPLE, "lost"),
    ],
)
def test_what_breaks_a_limit_is_ended_and_the_next_job_is_served(
    worker: Worker, kind: str, limits: Limits, reason: str
) -> None:
    before = worker.call(("pids", None), AMPLE)[0]
    with pytest.raises(JobEnded) as caught:
        worker.call((kind, None), limits)
    assert caught.value.reason == reason and caught.value.words.startswith(("it ", "the process"))
    after = worker.call(("pids", None), AMPLE)[0]
    assert after["child"] != before["child"]
    wait_until_gone(before["child"])
    # Only a loss without a reason costs a new keeper, which has to load everything again.
    assert (after["keeper"] == before["keeper"]) == (reason != "lost")


def test_a_bug_in_a_job_is_told_from_a_job_that_breaks_limits(worker: Worker) -> None:
    with pytest.raises(JobFailed, match="RuntimeError: a bug"):
        worker.call(("raise", None), AMPLE)
    assert worker.call(("echo", 1), AMPLE)[0]["value"] == 1


def test_a_job_cannot_write_files_and_sees_no_secrets(worker: Worker, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(JobFailed, match="File too large"):
        worker.call(("write", str(tmp_path / "file")), AMPLE)
    monkeypatch.setenv("SECRET_KEY", "x")
    fresh = Worker(JOBS)
    assert "SECRET_KEY" not in fresh.call(("environment", None), AMPLE)[0]["names"]
    fresh.close()


def test_memory_that_a_job_keeps_is_gone_in_the_next_child() -> None:
    fresh = Worker(JOBS, jobs_per_child=1)
    children = set()
    for _ in range(3):
        assert fresh.call(("keep", 1000), AMPLE)[0]["kept"] == 1000
        children.add(fresh.call(("pids", None), AMPLE)[0]["child"])
    assert len(children) == 3 and fresh.started == 1
    fresh.close()


def test_a_worker_that_is_killed_from_outside_is_started_again(worker: Worker) -> None:
    pids = worker.call(("pids", None), AMPLE)[0]
    os.kill(pids["keeper"], signal.SIGKILL)
    wait_until_gone(*pids.values())
    assert worker.call(("echo", 2), AMPLE)[0]["value"] == 2


@pytest.mark.long
def test_a_worker_that_is_stopped_does_not_hold_its_owner_for_ever(worker: Worker) -> None:
    pids = worker.call(("pids", None), AMPLE)[0]
    os.kill(pids["child"], signal.SIGSTOP)
    wait_until_stopped(pids["child"])
    with pytest.raises(JobEnded) as caught:
        worker.call(("echo", 3), Limits(cpu_s=0.1, wall_s=0.1, memory_bytes=MIB))
    assert caught.value.reason == "time"
    wait_until_gone(*pids.values())
    assert worker.call(("echo", 3), AMPLE)[0]["value"] == 3


def test_a_reply_that_is_there_is_taken_by_an_owner_who_comes_late() -> None:
    ours, theirs = socketpair()
    with ours, theirs:
        theirs.sendall(reply_frame({"done": 1}, b"payload"))
        assert receive_reply(ours, time.monotonic() - 60) == ({"done": 1}, b"payload")
        with pytest.raises(TimeoutError):
            receive_reply(ours, time.monotonic() - 60)


def test_a_worker_that_says_more_than_it_was_asked_is_started_again() -> None:
    fresh = Worker(JOBS)
    assert fresh.call(("talk", None), AMPLE)[0]["value"] == 1
    assert fresh.call(("echo", 2), AMPLE)[0]["value"] == 2 and fresh.started == 2
    fresh.close()


def test_closing_ends_a_job_that_runs(worker: Worker) -> None:
    fresh = Worker(JOBS)
    pids = fresh.call(("pids", None), AMPLE)[0]
    failures: list[Exception] = []

    def call() -> None:
        try:
            fresh.call(("sleep", None), AMPLE)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    fresh.close()
    thread.join(60)
    assert len(failures) == 1 and isinstance(failures[0], (JobEnded, WorkerUnavailable))
    wait_until_gone(*pids.values())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_no_process_outlives_its_owner(number: int, busy: bool) -> None:
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.base.sandbox.test_worker import *\n"
        "worker = Worker(JOBS)\n"
        "pids = worker.call(('pids', None), AMPLE)[0]\n"
        "print(pids['child'], pids['keeper'], flush=True)\n"
        f"worker.call(('sleep', None), AMPLE) if {busy} else sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.send_signal(number)
    owner.communicate(timeout=60)
    wait_until_gone(*pids)


def test_a_worker_whose_code_cannot_be_loaded_says_why() -> None:
    with pytest.raises(WorkerUnavailable, match="cannot be set up"):
        Worker("tests.base.sandbox.jobs:broken").start()
