"""Elastic jobs as columns of numbers, one row each. The rows are kept while the jobs wait or run: a decision on
thousands of jobs reads only those that came, started, ended or were resized since the last one."""

import bisect
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.elastic_jobs.tables import SpeedTables
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import Ints
from cumulo.cluster.decide.queue import JobQueue, QueueView
from cumulo.cluster.decide.running import RunningView, table_of
from cumulo.cluster.decide.snapshot import Snapshot

(
    _ARRIVAL, _PREDICTED, _ATTAINED, _STARTED, _TABLE, _MOST, _CURRENT, _RESTARTS, _RESTART_S, _TENANT, _DRAW,
    _NUMBER,
) = range(12)  # fmt: skip
_COLUMNS = 12
_MOST_READ = 8192  # jobs that one decision makes rows of
_UNKNOWN_S = 3600.0  # a job of unknown duration counts as an hour
_Kept = TypeVar("_Kept", JobRequest, RunningJob)


def resizable(job: JobRequest) -> bool:
    return job.speed is not None and job.gpus_per_task == 1 and not job.fractional


class JobNumbers:
    """Numbers for what several jobs have in common."""

    def __init__(self) -> None:
        self.tables = SpeedTables()
        self.tenants: dict[str, int] = {}

    def tenant(self, name: str) -> int:
        return self.tenants.setdefault(name, len(self.tenants))


class JobRows(Generic[_Kept]):
    """A row for each job, in the order in which they came."""

    def __init__(self) -> None:
        self.jobs: list[_Kept | None] = []  # by row; None: it is gone
        self.row_of: dict[str, int] = {}
        self.columns: Ints = np.zeros((_COLUMNS, 64))

    def add(self, name: str, job: _Kept, row: Sequence[float]) -> None:
        if len(self.jobs) == self.columns.shape[1]:
            self._tidy()
        at = self.row_of[name] = len(self.jobs)
        self.columns[:, at] = row
        self.jobs.append(job)

    def extend(self, jobs: Sequence[_Kept], columns: Ints) -> None:
        if len(self.jobs) + len(jobs) > self.columns.shape[1]:
            self._tidy(len(jobs))
        first = len(self.jobs)
        self.columns[:, first : first + len(jobs)] = columns
        self.row_of.update({job.job_id: row for row, job in enumerate(jobs, first)})
        self.jobs += jobs

    def remove(self, name: str) -> None:
        row = self.row_of.pop(name, None)
        if row is not None:
            self.jobs[row] = None
            self.columns[_MOST, row] = 0  # a job may have at least one task

    def alive(self) -> Ints:
        return np.flatnonzero(self.columns[_MOST, : len(self.jobs)])

    def _tidy(self, more: int = 0) -> None:
        """Rows of jobs that are gone are given up; there will be at least as many rows again as jobs."""
        alive, size = self.alive(), self.columns.shape[1]
        columns = np.zeros((_COLUMNS, max(size, 2 * (len(alive) + more))))
        columns[:, : len(alive)] = self.columns[:, alive]
        self.columns = columns
        self.jobs = [self.jobs[row] for row in alive.tolist()]
        gone_before = np.cumsum(np.bincount(alive, minlength=size)) - 1
        self.row_of = {name: int(gone_before[row]) for name, row in self.row_of.items()}


