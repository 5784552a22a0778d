"""The queue of a real Ray cluster: our policies decide, the log replays, and a head that dies loses no job."""

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cumulo.cluster import launching
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decision_log import replay
from cumulo.cluster.drivers.command import run_folder
from cumulo.cluster.job_file import JobFile, job_from, read_job, resolved
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.cluster.queue_settings import set_policy, set_quotas
from cumulo.errors import ConfigError
from cumulo.train.run.log import read_log
from tests.cli.conftest import ROOT
from tests.cluster.ray_cluster import RayCluster, free_port, needs_ray
from tests.serve.running_server import wait_for as wait_at_most

pytestmark = needs_ray
PATIENCE_S = 1800.0  # a hang guard
GPUS, TENANTS = 2, ("red", "green", "blue")


def wait_for(condition: Callable[[], object], what: str) -> None:
    wait_at_most(condition, what, patience_s=PATIENCE_S)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobStore:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    return JobStore(tmp_path / "jobs")


def gpu_job(name: str, address: str, count: int, steps: int = 3, **more: Any) -> JobFile:
    """A gang of so many GPUs, whose ranks compute on the CPU."""
    options = ["--set", f"layout.dp={count}", "--set", "micro_batch=2"]
    options += ["--set", "schedule.warmup_steps=0", "--steps", str(steps)]
    content = {
        "name": name, "train": {"config": "train-tiny.yaml", "options": options}, "check_nodes": False,
        "devices": {"count": count, "kind": "gpu"}, "ray": {"address": address},
    }  # fmt: skip
    return resolved(job_from(content | more), ROOT / "examples")


def jobs(store: JobStore) -> list[JobRecord]:
    return list(store.jobs().values())


def looked(store: JobStore) -> list[JobRecord]:
    return launching.refreshed(store)[0]


def output(record: JobRecord) -> str:
    path = Path(record.folder, "output.log")
    return f"{record.job_id}: {record.state}, {record.reason}\n" + (path.read_text() if path.exists() else "")


def turns(store: JobStore) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.decisions.read_text().splitlines()]


def most_used(store: JobStore) -> int:
    """The most GPUs of one node that gangs had at one moment."""
    moments = Counter[tuple[str, float]]()
    phases = [one for record in jobs(store) for one in record.phases if one.places]
    for at in phases:
        for one in phases:
            if one.begin_s <= at.begin_s < (one.end_s or float("inf")):
                for place in one.places:
                    moments[place.node, at.begin_s] += len(place.gpus)
    return max(moments.values())


def test_the_dry_run_shows_what_the_policy_is_asked_and_what_ray_reserves(store: JobStore) -> None:
    set_policy(store, "fair", "ray")
    set_quotas(store, ["research=2+6"], "ray")
    job = read_job(ROOT / "examples" / "job-queue.yaml")
    shown = json.loads(launching.explain(job, "ray", store))
    assert (shown["queue"]["policy"], shown["queue"]["quota"]) == ("fair", {"research": "research=2+6"})
    assert shown["gang"] == {"tenant": "research", "priority": 0, "tasks": 4, "places": "any"}
    assert shown["placement_group"]["bundles"] == [{"GPU": 1.0}] * 4
    strict = replace(job, elastic=None, ray=replace(job.ray, strategy="STRICT_PACK"))
    assert json.loads(launching.explain(strict, "ray", store))["gang"]["places"] == "together"


