"""Elastic jobs: sizes within the limits of tenants, and no restarts for nothing."""

from collections import Counter
from dataclasses import replace

import pytest

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize, Waits
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, SpeedTable, TaskPlace
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota, snapshot_of
from cumulo.cluster.simulate.job_speed import ElasticSpeed, TraceJob
from cumulo.cluster.simulate.play import PlayOptions, play
from cumulo.cluster.simulate.synthetic import synthetic_trace, uniform_nodes

ELASTIC = ("elastic", "goodput")
TABLE = SpeedTable(
    tuple(size / (1 + 0.05 * size) for size in range(1, 9)), tuple(0.8 * size for size in range(1, 17))
)


def waiting_job(name: str, **more: object) -> JobRequest:
    return JobRequest(name, min_tasks=1, max_tasks=16, speed=TABLE, predicted_s=600.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ELASTIC)
def test_the_jobs_of_a_tenant_share_its_limit(name):
    """The cluster has room for all of them to be large: the tenant has not."""
    waiting = [waiting_job(f"j{number}", tenant="small") for number in range(12)]
    snapshot = snapshot_of(60.0, uniform_nodes(20, 8), waiting, [], [TenantQuota("small", 8.0)])
    decided = policy_named(name).decide(snapshot)
    started = [one for one in decided if isinstance(one, JobPlacement)]
    assert [len(one.places) for one in started] == [1] * 8
    told = {one.reason for one in decided if isinstance(one, Waits)}
    assert told == {"tenant small has 8 GPUs, its limit is 8"}


def burst(nodes: int, jobs: int) -> list[TraceJob]:
    """Elastic jobs that nearly all wait together."""
    found = []
    for job in synthetic_trace(jobs, 8 * nodes, 2.0, seed=3):
        asked, most = int(job.request.gpus), 4 * int(job.request.gpus)
        speeds = tuple(size / (1 + 0.05 * size) for size in range(1, most + 1))
        request = replace(
            job.request, arrival_s=job.request.arrival_s / 100, tasks=asked, gpus_per_task=1, min_tasks=1,
            max_tasks=most, speed=SpeedTable(speeds[:8], tuple(0.8 * one for one in speeds)),
        )  # fmt: skip
        found.append(TraceJob(request, job.work))
    return found


def test_las_preempts_nobody_for_a_job_that_its_tenants_limit_refuses():
    nodes = uniform_nodes(1, 8)
    places = tuple(TaskPlace(nodes[0].name, (gpu,)) for gpu in range(8))
    old = JobRequest("old", tasks=4, tenant="other", attained_gpu_s=1e6)
    small = JobRequest("small", tasks=4, tenant="full")
    running = [RunningJob(old, places[:4]), RunningJob(small, places[4:])]
    waiting = [JobRequest(f"more{number}", tasks=4, tenant="full", arrival_s=1.0) for number in range(3)]
    quotas = [TenantQuota("full", 4.0), TenantQuota("other", 8.0)]
    decided = policy_named("las").decide(snapshot_of(60.0, nodes, waiting, running, quotas))
    why = "tenant full has 4 GPUs, its limit is 4"
    assert decided == [Waits(f"more{number}", why) for number in range(3)]
    free_to_start = policy_named("las").decide(snapshot_of(60.0, nodes, waiting, running))
    assert Counter(type(one) for one in free_to_start) == {Eviction: 1, JobPlacement: 1, Waits: 2}


@pytest.mark.long
@pytest.mark.parametrize("name", ELASTIC)
def test_no_job_is_restarted_to_have_as_many_gpus_as_before(name):
    """Many want to grow, and few find room."""
    named, sizes = policy_named(name), list[tuple[int, int]]()

    def decide(snapshot: Snapshot) -> list[Decision]:
        decided = named.decide(snapshot)
        sizes.extend(
            (len(snapshot.running[one.job_id].places), len(one.places))
            for one in decided
            if isinstance(one, Resize)
        )
        return decided

    play(
        uniform_nodes(20, 8),
        burst(20, 200),
        decide,
        ElasticSpeed(),
        PlayOptions(interval_s=60.0, always_decide=True),
    )
    assert len(sizes) > 100 and all(before != after for before, after in sizes)
