"""Least attained service in two queues: Tiresias' discretised 2D-LAS (Gu et al., NSDI 2019). Nothing is
predicted: jobs that have had little GPU time go before those that have had much, which are preempted for them."""

from collections.abc import Callable
from functools import cache

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Waits
from cumulo.cluster.decide.fifo import why_not
from cumulo.cluster.decide.fit import pack_gang, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.queue import SortKey, ordered, shape_samples
from cumulo.cluster.decide.queueing import Placer
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot


def least_attained_service(place: Placer, threshold_gpu_s: float = 16 * 3600.0, queues: int = 2) -> Policy:
    """`threshold_gpu_s`: GPU seconds after which a job goes to the second queue (the published default: 16
    hours); each further queue begins at twice that."""

    rank = _ranking(threshold_gpu_s, queues)

    def policy(snapshot: Snapshot) -> list[Decision]:
        now_s, running = snapshot.now_s, snapshot.running
        held = [
            (rank(one.attained_gpu_s(now_s)), one.request.arrival_s, name)
            for name, one in running.items() if one.request.preemptible
        ]  # fmt: skip
        held.sort()
        budget = float(snapshot.free.gpus[snapshot.free.ready].sum())
        budget -= sum(one.gpus for one in running.values() if not one.request.preemptible)
        kept, starting = _within(budget, held, snapshot, rank)
        decided: list[Decision] = []
        free, book = snapshot.free.copy(), QuotaBook(snapshot)
        for _, _, name in held:
            if name not in kept:
                stopped = running[name]
                decided.append(Eviction(name, "jobs that had less GPU time go first"))
                free.give(stopped.request, stopped.places)
                book.count(stopped.request, -stopped.gpus)
        for job in starting:
            places = place(job, free)
            refused = why_not(job, free) if places is None else book.refuses(job)
            if places is None or refused is not None:
                decided.append(Waits(job.job_id, refused or ""))
            else:
                free.take(job, places)
                book.count(job, job.gpus)
                decided.append(JobPlacement(job.job_id, places, "among those that had the least GPU time"))
        return decided

    return policy


@cache
def _ranking(threshold_gpu_s: float, queues: int) -> Callable[[float], int]:
    """Which queue a job of so much GPU time is in. One function for one setting, so that orders are kept."""

    def rank(attained_gpu_s: float) -> int:
        level = 0
        while level + 1 < queues and attained_gpu_s >= threshold_gpu_s * 2**level:
            level += 1
        return level

    return rank


@cache
def _waiting_key(rank: Callable[[float], int]) -> SortKey:
    return lambda job: (rank(job.attained_gpu_s), job.arrival_s)


def _within(
    budget: float, held: list[tuple[int, float, str]], snapshot: Snapshot, rank: Callable[[float], int]
) -> tuple[set[str], list[JobRequest]]:
    """The running jobs that go on and the waiting ones that start: in order of their queues, as many as there are
    GPUs for; one that is too large does not hold up smaller ones."""
    kept: set[str] = set()
    starting: list[JobRequest] = []
    key, at = _waiting_key(rank), 0
    smallest = min((job.gpus for job in shape_samples(snapshot.waiting)), default=0.0)
    for job in ordered(snapshot.waiting, key):
        mine = key(job)
        while at < len(held) and held[at] < mine:
            budget = _keep(held[at][2], snapshot, budget, kept)
            at += 1
        if budget < smallest:
            break
        if job.gpus <= budget:
            starting.append(job)
            budget -= job.gpus
    for _, _, name in held[at:]:
        budget = _keep(name, snapshot, budget, kept)
    return kept, starting


def _keep(name: str, snapshot: Snapshot, budget: float, kept: set[str]) -> float:
    """What is left of the budget if this job goes on, as far as there is something left for it."""
    gpus = snapshot.running[name].request.gpus
    if gpus > budget:
        return budget
    kept.add(name)
    return budget - gpus


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