@pytest.mark.long
@pytest.mark.thorough
def test_jobs_of_three_tenants_obey_the_policy_and_survive_the_head(store: JobStore) -> None:
    port = free_port()
    set_policy(store, "fair", "ray")
    set_quotas(store, ["red=4+2", "green=2+4", "blue=2"], "ray")
    with RayCluster(port=port, gpus=GPUS) as first:
        for number in range(30):
            job = gpu_job(
                f"job{number}", first.address, (1, 1, 2, 1, 4)[number % 5], tenant=TENANTS[number % 3]
            )
            launching.launch(job, "ray", store)
        wait_for(lambda: sum(one.state == "done" for one in looked(store)) >= 8, "the first jobs")
        before = {one.job_id: one.state for one in jobs(store)}
        assert list(before.values()).count("queued") >= 8
        first.kill_all()
        with_head = len(turns(store))
        assert "does not answer" in launching.refreshed(store)[1][0]
    with RayCluster(port=port, gpus=GPUS):
        wait_for(lambda: all(one.ended for one in looked(store)), "the end of all jobs")
    assert [one.state for one in jobs(store)] == ["done"] * 30, [output(one) for one in jobs(store)]
    for record in jobs(store):
        assert [one.step for one in read_log(run_folder(record) / "log.csv")] == [1, 2, 3]
    count, differing = replay(store.decisions, lambda name: policy_named(name).decide)
    assert count > with_head and differing == []
    started = Counter(one["job_id"] for turn in turns(store) for one in turn["decisions"]
                      if one["kind"] == "JobPlacement")  # fmt: skip
    assert all(started[record.job_id] >= record.attempt >= 1 for record in jobs(store))
    assert most_used(store) <= GPUS


@pytest.mark.long
@pytest.mark.thorough
def test_what_others_use_is_not_given_away_and_a_cluster_has_one_queue(
    store: JobStore, tmp_path: Path
) -> None:
    import ray

    class Other:
        def there(self) -> bool:
            return True

    with RayCluster(workers=1, gpus=GPUS) as cluster:
        ray.init(address=cluster.address, namespace="cumulo", log_to_driver=False)
        other: Any = ray.remote(Other)
        holds = other.options(num_gpus=1, num_cpus=0).remote()
        assert ray.get(holds.there.remote())
        launching.launch(gpu_job("wide", cluster.address, 4), "ray", store)
        wait_for(lambda: "3 fit now" in (looked(store), store.find("wide").reason)[1], "what the policy sees")
        elsewhere = JobStore(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=f"launch with --store {store.folder}"):
            launching.launch(gpu_job("other", cluster.address, 1), "ray", elsewhere)
        launching.launch(gpu_job("small", cluster.address, 1), "ray", store)
        assert looked(store)[1].places == ()  # nobody overtakes
        ray.kill(holds)
        wait_for(lambda: all(one.ended for one in looked(store)), "both jobs")
        assert [one.state for one in jobs(store)] == ["done"] * 2, [output(one) for one in jobs(store)]
        again, _ = launching.launch(gpu_job("third", cluster.address, 1), "ray", elsewhere)
        wait_for(lambda: [one.state for one in looked(elsewhere)][-1] == "done", "a job of another store")
        assert again.job_id == "third-1"


@pytest.mark.long
@pytest.mark.thorough
def test_an_urgent_job_has_another_one_saved_and_stopped_and_a_lost_queue_goes_on(store: JobStore) -> None:
    import ray

    set_policy(store, "priority", "ray")
    with RayCluster(workers=1, gpus=GPUS) as cluster:
        calm, _ = launching.launch(gpu_job("calm", cluster.address, 4, steps=60), "ray", store)
        log = run_folder(calm) / "log.csv"
        wait_for(lambda: looked(store) and len(read_log(log)) >= 5, "5 steps")
        ray.kill(ray.get_actor("queue", namespace="cumulo"), no_restart=False)
        strict = gpu_job(
            "urgent",
            cluster.address,
            2,
            priority=9,
            ray={"address": cluster.address, "strategy": "STRICT_SPREAD"},
        )
        launching.launch(strict, "ray", store)
        wait_for(lambda: looked(store)[1].state == "running", "the urgent job")
        assert store.find("calm").state == "queued" and store.find("calm").failures == 0
        assert len({place.node for place in store.find("urgent").places}) == 2
        wait_for(lambda: all(one.ended for one in looked(store)), "both jobs")
    assert [one.state for one in jobs(store)] == ["done"] * 2, [output(one) for one in jobs(store)]
    assert [one.step for one in read_log(log)] == list(range(1, 61))
    assert "resuming after step" in output(store.find("calm")) and store.find("calm").attempt == 2
    assert replay(store.decisions, lambda name: policy_named(name).decide)[1] == []
