"""Elastic jobs, resized by marginal goodput (the idea of Pollux, Qiao et al., OSDI 2021): GPUs go where the
next one adds most to the power mean of all jobs' speedups over a fair share, and a change must pay for the
restart it costs.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize, Waits
from cumulo.cluster.decide.fit import Places, task_places, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, SpeedTable, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, Ints
from cumulo.cluster.decide.queueing import MOST_REASONS, fifo
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.snapshot import Policy, Snapshot

Floats = NDArray[np.float64]

_LITTLE = 1e-3  # so that a job without GPUs has a finite cost
_SAVES = 1e-9  # a step to a larger size must save more per GPU
_ALL_NODES = (
    16  # up to so many nodes every number of them is a possible size; beyond, the next is a quarter more
)
_UNKNOWN_S = 3600.0  # a job of unknown duration counts as an hour
_SHORT_S = 60.0  # jobs that are shorter count alike

SizeChange = tuple[JobRequest, Places, int]  # a job, the places it has, and the size it gets


def elastic(restart_s: float = 30.0, short_first: float = 0.0) -> Policy:
    """`restart_s`: the least that a restart costs; a job's `checkpoint_s` may be more. `short_first`: by what
    power jobs with less predicted remaining time count more. Tasks are of one GPU. Sizes: within a node any, beyond
    it whole nodes, so that no two distributed jobs share a node's network. Jobs without a speed table keep the size
    they ask for."""

    def policy(snapshot: Snapshot) -> list[Decision]:
        free, book = snapshot.free.copy(), QuotaBook(snapshot)
        if not free.ready.any():
            return []
        rigid = [job for job in snapshot.waiting if not _resizable(job)]
        decided = fifo(replace(snapshot, waiting=rigid))
        by_name = {job.job_id: job for job in rigid}
        for one in decided:
            if isinstance(one, JobPlacement):
                free.allocate(by_name[one.job_id], one.places)
                book.count(by_name[one.job_id], by_name[one.job_id].gpus)
        jobs = _Jobs(snapshot)
        if not len(jobs.requests):
            return decided
        node_gpus = int(free.gpus[free.ready].max())
        gpus = int(free.whole[free.ready].sum() + jobs.current.sum())
        options = possible_sizes(node_gpus, jobs.most, jobs.current)
        costs = _costs(jobs, restart_s, options, node_gpus, max(1, -(-gpus // len(jobs.requests))))
        if short_first:
            costs *= ((3600.0 / np.maximum(jobs.predicted_s, _SHORT_S)) ** short_first)[:, None]
        tenants = [job.tenant for job in jobs.requests]
        room = {name: max(book.left_to(name), 0.0) for name in tenants}
        for name, has in zip(tenants, jobs.current.tolist(), strict=True):
            room[name] += has  # what its jobs have, and the rest up to the limit
        wanted = choose_sizes(costs, options, gpus, tenants, room)
        # Jobs that keep their size keep their places; the others, the largest first.
        rows = np.flatnonzero(wanted != jobs.current)
        rows = rows[np.lexsort((jobs.arrival_s[rows], -wanted[rows]))]
        changes = [(jobs.requests[row], jobs.places[row], int(wanted[row])) for row in rows.tolist()]
        nothing = np.flatnonzero((wanted == 0) & (jobs.current == 0)).tolist()
        decided += _placed(changes, node_gpus, free, book)
        return decided + _told_why([jobs.requests[row] for row in nothing], book)

    return policy


def _resizable(job: JobRequest) -> bool:
    return job.speed is not None and job.gpus_per_task == 1 and not job.fractional


class _Jobs:
    """The elastic jobs of a snapshot in columns: those that wait, then those that run and may be preempted."""

    def __init__(self, snapshot: Snapshot) -> None:
        waiting = [job for job in snapshot.waiting if _resizable(job)]
        running = [
            one for one in snapshot.running.values() if _resizable(one.request) and one.request.preemptible
        ]
        running.sort(key=lambda one: (one.started_s, one.request.arrival_s, one.job_id))
        self.requests = [*waiting, *(one.request for one in running)]
        self.places = [*([()] * len(waiting)), *(one.places for one in running)]
        nothing = [0.0] * len(waiting)
        self.current: Ints = np.array([len(places) for places in self.places], dtype=np.int64)
        self.restarts = np.array([*nothing, *(one.restarts for one in running)])
        self.most: Ints = np.array([job.max_tasks or job.tasks for job in self.requests], dtype=np.int64)
        self.arrival_s = np.array([job.arrival_s for job in self.requests])
        self.checkpoint_s = np.array([job.checkpoint_s for job in self.requests])
        self.age_s = np.maximum(1.0, snapshot.now_s - self.arrival_s)
        self.predicted_s = np.array([job.predicted_s or _UNKNOWN_S for job in self.requests])


def _costs(jobs: _Jobs, restart_s: float, options: Ints, node_gpus: int, share: int) -> Floats:
    """[jobs, sizes]: what a power mean with exponent −1 adds up, 1 / speedup over a fair `share`. Infinite: this
    size is not possible."""
    tables: dict[int, int] = {}  # thousands of jobs have a few dozen speed tables
    speedups: list[Floats] = []
    table = []
    for job in jobs.requests:
        assert job.speed is not None
        if id(job.speed) not in tables:
            tables[id(job.speed)] = len(speedups)
            speedups.append(_speedups(job.speed, options, node_gpus, share))
        table.append(tables[id(job.speed)])
    pause_s = np.maximum(jobs.checkpoint_s, restart_s)
    keep = np.maximum(jobs.age_s - jobs.restarts * pause_s, 0.0) / (jobs.age_s + pause_s)
    speedup: Floats = np.array(speedups)[table]
    stays = np.arange(len(table)), np.searchsorted(options, jobs.current)
    as_it_is = speedup[stays]
    speedup *= np.maximum(keep, 0.05)[:, None]
    speedup[stays] = as_it_is  # no restart
    costs: Floats = 1.0 / (speedup + _LITTLE)
    costs[options > np.maximum(jobs.most, jobs.current)[:, None]] = np.inf
    return costs


def _speedups(speed: SpeedTable, options: Ints, node_gpus: int, share: int) -> Floats:
    """The goodput with each size over that of the largest possible size within a fair share."""
    largest = max(len(speed.one_node), len(speed.many_nodes))  # few jobs may have shares of thousands
    within = (speed.goodput(size, -(-size // node_gpus)) for size in range(min(share, largest), 0, -1))
    fair = next((goodput for goodput in within if goodput > 0), 1.0)
    return np.array([speed.goodput(size, -(-size // node_gpus)) for size in options.tolist()]) / fair


def possible_sizes(node_gpus: int, most: Ints, current: Ints) -> Ints:
    """0, sizes within a node, then whole nodes, and whatever a job has now."""
    largest = int(max(most.max(), current.max()))
    found = {*range(node_gpus + 1), *np.unique(current).tolist()}
    nodes = 2
    while nodes * node_gpus <= largest:
        found.add(nodes * node_gpus)
        nodes = nodes + 1 if nodes < _ALL_NODES else -(-nodes * 5 // 4)
    return np.array(sorted(size for size in found if size <= max(largest, node_gpus)), dtype=np.int64)


def choose_sizes(
    costs: Floats, options: Ints, gpus: int, tenants: Sequence[str], limits: Mapping[str, float]
) -> Ints:
    """The size of each job: again and again the step to a larger size that saves most per GPU and still fits.
    `costs`: [jobs, options], what each size costs; the first option is 0. `limits`: GPUs that the jobs of
    a tenant may have together."""
    at, room = np.zeros(len(costs), dtype=np.int64), dict(limits)
    steps: list[
        tuple[float, int, int]
    ] = []  # what a step saves per GPU, negative; the job; the option it leads to

    def push(job: int) -> None:
        """The best step of a job that still fits."""
        has = at[job]
        until = np.searchsorted(options, options[has] + min(gpus, room[tenants[job]]), side="right")
        if until > has + 1:
            longer = slice(has + 1, until)
            gains = (costs[job, has] - costs[job, longer]) / (options[longer] - options[has])
            best = int(gains.argmax())
            if gains[best] > _SAVES:
                heapq.heappush(steps, (-float(gains[best]), job, int(has) + 1 + best))

    for job in range(len(costs)):
        push(job)
    while steps and gpus > 0:
        _, job, target = heapq.heappop(steps)
        needs = int(options[target] - options[at[job]])
        if needs <= min(gpus, room[tenants[job]]):
            gpus -= needs
            room[tenants[job]] -= needs
            at[job] = target
        push(job)  # its next step, or a shorter one that still fits
    return options[at]


def _placed(
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
        places = _largest(job, size, free, node_gpus)
        free.allocate(job, places)
        book.count(job, len(places) - len(had))
        if places:
            resized.append(Resize(job.job_id, places, _why(places)))
        else:
            stopped.append(Eviction(job.job_id, "its GPUs add more goodput to other jobs"))
    for job, had, size in changes:
        if size < len(had):
            continue
        size = int(min(size, len(had) + book.left_to(job.tenant)))
        free.release(job, had)
        places = _largest(job, size, free, node_gpus)
        if len(places) <= len(had):
            free.allocate(job, had)
            if not had:
                refused.append(job)
            continue
        free.allocate(job, places)
        book.count(job, len(places) - len(had))
        if had:
            resized.append(Resize(job.job_id, places, _why(places)))
        else:
            started.append(JobPlacement(job.job_id, places, _why(places)))
    return stopped + resized + started + _told_why(refused, book)


def _largest(job: JobRequest, size: int, free: FreeCapacity, node_gpus: int) -> Places:
    """Places for so many GPUs, or for as many as there are: on the tightest node, or on whole nodes."""
    if size <= 0:
        return ()
    fits = tasks_that_fit(job, free)
    if size > node_gpus:
        empty = np.flatnonzero((free.whole == node_gpus) & (fits >= node_gpus))[: size // node_gpus]
        if len(empty) > 1:
            return task_places(job, free, [(node, node_gpus) for node in empty.tolist()])
    size = min(size, node_gpus, int(fits.max()))
    if not size:
        return ()
    able = np.flatnonzero(fits >= size)
    return task_places(job, free, [(int(able[free.whole[able].argmin()]), size)])


def _told_why(jobs: Sequence[JobRequest], book: QuotaBook) -> list[Decision]:
    """Why jobs that wait get no GPU."""
    otherwise = "no GPU adds more goodput here than where it is"
    return [Waits(job.job_id, book.refuses(job, 1) or otherwise) for job in jobs[:MOST_REASONS]]


def _why(places: Sequence[TaskPlace]) -> str:
    return f"{len(places)} GPUs: one more would add more goodput to another job"
