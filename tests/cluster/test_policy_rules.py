"""What no policy ever does, over random snapshots: half a gang, overcommitment, a broken quota; and that decisions
on record are decided the same again."""

import random

import pytest

from cumulo.cluster.decide.check import violations
from cumulo.cluster.decide.decisions import Eviction, JobPlacement, Resize
from cumulo.cluster.decide.fit import pack_gang
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, SpeedTable, StepProfile, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.packing import (
    GradientDescent,
    best_fit,
    dot_product,
    gpu_packing,
    place_by_score,
    task_mix,
)
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota, snapshot_of
from cumulo.cluster.decision_log import DecisionLog, replay

NAMES = (
    "fifo", "backfill", "conservative", "shortest", "las", "fair", "priority", "elastic", "goodput",
    "las+emptiest", "backfill+topology", "fair+topology", "priority+topology+cordon", "shortest+cordon",
)  # fmt: skip
EACH = 140  # snapshots per policy: over two thousand in all


_KINDS = ("whole", "whole", "share", "cpu", "elastic")


def random_snapshot(seed: int, kinds: tuple[str, ...] = _KINDS) -> Snapshot:
    draw = random.Random(seed)
    gpus = draw.choice((2, 4, 8))
    nodes = [
        ClusterNode(
            f"n{number}", gpus, draw.choice(("a", "b")), draw.choice((8000, 1 << 30)), leaf=f"l{number % 3}",
            health=draw.choice(("ready",) * 8 + ("cordoned", "down")), failures=draw.choice((0, 0, 0, 4)),
        )
        for number in range(draw.randint(1, 12))
    ]  # fmt: skip
    free, running = FreeCapacity(nodes), []
    for number in range(draw.randint(0, 14)):
        job = random_job(draw, f"r{number}", gpus, kinds)
        places = pack_gang(job, free)
        if places is not None:
            free.allocate(job, places)
            ends = draw.choice((None, 100.0 + draw.uniform(1, 500)))
            running.append(RunningJob(job, places, draw.uniform(0, 100), ends, draw.randint(0, 3)))
    waiting = sorted(
        (random_job(draw, f"w{number}", gpus, kinds) for number in range(draw.randint(0, 10))),
        key=lambda job: job.arrival_s,
    )
    quotas = [TenantQuota(name, draw.randint(0, 30), draw.randint(0, 10)) for name in draw.sample("xyz", 2)]
    return snapshot_of(100.0, nodes, waiting, running, quotas if draw.random() < 0.6 else [])


