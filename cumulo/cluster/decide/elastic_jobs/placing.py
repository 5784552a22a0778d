"""Where elastic jobs go that start or change their sizes: on the tightest node, or on whole nodes."""

import itertools
from collections.abc import Sequence

import numpy as np

from cumulo.cluster.decide.check import has_room
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
    """Each is placed anew, in this order; one for which there is no room gets fewer GPUs."""
    for job, had, _ in changes:
        if had:
            free.release(job, had)
    decided: list[Decision] = []
    resized: list[Decision] = []
    told = 0
    for job, had, size in changes:
        # Not before: until a job's turn comes, its tenant needs room for what it has, as it may keep it.
        book.count(job, -len(had))
        places = None
        empty = _empty_nodes(job, free, node_gpus) if size > node_gpus else 0
        has, most = book.left(job)
        while size and places is None:
            if size == len(had) and has_room(job, had, free):
                places = had  # it wanted more, and there is none: no restart
            elif size > node_gpus and size // node_gpus > empty:
                pass  # there are not so many
            elif size <= len(had) or has + size <= most:
                places = _places(job, size, free, node_gpus)
            if places is None:
                size = size - node_gpus if size > node_gpus else size - 1
        if places is None:
            if had:
                decided.append(Eviction(job.job_id, "its GPUs add more goodput to other jobs"))
            elif (told := told + 1) <= MOST_REASONS:
                why = book.refuses(job, 1) or "no GPU adds more goodput here than where it is"
                decided.append(Waits(job.job_id, why))
            continue
        free.allocate(job, places)
        book.count(job, size)
        if places is had:
            continue
        why = f"{size} GPUs: one more would add more goodput to another job"
        if had:
            resized.append(Resize(job.job_id, places, why))
        else:
            resized.append(JobPlacement(job.job_id, places, why))
    # What shrinks or ends comes before what grows, so that no moment holds more than there is.
    return decided + sorted(resized, key=lambda one: isinstance(one, JobPlacement))


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
