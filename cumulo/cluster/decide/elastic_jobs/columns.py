"""Elastic jobs as columns of numbers, one row each. The rows of running jobs are kept while they run: a decision on
thousands of jobs reads only those that started, ended or were resized since the last one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, SpeedTable, TaskPlace
from cumulo.cluster.decide.nodes import Ints
from cumulo.cluster.decide.running import RunningView, table_of
from cumulo.cluster.decide.snapshot import Snapshot

_ARRIVAL, _PREDICTED, _ATTAINED, _STARTED, _TABLE, _MOST, _CURRENT, _RESTARTS, _RESTART_S = range(9)
_UNKNOWN_S = 3600.0  # a job of unknown duration counts as an hour


def resizable(job: JobRequest) -> bool:
    return job.speed is not None and job.gpus_per_task == 1 and not job.fractional


class SpeedTables:
    """The tables of all jobs, each once, as arrays."""

    def __init__(self) -> None:
        self.tables: list[SpeedTable] = []
        self._dense: list[tuple[Ints, Ints]] = []
        self._number_of: dict[int, int] = {}
        self._kept: tuple[tuple[bytes, int, int], Ints] | None = None

    def __len__(self) -> int:
        return len(self.tables)

    def number(self, speed: SpeedTable | None) -> int:
        assert speed is not None
        known = self._number_of.get(id(speed))
        if known is None:
            known = self._number_of[id(speed)] = len(self.tables)
            self._dense.append((np.array(speed.one_node), np.array(speed.many_nodes)))
            self.tables.append(speed)  # kept, so that no other object gets its id
        return known

    def within(self, table: int, share: int, node_gpus: int) -> float:
        """The goodput of the largest possible size within a share."""
        speed = self.tables[table]
        largest = max(len(speed.one_node), len(speed.many_nodes))  # few jobs may have shares of thousands
        for size in range(min(share, largest), 0, -1):
            found = speed.goodput(size, -(-size // node_gpus))
            if found > 0:
                return found
        return 1.0

    def goodputs(self, sizes: Ints, node_gpus: int) -> Ints:
        """[tables, sizes]; the last one is kept, because sizes and tables seldom change."""
        key = sizes.tobytes(), node_gpus, len(self.tables)
        if self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        found = np.zeros((len(self.tables), len(sizes)))
        for row, (one, many) in enumerate(self._dense):
            for column, inside in ((one, sizes <= node_gpus), (many, sizes > node_gpus)):
                known = inside & (sizes > 0) & (sizes <= len(column))
                found[row, known] = column[sizes[known] - 1]
        self._kept = key, found
        return found


@dataclass(frozen=True, slots=True)
class ActiveJobs:
    """The elastic jobs of a snapshot: those that wait, then those that run and may be preempted."""

    waiting: Sequence[JobRequest]
    running: Sequence[RunningJob | None]  # by their rows
    rows: Ints  # of the running jobs
    tables: SpeedTables
    arrival_s: Ints
    predicted_s: Ints
    attained_gpu_s: Ints
    table: Ints
    most: Ints
    current: Ints
    restarts: Ints
    restart_s: Ints  # what one costs

    def __len__(self) -> int:
        return len(self.current)

    def job(self, number: int) -> tuple[JobRequest, tuple[TaskPlace, ...]]:
        """What a job asks for, and the places it has."""
        if number < len(self.waiting):
            return self.waiting[number], ()
        one = self.running[int(self.rows[number - len(self.waiting)])]
        assert one is not None
        return one.request, one.places


class ElasticRows(RunningView):
    """The running jobs that are elastic and may be preempted, in the order in which they started."""

    def __init__(self) -> None:
        self.tables = SpeedTables()
        self.jobs: list[RunningJob | None] = []  # by row; None: it ended
        self._rows: Ints = np.zeros((64, 9))
        self._row_of: dict[str, int] = {}
        self._waiting: dict[str, tuple[JobRequest, tuple[float, ...]]] = {}

    def add(self, job: RunningJob) -> None:
        if not resizable(job.request) or not job.request.preemptible:
            return
        if len(self.jobs) == len(self._rows):
            self._tidy()
        row = self._row_of[job.job_id] = len(self.jobs)
        self._rows[row] = _row(job.request, self.tables, job)
        self.jobs.append(job)

    def remove(self, job: RunningJob) -> None:
        row = self._row_of.pop(job.job_id, None)
        if row is not None:
            self.jobs[row] = None
            self._rows[row, _CURRENT] = 0  # a running job has at least one task

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        row = self._row_of.get(job.job_id)
        if row is None or not resizable(job.request) or not job.request.preemptible:
            self.remove(old)
            self.add(job)
        else:
            self._rows[row] = _row(job.request, self.tables, job)
            self.jobs[row] = job

    def _tidy(self) -> None:
        """Rows of jobs that ended are given up; if they are few, there will be twice as many rows."""
        alive = np.flatnonzero(self._rows[: len(self.jobs), _CURRENT])
        size = len(self._rows) if 2 * len(alive) < len(self._rows) else 2 * len(self._rows)
        rows = np.zeros((size, 9))
        rows[: len(alive)] = self._rows[alive]
        self._rows = rows
        self.jobs = [self.jobs[row] for row in alive.tolist()]
        self._row_of = {one.job_id: row for row, one in enumerate(self.jobs) if one is not None}

    def active(self, snapshot: Snapshot) -> ActiveJobs:
        if len(self.tables) > 2 * (len(snapshot.waiting) + len(self._row_of)) + 64:
            self._forget_tables()
        waiting = [job for job in snapshot.waiting if resizable(job)]
        alive = np.flatnonzero(self._rows[: len(self.jobs), _CURRENT])
        found = self._rows[alive]
        if waiting:
            found = np.concatenate([np.array(list(self._rows_of(waiting))), found])
        current = found[:, _CURRENT].astype(np.int64)
        attained = found[:, _ATTAINED] + current * (snapshot.now_s - found[:, _STARTED])
        return ActiveJobs(
            waiting, self.jobs, alive, self.tables, found[:, _ARRIVAL], found[:, _PREDICTED], attained,
            found[:, _TABLE].astype(np.int64), found[:, _MOST].astype(np.int64), current, found[:, _RESTARTS],
            found[:, _RESTART_S],
        )  # fmt: skip

    def _rows_of(self, waiting: Sequence[JobRequest]) -> Iterable[tuple[float, ...]]:
        if len(self._waiting) > 2 * len(waiting) + 64:
            self._waiting = {}
        known = self._waiting
        for job in waiting:
            entry = known.get(job.job_id)
            if entry is None or entry[0] is not job:
                entry = known[job.job_id] = job, _row(job, self.tables, None)
            yield entry[1]

    def _forget_tables(self) -> None:
        """Most are of jobs that ended."""
        self.tables = SpeedTables()
        self._waiting = {}
        for row, one in enumerate(self.jobs):
            if one is not None:
                self._rows[row, _TABLE] = self.tables.number(one.request.speed)


def _row(job: JobRequest, tables: SpeedTables, one: RunningJob | None) -> tuple[float, ...]:
    return (
        job.arrival_s, job.predicted_s or _UNKNOWN_S, job.attained_gpu_s, one.started_s if one else 0.0,
        tables.number(job.speed), job.max_tasks or job.tasks, len(one.places) if one else 0,
        one.restarts if one else 0, job.checkpoint_s,
    )  # fmt: skip


def elastic_rows(snapshot: Snapshot) -> ActiveJobs:
    return table_of(snapshot.running).view(ElasticRows, ElasticRows).active(snapshot)
