"""What a policy does besides starting jobs: nodes that fail again and again are cordoned, and small jobs are
moved where that makes room for a gang that waits. Each wraps another policy.
"""

from cumulo.cluster.decide.decisions import Cordon, Decision, JobPlacement, Resize
from cumulo.cluster.decide.fit import pack_gang, slots
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_MOST_MOVES = 8


def cordoning(policy: Policy, failures: int = 3, at_most: float = 0.05) -> Policy:
    """Nodes with so many recent failures get no more tasks; never more than `at_most` of all nodes."""

    def wrapped(snapshot: Snapshot) -> list[Decision]:
        out = sum(node.health != "ready" for node in snapshot.nodes)
        allowed = int(at_most * len(snapshot.nodes)) - out
        bad = sorted(
            (node for node in snapshot.nodes if node.health == "ready" and node.failures >= failures),
            key=lambda node: -node.failures,
        )[: max(0, allowed)]
        if not bad:
            return policy(snapshot)
        decided: list[Decision] = [Cordon(node.name, f"it failed {node.failures} times") for node in bad]
        return decided  # the next decision sees the node cordoned

    return wrapped


def defragmenting(policy: Policy, moves: int = _MOST_MOVES) -> Policy:
    """If the first waiting gang fits in the free GPUs but not on the nodes they are on, running jobs move
    together to make room, where that pays: the moves must cost less GPU time than the gang would wait."""

    def wrapped(snapshot: Snapshot) -> list[Decision]:
        decided = policy(snapshot)
        if any(not isinstance(one, Cordon) and isinstance(one, JobPlacement | Resize) for one in decided):
            return decided
        for job in snapshot.waiting[:3]:
            found = _make_room(job, snapshot, moves)
            if found is not None:
                return found
        return decided

    return wrapped


def _make_room(job: JobRequest, snapshot: Snapshot, moves: int) -> list[Decision] | None:
    free = snapshot.free
    if job.fractional or not job.gpus_per_task or pack_gang(job, free) is not None:
        return None
    if free.free_gpus < job.gpus:
        return None
    then = free.copy()
    moved: list[Resize] = []
    by_node: dict[str, list[RunningJob]] = {}
    for one in snapshot.running.values():
        if one.request.preemptible and len(one.node_names) == 1 and one.gpus < job.gpus_per_task:
            by_node.setdefault(one.places[0].node, []).append(one)
    # Nodes with the least to move first.
    order = sorted(by_node, key=lambda name: sum(one.gpus for one in by_node[name]))
    for name in order:
        if len(moved) >= moves:
            break
        for one in sorted(by_node[name], key=lambda one: one.gpus):
            if int(then.whole[then.index[name]]) >= job.gpus_per_task or len(moved) >= moves:
                break
            places = _elsewhere(one, then, job.gpus_per_task)
            if places is not None:
                then.give(one.request, one.places)
                then.take(one.request, places)
                moved.append(Resize(one.job_id, places, f"it makes room for {job.job_id}"))
        if slots(job, then) >= job.tasks:
            return _if_it_pays(job, snapshot, then, moved)
    return None


def _elsewhere(one: RunningJob, free: FreeCapacity, gpus: int) -> tuple[TaskPlace, ...] | None:
    """Another node for a job, one that could not take a task of the gang anyway."""
    trial = free.copy()
    able = trial.ready & (trial.whole < gpus)
    able[trial.index[one.places[0].node]] = False
    trial.set_ready(able)
    return pack_gang(one.request.resized(one.tasks), trial)


def _if_it_pays(
    job: JobRequest, snapshot: Snapshot, then: FreeCapacity, moved: list[Resize]
) -> list[Decision] | None:
    cost = sum(
        snapshot.running[one.job_id].gpus * snapshot.running[one.job_id].request.checkpoint_s for one in moved
    )
    ends = [one.expected_end_s for one in snapshot.running.values() if one.expected_end_s is not None]
    waits_s = max(0.0, min(ends) - snapshot.now_s) if ends else float("inf")
    places = pack_gang(job, then)
    if places is None or cost > job.gpus * waits_s:
        return None
    return [*moved, JobPlacement(job.job_id, places, f"{len(moved)} jobs moved to make room for it")]