class WaitingRows(QueueView):
    """The elastic jobs of a queue in rows, and the others in the order of arrival."""

    def __init__(self, numbers: JobNumbers, jobs: Iterable[tuple[int, JobRequest]]) -> None:
        self.numbers, self.rows = numbers, JobRows[JobRequest]()
        self.rigid: list[tuple[float, int, JobRequest]] = []
        self.unread = {job.job_id: (number, job) for number, job in jobs}

    def read(self) -> None:
        """So many of the jobs that waited before somebody asked that one decision has time for it."""
        those = [self.unread.pop(name) for name in list(itertools.islice(self.unread, _MOST_READ))]
        some = [(number, job) for number, job in those if resizable(job)]
        columns = _columns([job for _, job in some], self.numbers)
        columns[_NUMBER] = [number for number, _ in some]
        self.rows.extend([job for _, job in some], columns)
        for number, job in those:
            if not resizable(job):
                self.add(job, number)

    def add(self, job: JobRequest, number: int) -> None:
        if resizable(job):
            self.rows.add(job.job_id, job, _row(job, self.numbers, None, number))
        else:
            bisect.insort(self.rigid, (job.arrival_s, number, job), key=_order)

    def remove(self, job: JobRequest, number: int) -> None:
        if self.unread.pop(job.job_id, None) is not None:
            return
        if resizable(job):
            self.rows.remove(job.job_id)
        else:
            del self.rigid[bisect.bisect_left(self.rigid, (job.arrival_s, number), key=_order)]

    def in_order(self) -> Ints:
        """The rows, in the order of arrival."""
        alive = self.rows.alive()
        arrival, number = (self.rows.columns[_ARRIVAL].take(alive), self.rows.columns[_NUMBER].take(alive))
        if (arrival[1:] > arrival[:-1]).all():
            return alive
        return alive[np.lexsort((number, arrival))]


@dataclass(frozen=True)
class ActiveJobs:
    """Elastic jobs of a snapshot: those that wait, then those that run and may be preempted. A column is read when
    somebody asks for it: of most of those that wait nothing but the tenant is."""

    numbers: JobNumbers
    rigid: Sequence[JobRequest]  # and those that wait and cannot be resized
    waiting: JobRows[JobRequest]
    running: JobRows[RunningJob]
    waiting_rows: Ints
    running_rows: Ints
    now_s: float
    unread: int = 0  # waiting jobs that were not known before: they are read now, or still to be read

    def __len__(self) -> int:
        return len(self.waiting_rows) + len(self.running_rows)

    @property
    def waits(self) -> int:
        """So many."""
        return len(self.waiting_rows)

    def job(self, number: int) -> tuple[JobRequest, tuple[TaskPlace, ...]]:
        """What a job asks for, and the places it has."""
        if number < self.waits:
            job = self.waiting.jobs[self.waiting_rows.item(number)]
            assert job is not None
            return job, ()
        one = self.running.jobs[self.running_rows.item(number - self.waits)]
        assert one is not None
        return one.request, one.places

    def those(self, which: NDArray[np.bool_]) -> "ActiveJobs":
        """Some of them."""
        waiting, running = self.waiting_rows[which[: self.waits]], self.running_rows[which[self.waits :]]
        return replace(self, waiting_rows=waiting, running_rows=running)

    @cached_property
    def arrival_s(self) -> Ints:
        return self._floats(_ARRIVAL)

    @cached_property
    def predicted_s(self) -> Ints:
        return self._floats(_PREDICTED)

    @cached_property
    def attained_gpu_s(self) -> Ints:
        found: Ints = self._floats(_ATTAINED) + self.current * (self.now_s - self._floats(_STARTED))
        return found

    @cached_property
    def restarts(self) -> Ints:
        return self._floats(_RESTARTS)

    @cached_property
    def restart_s(self) -> Ints:
        """What one costs."""
        return self._floats(_RESTART_S)

    @cached_property
    def table(self) -> Ints:
        return self._ints(_TABLE)

    @cached_property
    def most(self) -> Ints:
        return self._ints(_MOST)

    @cached_property
    def current(self) -> Ints:
        return self._ints(_CURRENT)

    @cached_property
    def tenant(self) -> Ints:
        return self._ints(_TENANT)

    @cached_property
    def draw(self) -> Ints:
        """A number by which jobs are parted at random, always alike."""
        return self._ints(_DRAW)

    def _floats(self, column: int) -> Ints:
        waiting, running = self.waiting.columns[column], self.running.columns[column]
        return np.concatenate((waiting.take(self.waiting_rows), running.take(self.running_rows)))

    def _ints(self, column: int) -> Ints:
        found: Ints = self._floats(column).astype(np.int64)
        return found


