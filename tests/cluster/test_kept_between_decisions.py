"""What a policy keeps from one decision to the next changes no decision on other queues than the usual."""

import itertools
from dataclasses import replace

import pytest

from cumulo.cluster.decide.decisions import JobPlacement, Waits
from cumulo.cluster.decide.policies import policy_named
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
def test_tenants_at_their_limits_are_passed_over_and_told_as_in_a_queue_that_is_read_from_its_start(name):
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
