"""What no policy may do: half a gang, more than a node has, a quota broken. Players refuse such decisions."""

from collections.abc import Sequence

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.snapshot import Snapshot


def violations(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[str]:
    """One sentence for each rule that the decisions break; []: all is well. Decisions are carried out together:
    what is evicted or resized stops first, then everything starts."""
    found: list[str] = []
    free = snapshot.free.copy()
    waiting = {job.job_id: job for job in snapshot.waiting}
    running = {name: job.places for name, job in snapshot.running.items()}
    for decision in decisions:
        if isinstance(decision, Eviction | Resize) and decision.job_id in running:
            free.give(snapshot.running[decision.job_id].request, running.pop(decision.job_id))
    for decision in decisions:
        if isinstance(decision, JobPlacement):
            job = waiting.pop(decision.job_id, None)
            if job is None:
                found.append(f"{decision.job_id} is placed, but does not wait")
                continue
            found += _wrong_places(job, decision.places, free)
            running[job.job_id] = decision.places
        elif isinstance(decision, Eviction | Resize):
            if decision.job_id not in snapshot.running or decision.job_id in running:
                found.append(f"{decision.job_id} is moved, but does not run, or is moved twice")
                continue
            job = snapshot.running[decision.job_id].request
            if not job.preemptible:
                found.append(f"{job.job_id} is moved, but is not preemptible")
            if isinstance(decision, Resize):
                found += _wrong_places(job, decision.places, free)
                running[job.job_id] = decision.places
    return found + _quotas_broken(snapshot, running)


def _wrong_places(job: JobRequest, places: Sequence[TaskPlace], free: FreeCapacity) -> list[str]:
    """And takes the places, if the nodes exist."""
    low, high = job.min_tasks or job.tasks, job.max_tasks or job.tasks
    found = []
    if not low <= len(places) <= high:
        wanted = f"{low}" if low == high else f"{low} to {high}"
        found.append(f"{job.job_id} gets {len(places)} tasks of a gang of {wanted}")
    for place in places:
        number = free.index.get(place.node)
        if number is None:
            return [*found, f"{job.job_id} is placed on {place.node}, which does not exist"]
        node = free.nodes[number]
        if not free.ready[number]:
            found.append(f"{job.job_id} is placed on {place.node}, which is {node.health}")
        if job.devices and node.device not in job.devices:
            found.append(f"{job.job_id} is placed on {place.node}, whose device is {node.device}")
        if len(set(place.gpus)) != job.gpus_per_task or any(not 0 <= gpu < node.gpus for gpu in place.gpus):
            return [
                *found,
                f"{job.job_id} gets GPUs {place.gpus} of {place.node} for a task of {job.gpus_per_task}",
            ]
        free.take(job, [place])
        if (free.gpu_milli[number] < 0).any() or free.cpu_milli[number] < 0 or free.memory_mib[number] < 0:
            found.append(f"{job.job_id} is placed on {place.node}, which has too little free")
    return found


def _quotas_broken(snapshot: Snapshot, running: dict[str, tuple[TaskPlace, ...]]) -> list[str]:
    """A tenant has at most its quota and what it may borrow. One that is over already must not grow."""
    if not snapshot.quotas:
        return []
    requests = {job.job_id: job for job in snapshot.waiting}
    requests |= {name: job.request for name, job in snapshot.running.items()}
    used: dict[str, float] = {}
    for name, places in running.items():
        job = requests[name]
        used[job.tenant] = used.get(job.tenant, 0.0) + len(places) * job.milli_per_task / WHOLE_GPU
    before = tenant_gpus(snapshot)
    return [
        f"tenant {name} gets {used[name]:g} GPUs, its quota is {quota.gpus:g} and {quota.borrow_gpus:g} borrowed"
        for name, quota in snapshot.quotas.items()
        if used.get(name, 0.0) > max(quota.gpus + quota.borrow_gpus, before.get(name, 0.0)) + 1e-9
    ]


def tenant_gpus(snapshot: Snapshot) -> dict[str, float]:
    """GPUs that each tenant's running jobs have."""
    used: dict[str, float] = {}
    for job in snapshot.running.values():
        used[job.request.tenant] = used.get(job.request.tenant, 0.0) + job.gpus
    return used
