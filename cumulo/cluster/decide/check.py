"""What no policy may do: half a gang, more than a node has, a quota broken. Players refuse such decisions."""

from collections.abc import Sequence

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.queue import JobQueue
from cumulo.cluster.decide.running import table_of
from cumulo.cluster.decide.snapshot import Snapshot

_STOPS = (Eviction, Resize)


def violations(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[str]:
    """One sentence for each rule that the decisions break; []: all is well. Decisions are carried out together:
    what is evicted or resized stops first, then everything starts."""
    found: list[str] = []
    books = _Books(snapshot.free)
    placed = {one.job_id for one in decisions if isinstance(one, JobPlacement)}
    waiting = _those_that_wait(snapshot.waiting, placed)
    change: dict[str, float] = {}  # GPUs that tenants gain
    stopped: set[str] = set()
    for decision in decisions:
        if isinstance(decision, _STOPS):
            running = snapshot.running.get(decision.job_id)
            if running is None or decision.job_id in stopped:
                found.append(f"{decision.job_id} is moved, but does not run, or is moved twice")
                continue
            if not running.request.preemptible:
                found.append(f"{decision.job_id} is moved, but is not preemptible")
            stopped.add(decision.job_id)
            books.give_back(running.request, running.places)
            change[running.request.tenant] = change.get(running.request.tenant, 0.0) - running.gpus
    for decision in decisions:
        if isinstance(decision, JobPlacement):
            job = waiting.pop(decision.job_id, None)
            if job is None:
                found.append(f"{decision.job_id} is placed, but does not wait")
                continue
        elif isinstance(decision, Resize) and decision.job_id in stopped:
            job = snapshot.running[decision.job_id].request
        else:
            continue
        found += _wrong_places(job, decision.places, books)
        gained = len(decision.places) * job.milli_per_task / WHOLE_GPU
        change[job.tenant] = change.get(job.tenant, 0.0) + gained
    return found + _quotas_broken(snapshot, change)


def _those_that_wait(waiting: Sequence[JobRequest], placed: set[str]) -> dict[str, JobRequest]:
    if isinstance(waiting, JobQueue):
        found = ((name, waiting.find(name)) for name in placed)
        return {name: job for name, job in found if job is not None}
    return {job.job_id: job for job in waiting if job.job_id in placed} if placed else {}


def left_on(free: FreeCapacity, node: int) -> list[int]:
    """What is free on a node: CPU, memory, then the GPUs."""
    return [free.cpu_milli.item(node), free.memory_mib.item(node), *free.gpu_milli[node].tolist()]


class _Books:
    """What is free on the nodes that the decisions touch."""

    def __init__(self, free: FreeCapacity) -> None:
        self.free = free
        self.touched: dict[int, list[int]] = {}

    def left_on(self, node: int) -> list[int]:
        known = self.touched.get(node)
        if known is None:
            known = self.touched[node] = left_on(self.free, node)
        return known

    def give_back(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        index, share, cores = self.free.index, job.gpu_milli, job.cpu_milli or job.memory_mib
        last, left = "", list[int]()
        for place in places:
            if place.node != last or not left:  # neighbours are on one node: it is looked up once
                last, left = place.node, self.left_on(index[place.node])
            if cores:
                left[0] += job.cpu_milli
                left[1] += job.memory_mib
            for gpu in place.gpus:
                left[gpu + 2] += share


def take_from(left: list[int], job: JobRequest, gpus: Sequence[int], sign: int) -> bool:
    """Takes a task (-1) from what is left of a node, or gives it back (1); whether nothing is overcommitted."""
    enough = True
    if job.cpu_milli or job.memory_mib:
        left[0] += sign * job.cpu_milli
        left[1] += sign * job.memory_mib
        enough = left[0] >= 0 and left[1] >= 0
    share = sign * job.gpu_milli
    for gpu in gpus:
        left[gpu + 2] += share
        if left[gpu + 2] < 0:
            enough = False
    return enough


def has_left(left: Sequence[int], job: JobRequest, gpus: Sequence[int]) -> bool:
    """Whether a task of this job could have these GPUs."""
    short = job.cpu_milli > left[0] or job.memory_mib > left[1]
    for gpu in gpus:
        short = short or left[gpu + 2] < job.gpu_milli
    return not short


def _wrong_places(job: JobRequest, places: Sequence[TaskPlace], books: _Books) -> list[str]:
    """And takes the places, if the nodes exist."""
    low, high = job.min_tasks or job.tasks, job.max_tasks or job.tasks
    found, free, each = [], books.free, job.gpus_per_task
    if not low <= len(places) <= high:
        wanted = f"{low}" if low == high else f"{low} to {high}"
        found.append(f"{job.job_id} gets {len(places)} tasks of a gang of {wanted}")
    last, left, room = "", list[int](), 0
    whole = each == 1 and job.gpu_milli == WHOLE_GPU and not job.cpu_milli and not job.memory_mib
    for place in places:
        gpus = place.gpus
        if place.node != last or not left:  # neighbours are on one node: it is looked up once
            number = free.index.get(place.node)
            if number is None:
                return [*found, f"{job.job_id} is placed on {place.node}, which does not exist"]
            node = free.nodes[number]
            if not free.ready[number]:
                found.append(f"{job.job_id} is placed on {place.node}, which is {node.health}")
            if job.devices and node.device not in job.devices:
                found.append(f"{job.job_id} is placed on {place.node}, whose device is {node.device}")
            last, left, room = place.node, books.left_on(number), node.gpus
        if whole and len(gpus) == 1 and 0 <= gpus[0] < room and left[gpus[0] + 2] >= WHOLE_GPU:
            left[gpus[0] + 2] -= WHOLE_GPU  # as most are
            continue
        if len(gpus) != each or (
            each and (min(gpus) < 0 or max(gpus) >= room or (each > 1 and len(set(gpus)) != each))
        ):
            return [*found, f"{job.job_id} gets GPUs {gpus} of {place.node} for a task of {each}"]
        if not take_from(left, job, gpus, -1):
            found.append(f"{job.job_id} is placed on {place.node}, which has too little free")
    return found


def _quotas_broken(snapshot: Snapshot, change: dict[str, float]) -> list[str]:
    """A tenant has at most its quota and what it may borrow. One that is over already must not grow."""
    if not snapshot.quotas:
        return []
    milli = table_of(snapshot.running).milli
    found = []
    for name, gained in change.items():
        quota = snapshot.quotas.get(name)
        if quota is None:
            continue
        had = milli.get(name, 0) / WHOLE_GPU
        has = had + gained
        if has > max(quota.gpus + quota.borrow_gpus, had) + 1e-9:
            found.append(
                f"tenant {name} gets {has:g} GPUs, its quota is {quota.gpus:g} and {quota.borrow_gpus:g} borrowed"
            )
    return found
