"""Jobs on this machine: placed by the policy, outliving whoever started or supervises them, never started twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cumulo.cluster import launching
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decision_log import replay
from cumulo.cluster.drivers import local_supervisor
from cumulo.cluster.drivers.local import LocalDriver
from cumulo.cluster.drivers.local_supervisor import Supervisor
from cumulo.cluster.job_file import JobFile, job_from, resolved
from cumulo.cluster.job_store import JobStore
from cumulo.cluster.queue_settings import queue_settings, set_policy, set_quotas, set_slots
from cumulo.errors import ConfigError
from cumulo.train.run.log import read_log
from tests.cli.conftest import ROOT
from tests.serve.running_server import wait_for

ONE_RANK = {"train": {"config": "train-tiny.yaml", "options": ["--set", "layout.dp=1"]}}


def job(name: str, count: int = 2, **more: Any) -> JobFile:
    content = {"name": name, "train": {"config": "train-tiny.yaml"}, "devices": {"count": count}}
    return resolved(job_from(content | more), ROOT / "examples")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobStore]:
    """Supervised by the tests themselves; a job is a process that sleeps."""
    monkeypatch.setattr(LocalDriver, "_wake", lambda self: None)
    monkeypatch.setattr(local_supervisor, "ranks_command", lambda record, ranks: ["sleep", "1000"])
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as the supervisor does
    found = JobStore(tmp_path / "jobs")
    set_slots(found, 2)
    yield found
    for attempt in Supervisor(found).attempts():
        attempt.end()
    signal.signal(signal.SIGCHLD, before)


def until(store: JobStore, supervisor: Supervisor, condition: Callable[[], bool], what: str) -> None:
    wait_for(lambda: (supervisor.turn(), condition())[1], what)


def states(store: JobStore) -> list[str]:
    return [record.state for record in store.jobs().values()]


def test_a_gang_waits_whole_until_the_first_has_gone_and_the_log_replays(store: JobStore) -> None:
    for name in ("first", "second", "third"):
        launching.launch(job(name), "local", store)
    supervisor = Supervisor(store)
    supervisor.turn()
    assert states(store) == ["running", "queued", "queued"]
    assert [len(record.places) for record in store.jobs().values()] == [2, 0, 0]
    assert "needs 2 tasks" in store.find("second").reason
    assert store.find("third").reason == "waits behind second-1"
    launching.cancel(store, "first")
    until(store, supervisor, lambda: states(store) == ["cancelled", "running", "queued"], "the second gang")
    turns, differing = replay(store.decisions, lambda name: policy_named(name).decide)
    assert turns >= 3 and differing == []


def test_a_supervisor_that_takes_over_adopts_what_runs_and_starts_nothing_twice(store: JobStore) -> None:
    launching.launch(job("tiny"), "local", store)
    Supervisor(store).turn()
    first = Supervisor(store).attempts()[0]
    wait_for(lambda: first.pid, "the process")
    for _ in range(3):
        successor = Supervisor(store)
        successor.turn()
        assert [attempt.pid for attempt in successor.attempts()] == [first.pid]
    assert store.find("tiny").attempt == 1


def test_a_launcher_that_dies_before_it_handed_the_job_over_loses_nothing(store: JobStore) -> None:
    store.submit(job("tiny"), "local")  # and no more
    launching.refreshed(store)  # `cumulo jobs`, later
    assert store.find("tiny").state == "queued"
    assert launching.launch(job("tiny"), "local", store)[1] is False


def test_a_job_that_is_killed_starts_again_as_often_as_its_file_allows(store: JobStore) -> None:
    launching.launch(job("tiny", restart={"most": 1}), "local", store)
    supervisor = Supervisor(store)
    for attempt_number, after in ((1, "running"), (2, "failed")):
        supervisor.turn()
        attempt = supervisor.attempts()[0]
        assert store.find("tiny").attempt == attempt_number
        wait_for(lambda attempt=attempt: attempt.pid, "the process")  # type: ignore[misc]
        attempt.end()
        wait_for(lambda attempt=attempt: not attempt.alive, "its end")  # type: ignore[misc]
        supervisor.turn()
        assert store.find("tiny").state == after
    assert "after 1 restarts" in store.find("tiny").reason


def test_what_outlives_a_killed_job_is_ended_before_its_next_attempt(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process in a session of its own, as ranks are, whose parent was killed."""
    orphan = f"setsid sleep 1000 & echo $! > {tmp_path}/orphan; wait"
    monkeypatch.setattr(local_supervisor, "ranks_command", lambda record, ranks: ["/bin/sh", "-c", orphan])
    launching.launch(job("tiny", restart={"most": 1}), "local", store)
    supervisor = Supervisor(store)
    supervisor.turn()
    attempt = supervisor.attempts()[0]
    wait_for(lambda: _text(tmp_path / "orphan").strip(), "the orphan")
    orphan_pid = int(_text(tmp_path / "orphan"))
    (parent,) = [pid for pid, above in attempt.processes().items() if above == attempt.pid]
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: not attempt.alive, "its end")
    assert Path(f"/proc/{orphan_pid}").exists()
    until(store, supervisor, lambda: store.find("tiny").attempt == 2, "the second attempt")
    assert "sleep" not in _text(Path(f"/proc/{orphan_pid}/cmdline"))


