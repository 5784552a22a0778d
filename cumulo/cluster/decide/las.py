"""Least attained service in two queues: Tiresias' discretised 2D-LAS (Gu et al., NSDI 2019). Nothing is
predicted: jobs that have had little GPU time go before those that have had much, which are preempted for them."""

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Waits
from cumulo.cluster.decide.fifo import why_not
from cumulo.cluster.decide.fit import pack_gang, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.queueing import Placer
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot


def least_attained_service(place: Placer, threshold_gpu_s: float = 16 * 3600.0, queues: int = 2) -> Policy:
    """`threshold_gpu_s`: GPU seconds after which a job goes to the second queue (the published default: 16
    hours); each further queue begins at twice that."""

    def policy(snapshot: Snapshot) -> list[Decision]:
        everyone = [(job, job.attained_gpu_s) for job in snapshot.waiting]
        everyone += [(job.request, job.attained_gpu_s(snapshot.now_s)) for job in snapshot.running.values()]

        def queue_of(attained: float) -> int:
            level = 0
            while level + 1 < queues and attained >= threshold_gpu_s * 2**level:
                level += 1
            return level

        ordered = [job for job, _ in sorted(everyone, key=lambda one: (queue_of(one[1]), one[0].arrival_s))]
        fixed = {name for name, one in snapshot.running.items() if not one.request.preemptible}
        chosen, budget = set(fixed), float(snapshot.free.gpus[snapshot.free.ready].sum())
        budget -= sum(snapshot.running[name].gpus for name in fixed)
        for job in ordered:
            if job.job_id not in fixed and job.gpus <= budget:
                chosen.add(job.job_id)
                budget -= job.gpus
        decided: list[Decision] = []
        free, book = snapshot.free.copy(), QuotaBook(snapshot)
        for name, running in snapshot.running.items():
            if name not in chosen and running.request.preemptible:
                decided.append(Eviction(name, "jobs that had less GPU time go first"))
                free.give(running.request, running.places)
                book.count(running.request, -running.gpus)
        for job in ordered:
            if job.job_id in chosen and job.job_id not in snapshot.running:
                places = place(job, free)
                refused = why_not(job, free) if places is None else book.refuses(job)
                if places is None or refused is not None:
                    decided.append(Waits(job.job_id, refused or ""))
                else:
                    free.take(job, places)
                    book.count(job, job.gpus)
                    decided.append(
                        JobPlacement(job.job_id, places, "among those that had the least GPU time")
                    )
        return decided

    return policy


def emptiest_first(job: JobRequest, free: FreeCapacity) -> tuple[TaskPlace, ...] | None:
    """Tasks of one GPU, always from the node with the most free GPUs: how the published simulators place."""
    if job.gpus_per_task != 1 or job.fractional:
        return pack_gang(job, free)
    fits = tasks_that_fit(job, free)
    if int(fits.sum()) < job.tasks:
        return None
    left = {node: int(fits[node]) for node in fits.nonzero()[0].tolist()}
    places: list[TaskPlace] = []
    while len(places) < job.tasks:
        node = max(left, key=lambda number: (left[number], -number))
        able = [gpu for gpu, share in enumerate(free.gpu_milli[node].tolist()) if share == 1000]
        taken = able[: min(left[node], job.tasks - len(places))]
        places += [TaskPlace(free.nodes[node].name, (gpu,)) for gpu in taken]
        left.pop(node)
    return tuple(places)
