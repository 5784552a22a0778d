"""First come, first served: the head of the queue is placed when its whole gang fits, and nobody overtakes it."""

from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fit import pack_gang, slots
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Snapshot


def fifo(snapshot: Snapshot) -> list[Decision]:
    decided: list[Decision] = []
    free, book = snapshot.free, QuotaBook(snapshot)
    for job in snapshot.waiting:
        places = pack_gang(job, free)
        refused = why_not(job, free) if places is None else book.refuses(job)
        if places is None or refused is not None:
            decided.append(Waits(job.job_id, refused or ""))
            break
        free = free.copy() if free is snapshot.free else free
        free.take(job, places)
        book.count(job, job.gpus)
        decided.append(JobPlacement(job.job_id, places, "first in the queue, and its whole gang fits"))
    return decided


def why_not(job: JobRequest, free: FreeCapacity) -> str:
    """One sentence for the person who asks why a job waits."""
    able = slots(job, free)
    each = f"{job.gpu_milli / 1000:g} GPU" if job.fractional else f"{job.gpus_per_task} GPUs"
    if not job.gpus_per_task:
        each = f"{job.cpu_milli / 1000:g} cores"
    kind = f" of {' or '.join(job.devices)}" if job.devices else ""
    return f"the gang needs {job.tasks} tasks with {each}{kind} each; {able} fit now"