class ElasticRows(RunningView):
    """The running jobs that are elastic and may be preempted, in the order in which they started."""

    def __init__(self) -> None:
        self.numbers = JobNumbers()
        self.rows = JobRows[RunningJob]()

    def add(self, job: RunningJob) -> None:
        if resizable(job.request) and job.request.preemptible:
            self.rows.add(job.job_id, job, _row(job.request, self.numbers, job))

    def remove(self, job: RunningJob) -> None:
        self.rows.remove(job.job_id)

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        row = self.rows.row_of.get(job.job_id)
        if row is None or not resizable(job.request) or not job.request.preemptible:
            self.remove(old)
            self.add(job)
        else:
            self.rows.columns[:, row] = _row(job.request, self.numbers, job)
            self.rows.jobs[row] = job

    def active(self, snapshot: Snapshot) -> ActiveJobs:
        if len(self.numbers.tables) > 2 * (len(snapshot.waiting) + len(self.rows.row_of)) + 64:
            self._forget_numbers()
        numbers = self.numbers
        if isinstance(snapshot.waiting, JobQueue):
            kept = snapshot.waiting.view(WaitingRows, lambda jobs: WaitingRows(numbers, jobs))
            if kept.numbers is not numbers:
                kept.numbers = numbers
                _number_again(kept.rows.columns, kept.rows.jobs, numbers)
            unread = len(kept.unread)
            if unread:
                kept.read()
            rigid = [job for _, _, job in kept.rigid]
            waiting, some = kept.rows, kept.in_order()
        else:
            unread, rigid = 0, [job for job in snapshot.waiting if not resizable(job)]
            those = [job for job in snapshot.waiting if resizable(job)]
            waiting, some = JobRows[JobRequest](), np.arange(len(those))
            waiting.extend(those, _columns(those, numbers))
        return ActiveJobs(numbers, rigid, waiting, self.rows, some, self.rows.alive(), snapshot.now_s, unread)

    def _forget_numbers(self) -> None:
        """Most are of jobs that ended."""
        self.numbers = JobNumbers()
        _number_again(self.rows.columns, self.rows.jobs, self.numbers)


def _number_again(columns: Ints, jobs: Iterable[JobRequest | RunningJob | None], numbers: JobNumbers) -> None:
    for row, one in enumerate(jobs):
        if one is not None:
            job = one.request if isinstance(one, RunningJob) else one
            columns[_TABLE, row], columns[_TENANT, row] = (
                numbers.tables.number(job.speed),
                numbers.tenant(job.tenant),
            )


def _draw(job: JobRequest) -> int:
    return zlib.crc32(job.job_id.encode())


def _row(job: JobRequest, numbers: JobNumbers, one: RunningJob | None, number: int = 0) -> tuple[float, ...]:
    return (
        job.arrival_s, job.predicted_s or _UNKNOWN_S, job.attained_gpu_s, one.started_s if one else 0.0,
        numbers.tables.number(job.speed), job.max_tasks or job.tasks, len(one.places) if one else 0,
        one.restarts if one else 0, job.checkpoint_s, numbers.tenant(job.tenant), _draw(job), number,
    )  # fmt: skip


def _columns(jobs: Sequence[JobRequest], numbers: JobNumbers) -> Ints:
    """The rows of many waiting jobs, a column at a time, which is several times as fast."""
    found: Ints = np.zeros((_COLUMNS, len(jobs)))
    found[_ARRIVAL] = [job.arrival_s for job in jobs]
    found[_PREDICTED] = [job.predicted_s or _UNKNOWN_S for job in jobs]
    found[_ATTAINED] = [job.attained_gpu_s for job in jobs]
    found[_TABLE] = [numbers.tables.number(job.speed) for job in jobs]
    found[_MOST] = [job.max_tasks or job.tasks for job in jobs]
    found[_RESTART_S] = [job.checkpoint_s for job in jobs]
    found[_TENANT] = [numbers.tenant(job.tenant) for job in jobs]
    found[_DRAW] = [_draw(job) for job in jobs]
    return found


def elastic_rows(snapshot: Snapshot) -> ActiveJobs:
    return table_of(snapshot.running).view(ElasticRows, ElasticRows).active(snapshot)


def _order(entry: tuple[Any, ...]) -> tuple[float, int]:
    return entry[0], entry[1]
