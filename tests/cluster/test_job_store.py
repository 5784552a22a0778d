"""The store of jobs: one job per key, nothing lost to a crash, and decisions that replay."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cumulo.cluster import launching
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.queueing import fifo
from cumulo.cluster.decide.recovery import AttemptEnd, after_attempt, recovery
from cumulo.cluster.decide.snapshot import snapshot_of
from cumulo.cluster.decision_log import DecisionLog, plain_snapshot, read_snapshot, replay
from cumulo.cluster.job_file import job_from
from cumulo.cluster.job_store import JobStore
from cumulo.errors import ConfigError

JOB = job_from({"name": "tiny", "train": {"config": "train-tiny.yaml"}, "devices": {"count": 2}})


def test_a_job_is_submitted_once_until_it_has_ended(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first, is_new = store.submit(JOB, "local")
    again, is_new_again = JobStore(tmp_path).submit(JOB, "local")
    assert is_new and not is_new_again and again.job_id == first.job_id == "tiny-1"
    other, _ = store.submit(JOB, "slurm")
    assert other.job_id == "tiny-2"  # elsewhere it is another job
    store.change(first, state="done")
    assert store.submit(JOB, "local")[0].job_id == "tiny-3"


def test_a_key_given_by_hand_names_one_job_for_ever(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    record, _ = store.submit(JOB, "local", "nightly")
    store.change(record, state="done")
    assert store.submit(JOB, "local", "nightly") == (store.find("tiny-1"), False)


def test_many_submissions_at_once_are_one_job(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: JobStore(tmp_path).submit(JOB, "local"), range(16)))
    assert {record.job_id for record, _ in found} == {"tiny-1"}
    assert sum(is_new for _, is_new in found) == 1


def test_a_line_that_a_crash_cut_short_is_forgotten_and_mended(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    record, _ = store.submit(JOB, "local")
    with store.log.open("a") as stream:
        stream.write('{"event": "changed", "job_id": "tiny-1", "sta')
    assert store.jobs()["tiny-1"].state == "submitting"
    store.change(record, state="queued", reason="first")
    assert [event["event"] for event in store.events()] == ["submitted", "changed"]


@pytest.mark.parametrize("line", ["garbage", "{}", "[1]", '{"event": "changed"}', "\udcff"])
def test_a_log_that_somebody_else_wrote_into_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    store = JobStore(tmp_path)
    store.submit(JOB, "local")
    with store.log.open("a", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(line + "\n")
    with pytest.raises(ConfigError, match=r"log\.jsonl:2 is not an event of a job.*--store"):
        store.jobs()


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    record, _ = store.submit(JOB, "local")
    facts: dict[str, Any] = {"state": "running", "places": (TaskPlace("here"), TaskPlace("here"))}
    for _ in range(3):
        store.change(record, **facts)
    assert len(store.events()) == 2
    found = store.find("tiny")
    assert found.places == facts["places"] and [phase.state for phase in found.phases] == [
        "submitting",
        "running",
    ]


def test_an_unknown_job_is_named_with_those_that_exist(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    store.submit(JOB, "local")
    with pytest.raises(ConfigError, match=r"no job 'big'.*tiny-1"):
        store.find("big")


def test_a_recorded_decision_replays_identically_and_a_changed_one_is_seen(tmp_path: Path) -> None:
    running = RunningJob(
        JobRequest("a", tasks=2, gpus_per_task=2), (TaskPlace("n1", (0, 1)), TaskPlace("n1", (2, 3)))
    )
    waiting = [
        JobRequest("b", tasks=2, gpus_per_task=2, priority=3, deadline_s=9.0),
        JobRequest("c", tasks=9),
    ]
    snapshot = snapshot_of(5.0, [ClusterNode("n1", 4), ClusterNode("n2", 4)], waiting, [running])
    again = read_snapshot(json.loads(json.dumps(plain_snapshot(snapshot))))
    assert (again.nodes, again.waiting, again.running) == (snapshot.nodes, snapshot.waiting, snapshot.running)
    earlier = plain_snapshot(snapshot)
    earlier["nodes"][0]["nvlink_domain"] = "rack-1"  # as logs of earlier versions have it
    assert read_snapshot(earlier).nodes == snapshot.nodes
    log = DecisionLog(tmp_path / "decisions.jsonl")
    decided = fifo(snapshot)
    log.add("fifo", snapshot, decided)
    log.add("fifo", snapshot, decided)  # nothing is new
    assert replay(log.path, lambda _: fifo) == (1, [])
    turns, differing = replay(log.path, lambda _: lambda _: [])
    assert turns == 1 and "turn 1" in differing[0]


@pytest.mark.parametrize(
    ("end", "failures", "state"),
    [
        (AttemptEnd(0, True, 40, 0), 0, "done"),
        (AttemptEnd(0, False, 20, 10), 3, "again"),  # it was asked to save
        (AttemptEnd(2, False, 20, 10), 0, "failed"),  # refused: another try is no use
        (AttemptEnd(1, False, 10, 10), 0, "failed"),  # before its first step
        (AttemptEnd(1, False, 20, 10), 2, "again"),
        (AttemptEnd(1, False, 20, 10), 3, "failed"),
        (AttemptEnd(None, False, 0, 0), 0, "again"),  # killed from outside
        (AttemptEnd(0, False, 0, 0), 0, "again"),  # asked to end while it started
        (AttemptEnd(0, False, 0, 0), 3, "failed"),
    ],
)
def test_an_attempt_that_ended_is_tried_again_where_that_helps(
    end: AttemptEnd, failures: int, state: str
) -> None:
    assert after_attempt(end, failures, most_restarts=3).state == state


def test_a_gang_that_lost_a_node_goes_on_the_cheapest_way() -> None:
    one_lost: dict[str, Any] = {"tasks": 4, "least_tasks": 2, "fitting_tasks": 3, "repair_s": 600.0}
    assert recovery(**one_lost | {"fitting_tasks": 4}, left_s=1e4)[:2] == ("spare", 4)
    assert recovery(**one_lost, left_s=300)[:2] == ("shrink", 3)  # 100 s longer, and a repair takes 600
    assert recovery(**one_lost, left_s=1e5)[:2] == ("wait", 4)
    assert recovery(**one_lost | {"least_tasks": 4}, left_s=300)[:2] == ("wait", 4)
    assert recovery(**one_lost, left_s=300, ways=("wait",))[0] == "wait"


def test_every_job_of_a_controller_that_is_gone_says_so_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tool, asked = JobStore(tmp_path / "jobs"), tmp_path / "bin" / "squeue", tmp_path / "asked"
    names = ("running", "queued", "submitting", "done", "ray")
    for name in names:
        content = {"name": name, "train": {"config": "train-tiny.yaml"}, "ray": {"address": "elsewhere:6379"}}
        target = "ray" if name == "ray" else "slurm"
        record, _ = store.submit(job_from(content), target)
        store.change(
            record, state="running" if name == "ray" else name, handle="" if name == "submitting" else "7"
        )

    def squeue(script: str) -> list[str]:
        """What each job says after a look, and how often Slurm was asked."""
        asked.unlink(missing_ok=True)
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\necho asked >> {asked}\n{script}\n")
        tool.chmod(0o755)
        found, _ = launching.refreshed(store, ("slurm",))
        return [record.reason for record in found]

    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    told = squeue("echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    gone = "Slurm's controller does not answer (Unable to contact slurm controller)"
    assert told == [
        f"contact lost: {gone}; running-1 was running when it was last asked, and Slurm goes on with it",
        f"contact lost: {gone}",
        f"not submitted yet: {gone}",
        "",
        "",
    ]
    assert asked.read_text().split() == ["asked"]  # of a target that is gone only one job waits for an answer
    states = [record.state for record in store.jobs().values()]
    assert states == ["running", "queued", "submitting", "done", "running"]
    monkeypatch.setattr(launching, "hand_over", lambda store, record: None)
    told = squeue("echo '7|RUNNING|None|n0'")
    assert told[:2] == ["its whole gang is allocated"] * 2 and len(asked.read_text().split()) == 2