def random_job(draw: random.Random, name: str, gpus: int, kinds: tuple[str, ...] = _KINDS) -> JobRequest:
    tasks = draw.choice((1, 1, 2, 3, 6))
    kind = draw.choice(kinds)
    table = tuple(float(size) ** 0.8 for size in range(1, 17))
    return JobRequest(
        name, tasks, 0 if kind == "cpu" else 1 if kind in ("share", "elastic") else draw.randint(1, gpus),
        draw.choice((250, 500, 810)) if kind == "share" else 1000, draw.choice((0, 0, 2000)),
        devices=draw.choice(((), (), ("a",))), tenant=draw.choice("xyz"), priority=draw.randint(0, 2),
        arrival_s=draw.uniform(0, 100), predicted_s=draw.choice((None, draw.uniform(1, 900))),
        min_tasks=1 if kind == "elastic" else None, max_tasks=16 if kind == "elastic" else None,
        preemptible=draw.random() < 0.8, checkpoint_s=draw.choice((0.0, 30.0)),
        step=draw.choice((None, StepProfile(0.5, 1e9, 1e8))),
        speed=SpeedTable(table[:gpus], table) if kind == "elastic" else None,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_breaks_a_rule_on_any_snapshot(name):
    policy = policy_named(name).decide
    placed = 0
    for seed in range(EACH):
        snapshot = random_snapshot(seed)
        before = snapshot.free.copy()
        decisions = policy(snapshot)
        assert violations(snapshot, decisions) == [], seed
        assert (before.gpu_milli == snapshot.free.gpu_milli).all(), "a policy never changes its snapshot"
        placed += sum(isinstance(one, JobPlacement | Resize) for one in decisions)
    assert placed > EACH / 4, "the rule is empty for a policy that places nothing"


@pytest.mark.parametrize("rule", (best_fit, dot_product, gpu_packing, "fgd"))
def test_packing_rules_break_none_either(rule):
    for seed in range(EACH):
        snapshot = random_snapshot(seed)
        jobs = [*snapshot.waiting, *(job.request for job in snapshot.running.values())]
        scorer = (
            GradientDescent(task_mix(jobs)) if rule == "fgd" and jobs else best_fit if rule == "fgd" else rule
        )
        snapshot = snapshot_of(0.0, snapshot.nodes, snapshot.waiting, tuple(snapshot.running.values()))
        for job in (one for one in snapshot.waiting if one.tasks == 1):
            place = place_by_score(job, snapshot.free, scorer, seed)
            if place is not None:
                assert violations(snapshot, [JobPlacement(job.job_id, (place,))]) == [], seed


@pytest.mark.parametrize("name", ("backfill", "fair", "priority+topology", "elastic"))
def test_decisions_on_record_are_decided_the_same_again(name, tmp_path):
    policy, log = policy_named(name).decide, DecisionLog(tmp_path / "decisions.jsonl")
    for snapshot in map(random_snapshot, range(30)):
        log.add(name, snapshot, policy(snapshot))
    turns, differing = replay(log.path, lambda name: policy_named(name).decide)
    assert turns >= 28 and differing == []  # two snapshots may be the same
    assert replay(log.path, lambda name: lambda snapshot: [])[1]


def test_the_rules_are_found_broken():
    nodes = [ClusterNode("n0", 4), ClusterNode("n1", 4, health="down")]
    gang, runs = (
        JobRequest("gang", 2, 2, tenant="x"),
        RunningJob(JobRequest("runs", 1, 3), (TaskPlace("n0", (0, 1, 2)),)),
    )
    snapshot = snapshot_of(0.0, nodes, [gang], [runs], [TenantQuota("x", 1)])

    def broken(*decisions):
        return " ".join(violations(snapshot, decisions))

    one = TaskPlace("n0", (2, 3))
    assert "1 tasks of a gang of 2" in broken(JobPlacement("gang", (one,)))
    assert "too little free" in broken(JobPlacement("gang", (one, TaskPlace("n0", (0, 1)))))
    assert "which is down" in broken(JobPlacement("gang", (one, TaskPlace("n1", (0, 1)))))
    assert "quota is 1" in broken(Eviction("runs"), JobPlacement("gang", (one, TaskPlace("n0", (0, 1)))))
    assert "does not run" in broken(Eviction("nobody"))
    assert "does not exist" in broken(JobPlacement("gang", (one, TaskPlace("n9", (0, 1)))))


@pytest.mark.parametrize("name", ("elastic", "goodput"))
def test_a_tenants_elastic_jobs_do_not_grow_by_what_its_others_keep(name):
    policy, resized = policy_named(name).decide, 0
    for seed in range(200):
        snapshot = random_snapshot(seed, ("elastic", "elastic", "whole"))
        decisions = policy(snapshot)
        assert violations(snapshot, decisions) == [], seed
        resized += bool(snapshot.quotas) * sum(isinstance(one, Resize) for one in decisions)
    assert resized > 20


def test_an_elastic_job_that_cannot_grow_is_not_restarted():
    """It wants both GPUs of a node, and each node has one that is free or its own."""
    nodes = [ClusterNode("n0", 2), ClusterNode("n1", 2)]
    fixed = [
        RunningJob(JobRequest(f"fixed{number}"), (TaskPlace(f"n{number}", (0,)),)) for number in range(2)
    ]
    job = JobRequest("grows", min_tasks=1, max_tasks=2, speed=SpeedTable((1.0, 1.9), (1.0, 1.0)))
    grows = RunningJob(job, (TaskPlace("n0", (1,)),))
    for name in ("elastic", "goodput"):
        decide = policy_named(name).decide
        assert decide(snapshot_of(1e4, nodes, [], [*fixed, grows])) == []
        (grown,) = decide(snapshot_of(1e4, nodes, [], [fixed[1], grows]))
        assert isinstance(grown, Resize) and len(grown.places) == 2
