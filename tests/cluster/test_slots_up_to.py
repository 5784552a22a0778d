"""What would fit if jobs up to a priority stopped is the same, kept up to date, as counted anew."""

import random
from functools import partial

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.policy import preemptible
from cumulo.cluster.decide.policy.preemptible import preemptible_up_to
from cumulo.cluster.decide.releases import Releases
from cumulo.cluster.decide.running import RunningTable
from cumulo.cluster.decide.snapshot import Snapshot
from tests.cluster.coming_and_going import come_or_go


def some_job(draw: random.Random, step: int) -> JobRequest:
    """Priorities are not seen in order, and some only late."""
    share = draw.random() < 0.2
    return JobRequest(
        f"j{step}", draw.choice((1, 1, 2, 5)), 1 if share else draw.choice((1, 2, 4)), 300 if share else 1000,
        devices=draw.choice(((), ("a",), ("b", "c"))), priority=draw.choice((5, 3, 8, -2, 4)[: 2 + step // 80]),
        preemptible=draw.random() < 0.8,
    )  # fmt: skip


def counted_anew(
    job: JobRequest, nodes: list[ClusterNode], free: FreeCapacity, running: RunningTable, level: int
) -> int:
    """Tasks that fit if all preemptible jobs up to this priority stopped."""
    milli = free.gpu_milli.sum(axis=1).tolist()
    for one in running.values():
        if one.request.preemptible and one.request.priority <= level:
            for place in one.places:
                milli[free.index[place.node]] += one.request.milli_per_task
    able = [
        number for number, node in enumerate(nodes)
        if free.ready[number] and (not job.devices or node.device in job.devices)
    ]  # fmt: skip
    return sum(milli[number] // 1000 // job.gpus_per_task for number in able)


def test_slots_up_to_a_priority_are_kept_while_jobs_come_and_go_and_nodes_fail(monkeypatch):
    monkeypatch.setattr(preemptible, "_MOST_MOVED", 60)
    draw, found = random.Random(21), set()
    nodes = [ClusterNode(f"n{n}", draw.choice((2, 4, 8)), draw.choice("abc")) for n in range(9)]
    free, running = FreeCapacity(nodes), RunningTable()
    releases = Releases(free, {})
    for step in range(400):
        come_or_go(draw, partial(some_job, draw, step), step, free, running, releases)
        if step % 50 == 0:
            free.set_ready(np.array([draw.random() < 0.8 for _ in nodes]))
        if step % 3 == 0:
            continue  # not after each change
        up_to = preemptible_up_to(Snapshot(0.0, nodes, [], running, free))
        for _ in range(3):
            devices = draw.choice(((), ("a",), ("c", "a"), ("a", "b", "c"), ("none",)))
            job = JobRequest(
                "urgent", draw.choice((1, 2, 5, 9)), draw.choice((1, 2, 3, 8, 9)), devices=devices
            )
            enough = [
                number for number, level in enumerate(up_to.levels)
                if counted_anew(job, nodes, free, running, level) >= job.tasks
            ]  # fmt: skip
            expected = enough[0] if enough else None
            assert up_to.first_of_all(job, free) == expected
            found.add(expected)
    assert up_to.levels == [-2, 3, 4, 5, 8] and found >= {None, 0, 1, 2, 3}
