"""What a policy does besides starting jobs: nodes that fail again and again are cordoned, and small jobs are
moved where that makes room for a gang that waits. Each wraps another policy.
"""

from collections.abc import Iterator, Sequence

from cumulo.cluster.decide.decisions import Cordon, Decision, JobPlacement, Resize
from cumulo.cluster.decide.fit import first_gpus, only_gpus, pack_gang, slots, tightest
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, members, node_set
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.running import jobs_on_nodes
from cumulo.cluster.decide.snapshot import Policy, SameState, Snapshot

_MOST_MOVES = 8
_MOST_NODES = 32  # that are looked at, to make room for one gang


def cordoning(policy: Policy, failures: int = 3, at_most: float = 0.05) -> Policy:
    """Nodes with so many recent failures get no more tasks; never more than `at_most` of all nodes."""

    healthy: Sequence[ClusterNode] | None = None  # these were looked at, and none of them is to be cordoned

    def wrapped(snapshot: Snapshot) -> list[Decision]:
        nonlocal healthy
        if snapshot.nodes is healthy:
            return policy(snapshot)
        out = sum(node.health != "ready" for node in snapshot.nodes)
        allowed = int(at_most * len(snapshot.nodes)) - out
        bad = sorted(
            (node for node in snapshot.nodes if node.health == "ready" and node.failures >= failures),
            key=lambda node: -node.failures,
        )[: max(0, allowed)]
        if not bad:
            healthy = snapshot.nodes if isinstance(snapshot.nodes, tuple) else None
            return policy(snapshot)
        decided: list[Decision] = [Cordon(node.name, f"it failed {node.failures} times") for node in bad]
        return decided  # the next decision sees the node cordoned

    return wrapped


def defragmenting(policy: Policy, moves: int = _MOST_MOVES) -> Policy:
    """If the first waiting gang fits in the free GPUs but not on the nodes they are on, running jobs move
    together to make room, where that pays: the moves must cost less GPU time than the gang would wait."""
    # Jobs for which there is no room to be made, and the state of the cluster in which that is so: as long as
    # nothing starts or ends, the same moves would be found, and time alone makes them worth less.
    hopeless: dict[str, JobRequest] = {}
    of_state: SameState | None = None

    def wrapped(snapshot: Snapshot) -> list[Decision]:
        nonlocal hopeless, of_state
        if snapshot.releases is not None:
            snapshot.releases.begin()
        decided = policy(snapshot)
        if any(isinstance(one, JobPlacement | Resize) for one in decided):
            return decided
        book = QuotaBook(snapshot)
        if of_state is None or not of_state.holds(snapshot):
            hopeless, of_state = {}, SameState.noted(snapshot)
        for job in snapshot.waiting[:3]:
            if hopeless.get(job.job_id) is job or book.refuses(job) is not None:
                continue
            found = _make_room(job, snapshot, moves)
            if found is not None:
                return found
            hopeless[job.job_id] = job
        return decided

    return wrapped


def _make_room(job: JobRequest, snapshot: Snapshot, moves: int) -> list[Decision] | None:
    free, each = snapshot.free, job.gpus_per_task
    if (
        job.fractional
        or not each
        or free.free_gpus < job.gpus
        or not 0 < job.tasks - slots(job, free) <= moves
    ):
        return None
    then = free  # copied when the first job moves
    moved: list[Resize] = []
    on = jobs_on_nodes(snapshot.running)
    cost, worth = 0.0, job.gpus * max(0.0, _first_end_s(snapshot) - snapshot.now_s)
    for node in _nearly_free(job, free):
        name = free.nodes[node].name
        small = [
            one for one in on.get(name, {}).values()
            if one.request.preemptible and len(one.node_names) == 1 and one.gpus < each
        ]  # fmt: skip
        for one in sorted(small, key=lambda one: (one.gpus, one.job_id)):
            if int(then.whole[node]) >= each or len(moved) >= moves:
                break
            places = _elsewhere(one, then, each)
            if places is not None:
                cost += one.gpus * one.request.checkpoint_s
                if cost > worth:
                    return None  # with more moves it only becomes worse
                then = free.copy() if then is free else then
                then.release(one.request, one.places)
                then.allocate(one.request, places)
                moved.append(Resize(one.job_id, places, f"it makes room for {job.job_id}"))
        if slots(job, then) >= job.tasks:
            places = pack_gang(job, then)
            why = f"{len(moved)} jobs moved to make room for it"
            return None if places is None else [*moved, JobPlacement(job.job_id, places, why)]
        if len(moved) >= moves:
            break
    return None


def _nearly_free(job: JobRequest, free: FreeCapacity) -> Iterator[int]:
    """The nodes that have too few free GPUs for a task of the gang, those with the least to move first."""
    left, usable = _MOST_NODES, free.usable_set(job.devices)
    for room in range(min(job.gpus_per_task, len(free.room)) - 1, -1, -1):
        some = members(free.room[room] & usable, left)
        yield from some
        left -= len(some)


def _elsewhere(one: RunningJob, free: FreeCapacity, gpus: int) -> tuple[TaskPlace, ...] | None:
    """Another node for a job, one that could not take a task of the gang anyway."""
    home = free.index[one.places[0].node]
    if one.tasks == 1 and only_gpus(one.request):  # as most are: the sets of nodes tell
        among = free.usable_set(one.request.devices) & ~(1 << home)
        node = tightest(free, one.request.gpus_per_task, among, below=gpus)
        return None if node is None else (first_gpus(one.request, free, node),)
    able = free.whole < gpus
    able[home] = False
    return pack_gang(one.request.resized(one.tasks), free.narrowed(node_set(able)))


def _first_end_s(snapshot: Snapshot) -> float:
    if snapshot.releases is not None:
        return snapshot.releases.by_end[0][0] if snapshot.releases.by_end else float("inf")
    ends = (one.expected_end_s for one in snapshot.running.values())
    return min((end_s for end_s in ends if end_s is not None), default=float("inf"))
