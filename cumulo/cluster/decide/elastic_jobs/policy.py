"""Elastic jobs, resized by marginal goodput (the idea of Pollux, Qiao et al., OSDI 2021): GPUs go where the
next one adds most to the power mean of all jobs' speedups over a fair share, and a change must pay for the
restart it costs.

A decision is bounded. More than 8,192 jobs are parted at random, and the free GPUs with them, which costs little
of the optimum where jobs are many and small (POP, Narayanan et al., SOSP 2021); each part is one decision. Of more
than 400 changes (fewer where the sizes of thousands of jobs were chosen) the first are one decision, and the others
the next ones. Players ask again at once. When a long queue is looked at for the first time, so many of its jobs are
read in one decision.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cumulo.cluster.decide.decisions import Decision, JobPlacement, Unfinished
from cumulo.cluster.decide.elastic_jobs.columns import ActiveJobs, elastic_rows
from cumulo.cluster.decide.elastic_jobs.limits import looked_at, tenant_limits
from cumulo.cluster.decide.elastic_jobs.placing import MOST_REASONS, SizeChange, placed, told_why
from cumulo.cluster.decide.elastic_jobs.prices import Floats, Prices
from cumulo.cluster.decide.elastic_jobs.short_first import ShortFirst
from cumulo.cluster.decide.elastic_jobs.sizes import (
    SizedGroup,
    choose_sizes,
    possible_sizes,
    size_groups,
)
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, Ints
from cumulo.cluster.decide.policy.fifo import fifo
from cumulo.cluster.decide.queue import JobQueue
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_LITTLE = 1e-3  # so that a job without GPUs has a finite cost
_MOST_JOBS = 8192  # whose sizes one decision chooses
_MOST_CHANGES = 400  # of one decision
_MOST_RIGID = 100  # jobs that cannot be resized, which one decision starts
_LIKE_A_CHANGE = 32  # jobs whose sizes are chosen in the time that one change takes


@dataclass(slots=True)
class _Moment:
    """What is left to do at one moment."""

    now_s: float
    parts: int = 0  # of the jobs; 0: they were not counted yet
    chosen: int = 0  # parts whose sizes are chosen
    changes: list[SizeChange] = field(default_factory=list)  # of the last one, which are not decided yet


def elastic(
    restart_s: float = 30.0, sizes: Iterable[int] = (), short_first: float = 0.0, predicted: bool = True
) -> Policy:
    """`restart_s`: the least that a restart costs; a job's `checkpoint_s` may be more. `short_first`: by what
    power shorter jobs count more: by their predicted remaining time or, if nothing is `predicted`, by the GPU time
    they have had, in steps. Tasks are of one GPU. Sizes: within a node any of `sizes` (none given: any), beyond it
    whole nodes, so that no two distributed jobs share a node's network. Jobs without a speed table keep the size
    they ask for."""
    inside, prices, unfinished = tuple(sizes), Prices(), None
    counted = ShortFirst(short_first, predicted)

    def chosen(
        jobs: ActiveJobs, moment: _Moment, free: FreeCapacity, book: QuotaBook
    ) -> tuple[list[SizeChange], list[JobRequest]]:
        """Jobs that change their sizes, and the first of those that wait and get no GPUs."""
        if not len(jobs):
            return [], []
        node_gpus, free_gpus = free.largest, free.free_gpus
        gpus = free_gpus + int(jobs.current.sum())
        share = max(1, -int(-float(gpus) // len(jobs)))
        limits = tenant_limits(jobs, book)
        some = looked_at(jobs, counted.ranks, limits, gpus)
        if not moment.parts:
            moment.parts = -(-int(some.sum()) // _MOST_JOBS)
        left = moment.parts - moment.chosen
        moment.chosen += 1
        if moment.parts > 1:
            some &= jobs.draw % moment.parts == moment.chosen - 1
        if not some.all():
            jobs = jobs.those(some)
            gpus = free_gpus // left + int(jobs.current.sum())
            if limits is not None:
                limits = tenant_limits(jobs, book, left) if moment.parts > 1 else limits.those(some)
        if not len(jobs):
            return [], []
        options = possible_sizes(node_gpus, jobs.most, jobs.current, inside)
        groups = _costs(jobs, restart_s, options, node_gpus, share, counted.weights(jobs))
        wanted = choose_sizes(groups, options, gpus, limits, prices)
        return _changes(jobs, wanted), _refused(jobs, wanted)

    def policy(snapshot: Snapshot) -> list[Decision]:
        nonlocal unfinished
        if not snapshot.free.ready_set:
            return []
        free, book = snapshot.free.copy(), QuotaBook(snapshot)
        moment, decided, refused = unfinished, list[Decision](), list[JobRequest]()
        if moment is None or moment.now_s != snapshot.now_s:
            moment = _Moment(snapshot.now_s)
        most = _MOST_CHANGES
        if not moment.changes:
            jobs = elastic_rows(snapshot)
            if jobs.unread > _MOST_JOBS // 2:
                return [Unfinished(f"{jobs.unread} waiting jobs were to be read")]
            if not moment.chosen:
                decided = _rigid(jobs.rigid[:_MOST_RIGID], snapshot, free, book)
                if len(jobs.rigid) > _MOST_RIGID and isinstance(decided[-1], JobPlacement):
                    return [*decided, Unfinished("more jobs that cannot be resized may fit")]
            moment.changes, refused = chosen(jobs, moment, free, book)
            most -= min(len(jobs), _MOST_JOBS) // _LIKE_A_CHANGE
            if len(moment.changes) > most:  # what frees GPUs comes first
                moment.changes.sort(key=lambda one: one[2] >= len(one[1]))
            changes = moment.changes[:most]
        else:
            changes = _still(moment.changes[:most], snapshot)
        moment.changes = moment.changes[most:]
        decided += placed(changes, free.largest, free, book)
        decided += told_why(refused, book)
        unfinished = moment if moment.changes or moment.chosen < moment.parts else None
        if unfinished is not None:
            decided.append(Unfinished(f"{moment.parts} parts of the jobs, {moment.chosen} begun"))
        return decided

    return policy


def _rigid(
    rigid: Sequence[JobRequest], snapshot: Snapshot, free: FreeCapacity, book: QuotaBook
) -> list[Decision]:
    """Jobs that cannot be resized, first come, first served; takes what they get from `free`."""
    decided = fifo(replace(snapshot, waiting=rigid)) if rigid else []
    for job, one in zip(rigid, decided, strict=False):
        if isinstance(one, JobPlacement):
            free.allocate(job, one.places)
            book.count(job, job.gpus)
    return decided


def _still(changes: list[SizeChange], snapshot: Snapshot) -> list[SizeChange]:
    """Those of jobs that wait or run as they did."""
    queue, running = snapshot.waiting, snapshot.running
    find: Callable[[str], JobRequest | None] = (
        queue.find if isinstance(queue, JobQueue) else {job.job_id: job for job in queue}.get
    )

    def holds(job: JobRequest, had: tuple[TaskPlace, ...]) -> bool:
        if not had:
            return bool(find(job.job_id) == job)
        now = running.get(job.job_id)
        return now is not None and now.places == had

    return [one for one in changes if holds(one[0], one[1])]


def _costs(
    jobs: ActiveJobs, restart_s: float, options: Ints, node_gpus: int, share: int, weights: Floats | None
) -> list[SizedGroup]:
    """[jobs, sizes] of each group, the first size is 0: what a power mean with exponent −1 adds up, 1 / speedup
    over a fair `share`. Infinite: this size is not possible."""
    tables = jobs.numbers.tables
    speedups = tables.goodputs(options, node_gpus) / tables.fair(share, node_gpus)[:, None]
    age_s = np.maximum(1.0, jobs.now_s - jobs.arrival_s)
    pause_s = np.maximum(jobs.restart_s, restart_s)
    keep = np.maximum(np.maximum(age_s - jobs.restarts * pause_s, 0.0) / (age_s + pause_s), 0.05)
    table, current = jobs.table, jobs.current
    largest = np.maximum(jobs.most, current)
    found = []
    for rows, width in size_groups(options, largest):
        some = options[:width]
        speedup = speedups[:, :width].take(table[rows], 0)
        stays = np.arange(len(rows)), np.searchsorted(some, current[rows])
        as_it_is = speedup[stays]
        speedup *= keep[rows][:, None]
        speedup[stays] = as_it_is  # no restart
        speedup += _LITTLE
        costs: Floats = np.divide(1.0, speedup, out=speedup)
        costs[some > largest[rows][:, None]] = np.inf
        if weights is not None:
            costs *= weights[rows][:, None]
        found.append((rows, costs))
    return found


def _changes(jobs: ActiveJobs, wanted: Ints) -> list[SizeChange]:
    """Jobs that keep their size keep their places; the others, the largest first."""
    rows = np.flatnonzero(wanted != jobs.current)
    rows = rows[np.lexsort((jobs.arrival_s[rows], -wanted[rows]))]
    return [(*jobs.job(row), size) for row, size in zip(rows.tolist(), wanted[rows].tolist(), strict=True)]


def _refused(jobs: ActiveJobs, wanted: Ints) -> list[JobRequest]:
    """The first of those that wait and get nothing: as many as are told why."""
    rows = jobs.waiting_rows[np.flatnonzero(wanted[: jobs.waits] == 0)[:MOST_REASONS]]
    return [job for row in rows.tolist() if (job := jobs.waiting.jobs[row]) is not None]
