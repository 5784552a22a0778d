"""Least attained service in two queues: Tiresias' discretised 2D-LAS (Gu et al., NSDI 2019). Nothing is
predicted: jobs that have had little GPU time go before those that have had much, which are preempted for them."""

from collections.abc import Sequence

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Waits
from cumulo.cluster.decide.fit import PlacerOf, why_not
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob
from cumulo.cluster.decide.queueing import MOST_REASONS
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_LATER = "jobs that had less GPU time go first"
# Whether a job is in the second queue, its arrival, whether it runs, its place among equals, and the job.
_Entry = tuple[bool, float, int, str, JobRequest | RunningJob]


def least_attained_service(place: PlacerOf, threshold_gpu_s: float = 16 * 3600.0) -> Policy:
    """`threshold_gpu_s`: GPU seconds after which a job goes to the second queue (the published default: 16
    hours). Jobs that their tenants' limits refuse are passed over: no
    other job is preempted for them."""

    def policy(snapshot: Snapshot) -> list[Decision]:
        now_s = snapshot.now_s
        entries: list[_Entry] = [
            (job.attained_gpu_s >= threshold_gpu_s, job.arrival_s, 0, f"{number:09}", job)
            for number, job in enumerate(snapshot.waiting)
        ]
        entries += [
            (one.attained_gpu_s(now_s) >= threshold_gpu_s, one.request.arrival_s, 1, one.job_id, one)
            for one in snapshot.running.values()
            if one.request.preemptible
        ]
        entries.sort(key=lambda entry: entry[:4])
        stopping, starting, refused = _within(snapshot, [entry[-1] for entry in entries])
        return [*refused[:MOST_REASONS], *_moves(snapshot, place, stopping, starting)]

    return policy


def _within(
    snapshot: Snapshot, in_order: Sequence[JobRequest | RunningJob]
) -> tuple[list[RunningJob], list[JobRequest], list[Waits]]:
    """The running jobs that stop, the waiting ones that start, and those that a limit refuses: in order of their
    queues as many go on as there are GPUs for; one that is too large does not hold up smaller ones."""
    free, book = snapshot.free, QuotaBook(snapshot)
    fixed = [one for one in snapshot.running.values() if not one.request.preemptible]
    budget = WHOLE_GPU * int(free.gpus[free.ready].sum())
    budget -= sum(one.tasks * one.request.milli_per_task for one in fixed)
    stopping, starting, refused = list[RunningJob](), list[JobRequest](), list[Waits]()
    least: dict[str, float] = {}  # of each tenant at its limit: the fewest GPUs that were refused
    for one in in_order:
        job = one.request if isinstance(one, RunningJob) else one
        milli = job.tasks * job.milli_per_task
        if isinstance(one, RunningJob):
            if milli <= budget:
                budget -= milli
            else:
                stopping.append(one)
        elif job.gpus >= least.get(job.tenant, float("inf")):
            refused.append(Waits(job.job_id, book.refuses(job) or _LATER))
        else:
            why = book.refuses(job)
            if why is not None:
                refused.append(Waits(job.job_id, why))
                least[job.tenant] = job.gpus
            elif milli <= budget:
                starting.append(job)
                budget -= milli
                book.count(job, job.gpus)
            else:
                refused.append(Waits(job.job_id, _LATER))
    return stopping, starting, refused


def _moves(
    snapshot: Snapshot, place: PlacerOf, stopping: list[RunningJob], starting: list[JobRequest]
) -> list[Decision]:
    decided: list[Decision] = []
    placer, free, book = place(snapshot), snapshot.free.copy(), QuotaBook(snapshot)
    for one in stopping:
        decided.append(Eviction(one.job_id, _LATER))
        free.release(one.request, one.places)
        placer.stopped(one.request, one.places)
        book.count(one.request, -one.gpus)
    for job in starting:
        places = placer.places(job, free)
        refused = why_not(job, free) if places is None else book.refuses(job)
        if places is None or refused is not None:
            decided.append(Waits(job.job_id, refused or ""))
        else:
            free.allocate(job, places)
            placer.started(job, places)
            book.count(job, job.gpus)
            decided.append(JobPlacement(job.job_id, places, "among those that had the least GPU time"))
    return decided
