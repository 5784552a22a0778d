"""Elastic jobs, resized by marginal goodput (the idea of Pollux, Qiao et al., OSDI 2021): GPUs go where the
next one adds most to the power mean of all jobs' speedups over a fair share, and a change must pay for the
restart it costs.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from cumulo.cluster.decide.check import has_room
from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize, Waits
from cumulo.cluster.decide.elastic_jobs.columns import ActiveJobs, elastic_rows, resizable
from cumulo.cluster.decide.elastic_jobs.sizes import (
    Floats,
    SizedGroup,
    choose_sizes,
    possible_sizes,
    size_groups,
)
from cumulo.cluster.decide.fit import only_gpus, task_places, tasks_that_fit, tightest
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, Ints, members
from cumulo.cluster.decide.policy.fifo import fifo
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_LITTLE = 1e-3  # so that a job without GPUs has a finite cost
_MOST_REASONS = 200  # jobs that are told why they wait, in one decision


def elastic(
    restart_s: float = 30.0,
    sizes: Iterable[int] = (),
    short_first: float = 0.0,
    predicted: bool = True,
) -> Policy:
    """`restart_s`: the least that a restart costs; a job's `checkpoint_s` may be more. `short_first`: by what
    power shorter jobs count more: by their predicted remaining time or, if nothing is `predicted`, by the GPU time
    they have had. Tasks are of one GPU. Sizes: within a node any of `sizes` (none given: any), beyond it whole
    nodes, so that no two distributed jobs share a node's network. Jobs without a speed table keep the size they
    ask for."""
    inside = tuple(sizes)

    def policy(snapshot: Snapshot) -> list[Decision]:
        ready = snapshot.free.ready
        if not ready.any():
            return []
        node_gpus = int(snapshot.free.gpus[ready].max())
        free, book = snapshot.free.copy(), QuotaBook(snapshot)
        decided = _rigid(snapshot, free, book)
        jobs = elastic_rows(snapshot)
        if not len(jobs):
            return decided
        gpus = int(free.whole[ready].sum()) + int(jobs.current.sum())
        options = possible_sizes(node_gpus, jobs.most, jobs.current, inside)
        weights = None
        if short_first:
            seconds = jobs.predicted_s if predicted else jobs.attained_gpu_s
            weights = (3600.0 / np.maximum(seconds, 60.0)) ** short_first
        groups = _costs(jobs, snapshot.now_s, restart_s, options, node_gpus, gpus, weights)
        wanted = choose_sizes(groups, options, gpus)
        return decided + _placed(jobs, wanted, node_gpus, free, book)

    return policy


def _rigid(snapshot: Snapshot, free: FreeCapacity, book: QuotaBook) -> list[Decision]:
    """Jobs that cannot be resized, first come, first served; takes what they get from `free`."""
    rigid = {job.job_id: job for job in snapshot.waiting if not resizable(job)}
    decided = fifo(replace(snapshot, waiting=list(rigid.values()))) if rigid else []
    for one in decided:
        if isinstance(one, JobPlacement):
            free.allocate(rigid[one.job_id], one.places)
            book.count(rigid[one.job_id], rigid[one.job_id].gpus)
    return decided


def _costs(
    jobs: ActiveJobs,
    now_s: float,
    restart_s: float,
    options: Ints,
    node_gpus: int,
    gpus: int,
    weights: Floats | None,
) -> list[SizedGroup]:
    """[jobs, sizes] of each group, the first size is 0: what a power mean with exponent −1 adds up, 1 / speedup
    over a fair share. Infinite: this size is not possible."""
    share = max(1, -int(-float(gpus) // max(1, len(jobs))))
    goodput = jobs.tables.goodputs(options, node_gpus)
    fair = np.array([jobs.tables.within(table, share, node_gpus) for table in range(len(jobs.tables))])
    speedups = goodput / fair[:, None]
    age_s = np.maximum(1.0, now_s - jobs.arrival_s)
    pause_s = np.maximum(jobs.restart_s, restart_s)
    keep = np.maximum(np.maximum(age_s - jobs.restarts * pause_s, 0.0) / (age_s + pause_s), 0.05)
    largest = np.maximum(jobs.most, jobs.current)
    found = []
    for rows, width in size_groups(options, largest):
        some = options[:width]
        speedup = speedups[:, :width][jobs.table[rows]]
        stays = some == jobs.current[rows][:, None]
        costs: Floats = 1.0 / (np.where(stays, speedup, speedup * keep[rows][:, None]) + _LITTLE)
        costs[some > largest[rows][:, None]] = np.inf
        if weights is not None:
            costs *= weights[rows][:, None]
        found.append((rows, costs))
    return found


def _placed(
    jobs: ActiveJobs, wanted: Ints, node_gpus: int, free: FreeCapacity, book: QuotaBook
) -> list[Decision]:
    """Jobs that keep their size keep their places; the others are placed anew, the largest first."""
    changed = np.flatnonzero((wanted != jobs.current) | (jobs.current == 0))
    changed = changed[np.lexsort((jobs.arrival_s[changed], -wanted[changed]))]
    those = [jobs.job(row) for row in changed.tolist()]
    for job, had in those:
        if had:
            free.release(job, had)
    decided: list[Decision] = []
    resized: list[Decision] = []
    told = 0
    for (job, had), size in zip(those, wanted[changed].tolist(), strict=True):
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
            elif (told := told + 1) <= _MOST_REASONS:
                decided.append(Waits(job.job_id, "no GPU adds more goodput here than where it is"))
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
