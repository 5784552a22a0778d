"""What a policy does besides starting jobs: nodes that fail again and again are cordoned, and small jobs are
moved where that makes room for a gang that waits. Each wraps another policy.
"""

import numpy as np

from cumulo.cluster.decide.decisions import Cordon, Decision, JobPlacement, Resize
from cumulo.cluster.decide.fit import Places, pack_gang, slots
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_MOST_MOVES = 8
_MOST_NODES = 32  # that are looked at, to make room for one gang
_MOST_GANGS = 3  # the first waiting ones, for which room is made


def cordoning(policy: Policy, failures: int = 3, at_most: float = 0.05) -> Policy:
    """Nodes with so many recent failures get no more tasks; never more than `at_most` of all nodes."""

    def wrapped(snapshot: Snapshot) -> list[Decision]:
        bad = [node for node in snapshot.nodes if node.failures >= failures and node.health == "ready"]
        if bad:
            out = sum(node.health != "ready" for node in snapshot.nodes)
            bad.sort(key=lambda node: -node.failures)
            bad = bad[: max(0, int(at_most * len(snapshot.nodes)) - out)]
        if bad:  # the next decision sees them cordoned
            return [Cordon(node.name, f"it failed {node.failures} times") for node in bad]
        return policy(snapshot)

    return wrapped


def defragmenting(policy: Policy, moves: int = _MOST_MOVES) -> Policy:
    """If the first waiting gang fits in the free GPUs but not on the nodes they are on, running jobs move
    together to make room, where that pays: the moves must cost less GPU time than the gang would wait."""

    def wrapped(snapshot: Snapshot) -> list[Decision]:
        decided = policy(snapshot)
        if any(isinstance(one, JobPlacement | Resize) for one in decided):
            return decided
        book = QuotaBook(snapshot)
        for job in snapshot.waiting[:_MOST_GANGS]:
            if book.refuses(job) is None and (found := _make_room(job, snapshot, moves)):
                return found
        return decided

    return wrapped


def _make_room(job: JobRequest, snapshot: Snapshot, moves: int) -> list[Decision]:
    free, each = snapshot.free, job.gpus_per_task
    if job.fractional or not each or free.whole[free.ready].sum() < job.gpus:
        return []
    if not 0 < job.tasks - slots(job, free) <= moves:
        return []
    then, moved = free.copy(), list[Resize]()
    ends_s = [one.expected_end_s for one in snapshot.running.values() if one.expected_end_s is not None]
    worth = job.gpus * max(0.0, min(ends_s, default=float("inf")) - snapshot.now_s)
    cost = 0.0
    nodes = _nearly_free(job, free)
    small = _small_jobs(nodes, each, snapshot)
    for node in nodes:
        for one in small[node]:
            if then.whole[node] >= each or len(moved) >= moves:
                break
            places = _elsewhere(one, then, each)
            if places is not None:
                cost += one.gpus * one.request.checkpoint_s
                if cost > worth:
                    return []  # with more moves it only becomes worse
                then.release(one.request, one.places)
                then.allocate(one.request, places)
                moved.append(Resize(one.job_id, places, f"it makes room for {job.job_id}"))
        if slots(job, then) >= job.tasks:
            gang = pack_gang(job, then)
            assert gang is not None  # there is room
            return [*moved, JobPlacement(job.job_id, gang, f"{len(moved)} jobs moved to make room for it")]
        if len(moved) >= moves:
            break
    return []


def _nearly_free(job: JobRequest, free: FreeCapacity) -> list[int]:
    """The nodes that have too few free GPUs for a task of the gang, those with the least to move first."""
    usable = free.ready & free.accepted(job.devices) if job.devices else free.ready
    nodes = np.flatnonzero(usable & (free.whole < job.gpus_per_task))
    order = np.argsort(-free.whole[nodes], kind="stable")
    return nodes[order[:_MOST_NODES]].tolist()  # type: ignore[no-any-return]


def _small_jobs(nodes: list[int], gpus: int, snapshot: Snapshot) -> dict[int, list[RunningJob]]:
    """On each of these nodes: the jobs that are on it alone, are smaller than a task of the gang, and may move."""
    index = snapshot.free.index
    found: dict[int, list[RunningJob]] = {node: [] for node in nodes}
    for one in snapshot.running.values():
        node = index[one.places[0].node]
        if node in found and one.request.preemptible and one.gpus < gpus and len(one.node_names) == 1:
            found[node].append(one)
    for some in found.values():
        some.sort(key=lambda one: (one.gpus, one.job_id))
    return found


def _elsewhere(one: RunningJob, free: FreeCapacity, gpus: int) -> Places | None:
    """Another node for a job, one that could not take a task of the gang anyway."""
    able = free.whole < gpus
    able[free.index[one.places[0].node]] = False
    return pack_gang(one.request.resized(one.tasks), free.among(able))
