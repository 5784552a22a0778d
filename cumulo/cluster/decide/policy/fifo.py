"""First come, first served: the head of the queue is placed when its whole gang fits, and nobody overtakes it."""

from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fit import pack_gang, slots
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.shapes import needs, too_few
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
        free.allocate(job, places)
        book.count(job, job.gpus)
        decided.append(JobPlacement(job.job_id, places, "first in the queue, and its whole gang fits"))
    return decided


def why_not(job: JobRequest, free: FreeCapacity, able: int | None = None) -> str:
    """One sentence for the person who asks why a job waits. `able`: tasks that fit, if they were counted."""
    return too_few(needs(job), slots(job, free) if able is None else able)
