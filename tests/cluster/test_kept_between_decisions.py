"""What a policy keeps from one decision to the next changes no decision on other queues than the usual."""

import itertools
from dataclasses import replace

import pytest

from cumulo.cluster.decide.decisions import JobPlacement, Waits
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decide.policy import looks
from cumulo.cluster.decide.queue import JobQueue
from cumulo.cluster.decide.running import RunningTable
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota, snapshot_of
from cumulo.cluster.simulate.play import PlayOptions, play
from cumulo.cluster.simulate.traces import synthetic_trace, uniform_nodes
from cumulo.cluster.simulate.workloads import WorkloadSize, workload_named


def anew(snapshot: Snapshot) -> Snapshot:
    """Nothing is kept in it."""
    running, quotas = list(snapshot.running.values()), list(snapshot.quotas.values())
    return snapshot_of(snapshot.now_s, snapshot.nodes, tuple(snapshot.waiting), running, quotas)


def in_turn(decided):
    """Everything up to the first gang that does not fit."""
    return list(
        itertools.takewhile(
            lambda one: isinstance(one, JobPlacement) or one.reason.startswith("tenant"), decided
        )
    )


@pytest.mark.parametrize("name", ("backfill", "conservative", "priority"))
def test_starts_reserved_for_jobs_with_cores_are_kept(name):
    remembers, reserved = policy_named(name).decide, 0

    def both(snapshot: Snapshot):
        nonlocal reserved
        decided = remembers(snapshot)
        if len(snapshot.waiting) > 1:
            again = policy_named(name).decide(anew(snapshot))
            kept = [one for one in decided if not isinstance(one, Waits)]
            assert kept == [one for one in again if not isinstance(one, Waits)]
            starts = {one.job_id: one.until_s for one in again if isinstance(one, Waits) and one.until_s}
            for one in decided:
                if isinstance(one, Waits) and one.until_s is not None:
                    reserved += 1
                    assert starts[one.job_id] == one.until_s
        return decided

    played = workload_named("cores", WorkloadSize(nodes=12, jobs=250, load=1.6, seed=4))
    run = play(played.nodes, played.trace, both)
    assert len(run.outcomes) == 250 and reserved > 50


@pytest.mark.parametrize("name", ("backfill", "shortest", "priority", "fair"))
def test_tenants_at_their_limits_are_passed_over_and_told_as_in_a_queue_that_is_read_from_its_start(
    name, monkeypatch
):
    monkeypatch.setattr(looks, "_EVERY_S", 0.0)  # each decision looks behind the first
    remembers, decisions, long, told = policy_named(name).decide, 0, 0, 0

    def both(snapshot: Snapshot):
        nonlocal decisions, long, told
        decided = remembers(snapshot)
        decisions += 1
        if len(snapshot.waiting) >= 200 and decisions % 7 == 0:
            again = policy_named(name).decide(anew(snapshot))
            starts = [one for one in decided if isinstance(one, JobPlacement)]
            assert starts == [one for one in again if isinstance(one, JobPlacement)]
            assert in_turn(decided) == in_turn(again)
            long += 1
            told += sum(isinstance(one, Waits) for one in in_turn(decided))
        return decided

    trace = []
    for number, one in enumerate(synthetic_trace(500, 96, 6.0, seed=3)):
        tenant, arrival_s = f"t{min(number % 7, number % 11)}", one.request.arrival_s / 50
        asked = replace(one.request, tenant=tenant, arrival_s=arrival_s, priority=number % 3)
        trace.append(replace(one, request=asked))
    quotas = tuple(TenantQuota(f"t{number}", 8, 2 * number + 120 * (number == 1)) for number in range(6))
    run = play(uniform_nodes(12, 8), trace, both, options=PlayOptions(quotas=quotas))
    assert len(run.outcomes) > 300 and long > 20 and told > 50


@pytest.mark.parametrize(
    ("name", "quotas"),
    (("conservative", ()), ("backfill+topology", ()), ("backfill", ()), ("backfill", (TenantQuota("t", 8),))),
)
def test_jobs_behind_the_first_of_a_long_queue_are_looked_at_every_few_seconds_where_that_is_costly(
    name, quotas
):
    """A gang that waits for everything; behind it, jobs of two GPUs that end long before it starts."""
    nodes = uniform_nodes(2, 4)
    free, running, queue = FreeCapacity(nodes), RunningTable(), JobQueue()
    for number in range(4):
        job = JobRequest(f"runs-{number}", 1, 2, predicted_s=1000.0)
        place = (TaskPlace(nodes[number // 2].name, (2 * (number % 2), 2 * (number % 2) + 1)),)
        free.allocate(job, place)
        running.put(RunningJob(job, place, 0.0, 1000.0))
    queue.add(JobRequest("gang", 2, 4, predicted_s=10.0), 0)
    for number in range(300):
        queue.add(JobRequest(f"small-{number}", 1, 2, predicted_s=5.0, arrival_s=1.0 + number), number + 1)
    decide, started = policy_named(name).decide, list[float]()
    limits = {quota.tenant: quota for quota in quotas}
    for number, now_s in enumerate((400.0, 401.0, 403.0, 404.9, 405.1)):
        if number:  # one job ends each time
            ended = running.drop(f"runs-{number - 1}")
            free.release(ended.request, ended.places)
        decided = decide(Snapshot(now_s, nodes, queue, running, free, limits))
        if any(isinstance(one, JobPlacement) for one in decided):
            started.append(now_s)
    cheap = name == "backfill" and not quotas
    assert started == ([401.0, 403.0, 404.9, 405.1] if cheap else [405.1])
