"""The loop that this machine and Ray share, on a cluster that is made up: whatever happens, no GPU is given twice,
no job is lost, and what was decided is what the policies decide on the recorded snapshots."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cumulo.cluster import launching
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decision_log import replay
from cumulo.cluster.drivers import local_supervisor
from cumulo.cluster.drivers.local import LocalDriver
from cumulo.cluster.drivers.local_supervisor import Supervisor
from cumulo.cluster.job_file import JobFile, job_from, resolved
from cumulo.cluster.job_progress import JobProgress
from cumulo.cluster.job_store import JobRecord, JobStore, Target
from cumulo.cluster.queue_settings import set_policy, set_quotas
from tests import thorough
from tests.cli.conftest import ROOT

STEPS, GPUS, TENANTS = 3, 2, ("red", "green", "blue")


@dataclass
class MadeUpAttempt:
    steps: int  # done when it began
    alive: bool = True
    exit_code: int | None = None
    lost: str = ""
    asked: bool = False
    failed_on: tuple[str, ...] = ()

    def ask_to_end(self) -> None:
        self.asked = True

    def end(self) -> None:
        self.alive = False


@dataclass
class MadeUpCluster:
    """Four nodes with two GPUs. `there`: what runs now, by the job and its attempt; `done`: steps of each job."""

    names: list[str] = field(default_factory=lambda: [f"n{number}" for number in range(4)])
    there: dict[tuple[str, int], tuple[JobRecord, MadeUpAttempt]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    serves: tuple[RunningJob, ...] = ()
    target: Target = "local"

    def owns(self, record: JobRecord) -> bool:
        return True

    def nodes(self) -> tuple[ClusterNode, ...]:
        return tuple(ClusterNode(name, gpus=GPUS) for name in self.names)

    def others(self) -> Sequence[RunningJob]:
        return self.serves

    def request(self, record: JobRecord, left_s: float | None) -> JobRequest:
        return record.job.request(record.job_id, record.submitted_s, left_s)

    def attempt(self, record: JobRecord) -> MadeUpAttempt:
        return self.there[record.job_id, record.attempt][1]

    def start(self, record: JobRecord) -> None:
        self.there[record.job_id, record.attempt] = (record, MadeUpAttempt(self.done[record.job_id]))
        used = Counter(
            (place.node, gpu) for one in self.alive() for place in one.places for gpu in place.gpus
        )
        used.update((place.node, gpu) for one in self.serves for place in one.places for gpu in place.gpus)
        assert max(used.values()) == 1, used
        assert {place.node for place in record.places} <= set(self.names)

    def alive(self) -> list[JobRecord]:
        return [record for record, attempt in self.there.values() if attempt.alive]

    def step(self, draw: random.Random) -> None:
        """Something happens to every attempt."""
        for record, attempt in self.there.values():
            if not attempt.alive:
                continue
            if any(place.node not in self.names for place in record.places):
                attempt.alive, attempt.lost = False, "its node is gone"
            elif attempt.asked and draw.random() < 0.7:
                attempt.alive, attempt.exit_code = False, 0
            elif draw.random() < 0.5:
                self.done[record.job_id] += 1
                if self.done[record.job_id] >= STEPS:
                    attempt.alive, attempt.exit_code = False, 0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MadeUpCluster:
    found = MadeUpCluster()
    monkeypatch.setattr(LocalDriver, "submit", lambda self, record: {"handle": "x", "state": "queued"})
    monkeypatch.setattr(launching, "check_work", lambda job, here: None)
    monkeypatch.setattr(
        local_supervisor, "run_progress",
        lambda folder: JobProgress(found.done[folder.parent.name], STEPS, 2.0, 60.0),
    )  # fmt: skip
    return found


def job(name: str, count: int, **more: Any) -> JobFile:
    content = {
        "name": name,
        "train": {"config": "train-tiny.yaml"},
        "devices": {"count": count, "kind": "gpu"},
    }
    return resolved(job_from(content | more), ROOT / "examples")


def submit(store: JobStore, name: str, count: int, **more: Any) -> None:
    launching.launch(job(name, count, **more), "local", store)


@pytest.mark.parametrize("policy", ["backfill", "fair", *thorough.rare("fifo", "priority", "elastic", "las")])
def test_whatever_happens_no_gpu_is_given_twice_and_no_job_is_lost(
    cluster: MadeUpCluster, tmp_path: Path, policy: str
) -> None:
    store, draw, jobs = JobStore(tmp_path), random.Random(policy), thorough.examples(24)
    set_policy(store, policy)
    set_quotas(store, ["red=4+2", "blue=2+2"])
    supervisor = Supervisor(store, cluster)
    turns, submitted = 0, 0
    while submitted < jobs or supervisor.jobs():
        turns += 1
        if submitted < jobs:
            more: dict[str, Any] = {"tenant": TENANTS[submitted % 3], "priority": draw.choice((0, 0, 5))}
            more |= {"elastic": {"min": 1, "max": 4}} if draw.random() < 0.3 else {}
            submit(store, f"job{submitted}", draw.choice((1, 2, 4)), **more)
            submitted += 1
        if draw.random() < 0.1:
            supervisor = Supervisor(store, cluster)  # the earlier one was killed
        if draw.random() < 0.1:
            cluster.names = sorted(draw.sample(("n0", "n1", "n2", "n3"), draw.choice((3, 4))))
        supervisor.turn()
        cluster.step(draw)
        used = Counter(one.job.tenant for one in cluster.alive() for place in one.places for _ in place.gpus)
        assert used["red"] <= 6 and used["blue"] <= 4
        assert turns < 40 * jobs, [(one.job_id, one.state, one.reason) for one in supervisor.jobs()]
        cluster.names = cluster.names if submitted < jobs else ["n0", "n1", "n2", "n3"]
    assert {one.state for one in store.jobs().values()} == {"done"}
    count, differing = replay(store.decisions, lambda name: policy_named(name).decide)
    assert count >= jobs and differing == []


def test_an_elastic_job_grows_onto_free_gpus_and_gives_them_back(
    cluster: MadeUpCluster, tmp_path: Path
) -> None:
    """It saves a checkpoint each time, which is no failure."""
    store = JobStore(tmp_path)
    set_policy(store, "elastic")
    cluster.names = ["n0", "n1"]
    options = ["--set", "micro_batch=2"]
    elastic = {"elastic": {"min": 1, "max": 4}, "train": {"config": "train-tiny.yaml", "options": options}}
    supervisor = Supervisor(store, cluster)
    submit(store, "first", 2, **elastic)
    supervisor.turn()
    assert len(store.find("first").places) == 4
    submit(store, "second", 2, **elastic)
    supervisor.turn()
    assert (store.find("first").state, store.find("second").state) == ("stopping", "queued")
    attempt = cluster.attempt(store.find("first"))
    assert attempt.asked
    attempt.alive, attempt.exit_code = False, 0
    supervisor.turn()
    assert [len(one.places) for one in store.jobs().values()] == [2, 2]
    assert [(one.state, one.attempt, one.failures) for one in store.jobs().values()] == [
        ("running", 2, 0), ("running", 1, 0)]  # fmt: skip


def test_what_services_use_counts_for_their_tenant(cluster: MadeUpCluster, tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    set_quotas(store, ["red=2"])
    asks = JobRequest("service replica 1", 1, 2, tenant="red", preemptible=False)
    cluster.serves = (RunningJob(asks, (TaskPlace("n3", (0, 1)),)),)
    submit(store, "mine", 1, tenant="red")
    submit(store, "wide", 4, tenant="blue")
    supervisor = Supervisor(store, cluster)
    supervisor.turn()
    assert store.find("mine").reason == "tenant red has 2 GPUs, its limit is 2"
    assert {place.node for place in store.find("wide").places} == {"n0", "n1"}