def test_a_gang_that_can_never_fit_is_refused_at_once(store: JobStore) -> None:
    wide = job("wide", 4, train={"config": "train-tiny.yaml", "options": ["--set", "layout.dp=4", "--set",
                                                                         "micro_batch=2"]})  # fmt: skip
    for act in (launching.explain, launching.launch):  # also a dry run
        with pytest.raises(ConfigError, match="asks for 4 cores, and this machine has 2"):
            act(wide, "local", store)
    assert states(store) == ["failed"]


def test_a_policy_of_ones_own_is_one_function_of_the_snapshot(store: JobStore, tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from cumulo.cluster.decide.decisions import Waits\n"
        "def choose(snapshot):\n    return [Waits(job.job_id, 'not today') for job in snapshot.waiting]\n"
    )
    set_policy(store, f"{own}:choose")
    launching.launch(job("tiny"), "local", store)
    Supervisor(store).turn()
    assert store.find("tiny").reason == "not today"
    with pytest.raises(ConfigError, match="no policy 'fiffo'; did you mean fifo"):
        policy_named("fiffo")


def test_jobs_that_end_in_time_are_backfilled_and_a_head_of_unknown_duration_stops_them(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of what runs is predicted from its own steps."""
    left_s = {"runs": 100.0, "wide": 50.0, "short": 10.0, "long": 500.0}
    progress = local_supervisor.run_progress
    monkeypatch.setattr(
        local_supervisor, "run_progress",
        lambda folder: replace(progress(folder), steps=1, step_s=left_s[folder.parent.name[:-2]]),
    )  # fmt: skip
    set_policy(store, "backfill")
    launching.launch(job("runs", 1, **ONE_RANK), "local", store)
    Supervisor(store).turn()
    for name, count in (("wide", 2), ("long", 1), ("short", 1)):
        launching.launch(job(name, count, **(ONE_RANK if count == 1 else {})), "local", store)
    Supervisor(store).turn()
    assert states(store) == ["running", "queued", "queued", "running"]
    assert "starts in 100 s at the latest" in store.find("wide").reason
    assert "would delay wide-1" in store.find("long").reason


def test_a_decision_that_cannot_be_is_refused_by_name(store: JobStore, tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from cumulo.cluster.decide.decisions import JobPlacement\n"
        "from cumulo.cluster.decide.jobs import TaskPlace\n"
        "def half(snapshot):\n"
        "    return [JobPlacement(job.job_id, (TaskPlace('here'),)) for job in snapshot.waiting]\n"
    )
    set_policy(store, f"{own}:half")
    launching.launch(job("tiny"), "local", store)
    Supervisor(store).turn()
    assert states(store) == ["queued"]
    assert "tiny-1 gets 1 tasks of a gang of 2" in store.find("tiny").reason


def test_a_job_waits_until_those_that_stop_for_it_have_saved(store: JobStore) -> None:
    """Nothing starts on cores that another job still has, and no other job is stopped meanwhile."""
    set_policy(store, "priority")
    launching.launch(job("calm"), "local", store)
    Supervisor(store).turn()
    first = Supervisor(store).attempts()[0]
    wait_for(lambda: first.pid and len(first.processes()) > 1, "the process")
    os.kill(
        child := next(pid for pid, above in first.processes().items() if above == first.pid), signal.SIGSTOP
    )
    launching.launch(job("urgent", priority=9), "local", store)
    supervisor = Supervisor(store)
    for _ in range(3):
        supervisor.turn()
        assert states(store) == ["stopping", "queued"]
    assert "as soon as the jobs that stop for it have saved" in store.find("urgent").reason
    os.kill(child, signal.SIGCONT)
    until(store, supervisor, lambda: states(store) == ["queued", "running"], "the urgent job")
    assert supervisor.attempts()[0].folder.parent.name == "urgent-1"


def test_a_supervisor_that_takes_over_a_job_that_stops_queues_it_again(store: JobStore) -> None:
    """Also one that has done no step: that is no failure of the job."""
    launching.launch(job("tiny"), "local", store)
    Supervisor(store).turn()
    attempt = Supervisor(store).attempts()[0]
    wait_for(lambda: attempt.pid, "the process")
    store.change(store.find("tiny"), state="stopping", reason="makes room")
    attempt.end()
    supervisor = Supervisor(store)
    until(store, supervisor, lambda: store.find("tiny").attempt == 2, "its second start")
    assert store.find("tiny").failures == 0


def test_settings_of_the_queue_are_kept_and_wrong_ones_refused(store: JobStore, tmp_path: Path) -> None:
    set_quotas(store, ["red=4+2", "blue=1"], "ray")
    set_quotas(store, ["blue=none", "green=3"], "ray")
    settings = queue_settings(store, "ray")
    assert [(one.tenant, one.gpus, one.most_gpus) for one in settings.quotas] == [
        ("red", 4, 6),
        ("green", 3, 3),
    ]
    assert queue_settings(store, "local").quotas == []
    for wrong in ("red", "red=many", "red=-1"):
        with pytest.raises(ConfigError, match="write TENANT=GPUS or TENANT=GPUS"):
            set_quotas(store, [wrong], "ray")
    with pytest.raises(ConfigError, match="no policy 'fiffo'"):
        set_policy(store, "fiffo", "ray")


def test_a_decision_log_that_a_crash_cut_short_is_written_on(store: JobStore) -> None:
    launching.launch(job("tiny"), "local", store)
    Supervisor(store).turn()
    whole = store.decisions.read_bytes()
    store.decisions.write_bytes(whole + whole[:40])
    assert replay(store.decisions, lambda name: policy_named(name).decide) == (1, [])
    launching.launch(job("second"), "local", store)
    Supervisor(store).turn()
    assert replay(store.decisions, lambda name: policy_named(name).decide) == (2, [])


@pytest.mark.long
def test_the_example_trains_shows_its_speed_and_survives_its_supervisor(tmp_path: Path) -> None:
    """As users have it: every command a process of its own, and the supervisor killed in the middle."""
    store = JobStore(tmp_path / "jobs")

    def cumulo(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cumulo", *arguments, "--store", str(store.folder)], cwd=ROOT, text=True,
            capture_output=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return done.stdout

    assert "--resume" in cumulo("launch", "examples/job-train.yaml", "--dry-run")
    assert store.jobs() == {}
    assert cumulo("launch", "examples/job-train.yaml", "--slots", "2").split() == ["tiny-1"]
    log = store.folder / "tiny-1" / "run" / "log.csv"
    wait_for(lambda: len(read_log(log)) >= 3, "three steps", patience_s=900)
    supervisor = [path for path in Path("/proc").glob("[0-9]*/cmdline")
                  if f"local_supervisor\0{store.folder}" in _text(path)]  # fmt: skip
    assert len(supervisor) == 1
    os.kill(int(supervisor[0].parent.name), signal.SIGKILL)
    assert cumulo("launch", "examples/job-train.yaml").split() == ["tiny-1"]  # nothing is submitted twice
    assert "--- attempt 1 ---" in cumulo("logs", "tiny", "-f")
    jobs = json.loads(cumulo("jobs", "--all", "--json", "-"))["jobs"]
    assert [(one["job"], one["state"], one["attempt"]) for one in jobs] == [("tiny-1", "done", 1)]
    assert jobs[0]["step_s"] > 0 and jobs[0]["predicted_step_s"] > 0
    assert [one.step for one in read_log(log)] == list(range(1, 41))
    assert "0 differ" in cumulo("jobs", "--replay")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
