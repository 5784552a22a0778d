"""Elastic jobs, resized by marginal goodput (the idea of Pollux, Qiao et al., OSDI 2021): GPUs go where the
next one adds most to the power mean of all jobs' speedups over a fair share, and a change must pay for the
restart it costs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize, Waits
from cumulo.cluster.decide.fifo import fifo
from cumulo.cluster.decide.fit import task_places, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, SpeedTable, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_LITTLE = 1e-3  # so that a job without GPUs has a finite cost


@dataclass(slots=True)
class _Sized:
    """One elastic job while sizes are chosen."""

    request: JobRequest
    speed: SpeedTable
    current: int
    places: tuple[TaskPlace, ...]
    fair: float  # goodput with a fair share
    keep: float  # share of the speedup that is left after a restart
    attained_gpu_s: float
    weight: float = 1.0
    size: int = 0

    def goodput(self, size: int, node_gpus: int) -> float:
        return self.speed.goodput(size, 1 if size <= node_gpus else -(-size // node_gpus))

    def cost(self, size: int, node_gpus: int) -> float:
        """What a power mean with exponent −1 adds up: 1 / speedup."""
        speedup = self.goodput(size, node_gpus) / self.fair if size else 0.0
        return self.weight / (speedup * (1.0 if size == self.current else self.keep) + _LITTLE)


def elastic(
    restart_s: float = 30.0,
    sizes: Iterable[int] = (1, 2, 3, 4),
    short_first: float = 0.0,
    predicted: bool = True,
) -> Policy:
    """`short_first`: by what power shorter jobs count more: by their predicted remaining time or, if nothing is
    `predicted`, by the GPU time they have had. Tasks are of one GPU. Sizes: within a node any of
    `sizes`, beyond it whole nodes, so that no two distributed jobs share a node's network. Jobs without a speed
    table keep the size they ask for."""
    inside = tuple(sizes)

    def policy(snapshot: Snapshot) -> list[Decision]:
        ready = snapshot.free.ready
        if not ready.any():
            return []
        node_gpus = int(snapshot.free.gpus[ready].max())
        rigid = [job for job in snapshot.waiting if not _resizable(job)]
        decided = fifo(replace(snapshot, waiting=rigid)) if rigid else []
        started = {one.job_id: one.places for one in decided if isinstance(one, JobPlacement)}
        free, book = snapshot.free.copy(), QuotaBook(snapshot)
        for job in rigid:
            if job.job_id in started:
                free.take(job, started[job.job_id])
                book.count(job, job.gpus)
        held = [
            one for one in snapshot.running.values() if _resizable(one.request) and one.request.preemptible
        ]
        gpus = int(free.whole[ready].sum() + sum(one.gpus for one in held))
        jobs = _sized(snapshot, restart_s, node_gpus, gpus)
        if short_first:
            for sized in jobs:
                seconds = sized.request.predicted_s or 3600.0 if predicted else sized.attained_gpu_s
                sized.weight = (3600.0 / max(seconds, 60.0)) ** short_first
        _choose_sizes(jobs, gpus, node_gpus, inside)
        return decided + _placed(jobs, node_gpus, free, book)

    return policy


def _resizable(job: JobRequest) -> bool:
    return job.speed is not None and job.gpus_per_task == 1 and not job.fractional


def _sized(snapshot: Snapshot, restart_s: float, node_gpus: int, gpus: int) -> list[_Sized]:
    now_s = snapshot.now_s
    active: list[tuple[JobRequest, tuple[TaskPlace, ...], int, float]] = [
        (job, (), 0, job.attained_gpu_s) for job in snapshot.waiting if _resizable(job)
    ]
    active += [
        (one.request, one.places, one.restarts, one.attained_gpu_s(now_s)) for one in snapshot.running.values()
        if _resizable(one.request) and one.request.preemptible
    ]  # fmt: skip
    total = float(gpus)
    share = max(1, -int(-total // max(1, len(active))))
    found = []
    for job, places, restarts, attained in active:
        speed = job.speed or SpeedTable((), ())
        age_s = max(1.0, snapshot.now_s - job.arrival_s)
        keep = max(age_s - restarts * restart_s, 0.0) / (age_s + restart_s)
        fair = 0.0
        for size in range(share, 0, -1):  # the largest possible size within a fair share
            fair = speed.goodput(size, 1 if size <= node_gpus else -(-size // node_gpus))
            if fair > 0:
                break
        found.append(_Sized(job, speed, len(places), places, fair or 1.0, max(keep, 0.05), attained))
    return found


def _choose_sizes(jobs: list[_Sized], gpus: int, node_gpus: int, inside: tuple[int, ...]) -> None:
    """Again and again the step that saves most per GPU, to any larger size."""
    steps: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        most = job.request.max_tasks or job.request.tasks
        options = {*inside, *range(2 * node_gpus, most + 1, node_gpus), job.current}
        steps[number] = sorted(size for size in options if 0 < size <= max(most, job.current))
        job.size = 0
    left = gpus
    while left > 0:
        best: tuple[float, int, int] | None = None
        for number, job in enumerate(jobs):
            now = job.cost(job.size, node_gpus)
            for size in steps[number]:
                if job.size < size <= job.size + left:
                    gain = (now - job.cost(size, node_gpus)) / (size - job.size)
                    if gain > 1e-9 and (best is None or gain > best[0]):
                        best = (gain, number, size)
        if best is None:
            return
        chosen = jobs[best[1]]
        left -= best[2] - chosen.size
        chosen.size = best[2]


def _placed(jobs: list[_Sized], node_gpus: int, free: FreeCapacity, book: QuotaBook) -> list[Decision]:
    """Jobs that keep their size keep their places; the others are placed anew, the largest first."""
    for job in jobs:
        if job.current and job.size != job.current:
            free.give(job.request, job.places)
            book.count(job.request, -job.current)
    decided: list[Decision] = []
    resized: list[Decision] = []
    for job in sorted(jobs, key=lambda one: (-one.size, one.request.arrival_s)):
        if job.current and job.size == job.current:
            continue
        size, places = job.size, None
        while size and places is None:
            if book.refuses(job.request, size) is None:
                places = _places(job.request, size, free, node_gpus)
            if places is None:
                size = size - node_gpus if size > node_gpus else size - 1
        name = job.request.job_id
        if places is None:
            if job.current:
                decided.append(Eviction(name, "its GPUs add more goodput to other jobs"))
            else:
                decided.append(Waits(name, "no GPU adds more goodput here than where it is"))
            continue
        free.take(job.request, places)
        book.count(job.request, size)
        why = f"{size} GPUs: one more would add more goodput to another job"
        if job.current:
            resized.append(Resize(name, places, why))
        else:
            resized.append(JobPlacement(name, places, why))
    # What shrinks or ends comes before what grows, so that no moment holds more than there is.
    return decided + sorted(resized, key=lambda one: isinstance(one, JobPlacement))


def _places(job: JobRequest, size: int, free: FreeCapacity, node_gpus: int) -> tuple[TaskPlace, ...] | None:
    fits = tasks_that_fit(job, free)
    if size <= node_gpus:
        able = (fits >= size).nonzero()[0].tolist()
        if not able:
            return None
        node = min(able, key=lambda number: (int(free.whole[number]), number))
        return task_places(job, free, [(node, size)])
    empty = ((free.whole == node_gpus) & (fits >= node_gpus)).nonzero()[0].tolist()
    if len(empty) * node_gpus < size or size % node_gpus:
        return None
    return task_places(job, free, [(node, node_gpus) for node in empty[: size // node_gpus]])
