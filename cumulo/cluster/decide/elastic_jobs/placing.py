"""Where elastic jobs go that start or change their sizes: on the tightest node, or on whole nodes."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize, Waits
from cumulo.cluster.decide.fit import only_gpus, task_places, tasks_that_fit, tightest
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, members
from cumulo.cluster.decide.quotas import QuotaBook

MOST_REASONS = 200  # jobs that are told why they wait, in one decision
SizeChange = tuple[JobRequest, tuple[TaskPlace, ...], int]  # a job, the places it has, and the size it gets


def placed(
    changes: Sequence[SizeChange], node_gpus: int, free: FreeCapacity, book: QuotaBook
) -> list[Decision]:
    """What shrinks or ends comes before what grows or starts, so that its GPUs are there for others, and no moment
    holds more than there is. One for which there is no room gets fewer GPUs. A job that would grow has its places
    until there are more for it: it is not restarted for nothing."""
    stopped: list[Decision] = []
    resized: list[Decision] = []
    started: list[Decision] = []
    refused: list[JobRequest] = []
    for job, had, size in changes:
        if size >= len(had):
            continue
        free.release(job, had)
        book.count(job, -len(had))
        places = _largest(job, size, 0, free, node_gpus)
        if places is None:
            stopped.append(Eviction(job.job_id, "its GPUs add more goodput to other jobs"))
        else:
            free.allocate(job, places)
            book.count(job, len(places))
            resized.append(Resize(job.job_id, places, _why(places)))
    elsewhere = _most_free(free)
    for job, had, size in changes:
        if size < len(had):
            continue
        size = int(min(size, len(had) + book.left_to(job.tenant)))
        if had:
            if _most_to_have(had, size, free, node_gpus, elsewhere) <= len(had):
                continue
            free.release(job, had)
        places = _largest(job, size, len(had), free, node_gpus)
        if places is not None:
            free.allocate(job, places)
            book.count(job, len(places) - len(had))
            elsewhere = _most_free(free)
            if had:
                resized.append(Resize(job.job_id, places, _why(places)))
            else:
                started.append(JobPlacement(job.job_id, places, _why(places)))
        elif had:
            free.allocate(job, had)
        else:
            refused.append(job)
    return stopped + resized + started + told_why(refused[:MOST_REASONS], book)


def told_why(jobs: Iterable[JobRequest], book: QuotaBook) -> list[Waits]:
    """Why jobs that wait get no GPU: the same for all jobs of a tenant."""
    reasons: dict[str, str] = {}
    found = []
    for job in jobs:
        why = reasons.get(job.tenant)
        if why is None:
            why = book.refuses(job, 1) or "no GPU adds more goodput here than where it is"
            reasons[job.tenant] = why
        found.append(Waits(job.job_id, why))
    return found


def _why(places: Sequence[TaskPlace]) -> str:
    return f"{len(places)} GPUs: one more would add more goodput to another job"


def _most_free(free: FreeCapacity) -> int:
    """On one node."""
    return max([gpus for gpus, nodes in enumerate(free.tally) if nodes])


def _most_to_have(
    had: Sequence[TaskPlace], size: int, free: FreeCapacity, node_gpus: int, elsewhere: int
) -> int:
    """A running job that would have so many GPUs cannot get more than this; `elsewhere`: the most that are free on
    one node."""
    own = {had[0].node} if had[0].node == had[-1].node else {place.node for place in had}
    if size > node_gpus:
        nodes = min(size // node_gpus, free.tally[node_gpus] + len(own))
        if nodes > 1:
            return nodes * node_gpus
    beside: int = max([free.whole.item(free.index[node]) for node in own])
    return min(size, max(elsewhere, beside + len(had)))


def _largest(
    job: JobRequest, size: int, more_than: int, free: FreeCapacity, node_gpus: int
) -> tuple[TaskPlace, ...] | None:
    """Places for so many GPUs, or for as many as there are, but for more than those."""
    empty = 0
    if size > node_gpus:
        size -= size % node_gpus
        empty = _empty_nodes(job, free, node_gpus)
    while size > more_than:
        if size <= node_gpus or size // node_gpus <= empty:
            places = _places(job, size, free, node_gpus)
            if places is not None:
                return places
        size = size - node_gpus if size > node_gpus else size - 1
    return None


def _empty_nodes(job: JobRequest, free: FreeCapacity, node_gpus: int) -> int:
    """At most so many whole nodes can be had."""
    return (free.room[node_gpus] & free.usable_set(job.devices)).bit_count()


def _places(job: JobRequest, size: int, free: FreeCapacity, node_gpus: int) -> tuple[TaskPlace, ...] | None:
    """On the tightest node, or on whole nodes."""
    whole_nodes = size // node_gpus if size > node_gpus else 0
    if whole_nodes * node_gpus != size and size > node_gpus:
        return None
    if not only_gpus(job):
        return _places_with_cores(job, size, whole_nodes, free, node_gpus)
    usable = free.usable_set(job.devices)
    if not whole_nodes:
        node = tightest(free, size, usable)
        return None if node is None else task_places(job, free, [(node, size)])
    empty = members(free.room[node_gpus] & usable, whole_nodes)
    if len(empty) < whole_nodes:
        return None
    return tuple(itertools.chain.from_iterable(map(free.single_places, empty)))


def _places_with_cores(
    job: JobRequest, size: int, whole_nodes: int, free: FreeCapacity, node_gpus: int
) -> tuple[TaskPlace, ...] | None:
    fits = tasks_that_fit(job, free)
    if not whole_nodes:
        able = np.flatnonzero(fits >= size)
        return task_places(job, free, [(int(able[free.whole[able].argmin()]), size)]) if len(able) else None
    empty = np.flatnonzero((free.whole == node_gpus) & (fits >= node_gpus))[:whole_nodes].tolist()
    return (
        task_places(job, free, [(node, node_gpus) for node in empty]) if len(empty) == whole_nodes else None
    )
