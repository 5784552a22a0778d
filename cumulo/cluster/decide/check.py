"""What no policy may do: half a gang, more than a node has, a quota broken. Players refuse such decisions."""

from collections.abc import Sequence

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Snapshot


def violations(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[str]:
    """One sentence for each rule that the decisions break; []: all is well. Decisions are carried out together:
    what is evicted or resized stops first, then everything starts."""
    found: list[str] = []
    free, book = snapshot.free.copy(), QuotaBook(snapshot)
    had = dict(book.used)
    placed = {one.job_id for one in decisions if isinstance(one, JobPlacement)}
    waiting = {job.job_id: job for job in snapshot.waiting if job.job_id in placed} if placed else {}
    stopped: dict[str, JobRequest] = {}
    for decision in decisions:
        if isinstance(decision, Eviction | Resize):
            running = snapshot.running.get(decision.job_id)
            if running is None or decision.job_id in stopped:
                found.append(f"{decision.job_id} is moved, but does not run, or is moved twice")
                continue
            if not running.request.preemptible:
                found.append(f"{decision.job_id} is moved, but is not preemptible")
            stopped[decision.job_id] = running.request
            free.release(running.request, running.places)
            book.count(running.request, -running.gpus)
    for decision in decisions:
        if isinstance(decision, JobPlacement):
            job = waiting.pop(decision.job_id, None)
            if job is None:
                found.append(f"{decision.job_id} is placed, but does not wait")
                continue
        elif isinstance(decision, Resize) and decision.job_id in stopped:
            job = stopped[decision.job_id]
        else:
            continue
        found += _wrong_places(job, decision.places, free)
        book.count(job, len(decision.places) * job.milli_per_task / WHOLE_GPU)
    for name, quota in snapshot.quotas.items():  # a tenant that is over its limit already must not grow
        if book.used[name] > max(quota.most_gpus, had[name]) + 1e-9:
            more = f"its quota is {quota.gpus:g} and {quota.borrow_gpus:g} borrowed"
            found.append(f"tenant {name} gets {book.used[name]:g} GPUs, {more}")
    return found


def _wrong_places(job: JobRequest, places: Sequence[TaskPlace], free: FreeCapacity) -> list[str]:
    """What is wrong with them. Takes them from `free`, if the nodes and GPUs exist."""
    low, high = job.min_tasks or job.tasks, job.max_tasks or job.tasks
    found, each = list[str](), job.gpus_per_task
    if not low <= len(places) <= high:
        wanted = f"{low}" if low == high else f"{low} to {high}"
        found.append(f"{job.job_id} gets {len(places)} tasks of a gang of {wanted}")
    for place in places:
        number, where = free.index.get(place.node), f"{job.job_id} is placed on {place.node}, "
        if number is None:
            return [*found, f"{where}which does not exist"]
        node, gpus = free.nodes[number], place.gpus
        if not free.ready[number]:
            found.append(f"{where}which is {node.health}")
        if job.devices and node.device not in job.devices:
            found.append(f"{where}whose device is {node.device}")
        if len(set(gpus)) != each or len(gpus) != each or any(not 0 <= gpu < node.gpus for gpu in gpus):
            return [*found, f"{job.job_id} gets GPUs {gpus} of {place.node} for a task of {each}"]
    free.allocate(job, places)
    for number in free.numbers(places):
        left = free.cpu_milli[number], free.memory_mib[number], free.gpu_milli[number].min()
        if min(left) < 0:
            where = free.nodes[number].name
            found.append(f"{job.job_id} is placed on {where}, which has too little free")
    return found
