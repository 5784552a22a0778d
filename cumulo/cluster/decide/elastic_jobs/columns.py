"""Elastic jobs as columns of numbers, one row each. What does not change between two decisions stays in its row,
so that a decision on thousands of jobs reads only those that are new or were resized."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, SpeedTable, TaskPlace
from cumulo.cluster.decide.nodes import Ints
from cumulo.cluster.decide.snapshot import Snapshot

_ARRIVAL, _PREDICTED, _ATTAINED, _STARTED, _TABLE, _MOST, _CURRENT, _RESTARTS, _RESTART_S = range(9)
_UNKNOWN_S = 3600.0  # a job of unknown duration counts as an hour


def resizable(job: JobRequest) -> bool:
    return job.speed is not None and job.gpus_per_task == 1 and not job.fractional


@dataclass(frozen=True, slots=True)
class ActiveJobs:
    """The elastic jobs of a snapshot: those that wait, then those that run and may be preempted."""

    requests: Sequence[JobRequest]
    places: Sequence[tuple[TaskPlace, ...]]
    tables: Sequence[SpeedTable]
    dense: Sequence[tuple[Ints, Ints]]  # the same numbers
    kept: dict[tuple[bytes, int, int], Ints]
    arrival_s: Ints
    predicted_s: Ints
    attained_gpu_s: Ints
    table: Ints
    most: Ints
    current: Ints
    restarts: Ints
    restart_s: Ints  # what one costs

    def goodput(self, table: int, size: int, node_gpus: int) -> float:
        return self.tables[table].goodput(size, 1 if size <= node_gpus else -(-size // node_gpus))

    def goodputs(self, sizes: Ints, node_gpus: int) -> Ints:
        """[tables, sizes]; the last one is kept, because sizes and tables seldom change."""
        key = sizes.tobytes(), node_gpus, len(self.tables)
        if key in self.kept:
            return self.kept[key]
        found = np.zeros((len(self.tables), len(sizes)))
        for row, (one, many) in enumerate(self.dense):
            for column, inside in ((one, sizes <= node_gpus), (many, sizes > node_gpus)):
                known = inside & (sizes > 0) & (sizes <= len(column))
                found[row, known] = column[sizes[known] - 1]
        self.kept.clear()
        self.kept[key] = found
        return found


class ElasticColumns:
    def __init__(self) -> None:
        self._rows: Ints = np.zeros((64, 9))
        self._known: dict[str, tuple[JobRequest | RunningJob, int]] = {}  # -1: not elastic
        self._used = 0
        self._tables: list[SpeedTable] = []
        self._dense: list[tuple[Ints, Ints]] = []
        self._kept: dict[tuple[bytes, int, int], Ints] = {}
        self._table_of: dict[int, int] = {}

    def active(self, snapshot: Snapshot) -> ActiveJobs:
        there = len(snapshot.waiting) + len(snapshot.running)
        if self._used > 2 * there + 64 or len(self._tables) > there + 64:
            self.__init__()  # type: ignore[misc]
        rows: list[int] = []
        requests: list[JobRequest] = []
        places: list[tuple[TaskPlace, ...]] = []
        known = self._known
        for job in snapshot.waiting:
            entry = known.get(job.job_id)
            row = entry[1] if entry is not None and entry[0] is job else self._enter(job, None)
            if row >= 0:
                rows.append(row)
                requests.append(job)
                places.append(())
        for one in snapshot.running.values():
            entry = known.get(one.request.job_id)
            row = entry[1] if entry is not None and entry[0] is one else self._enter(one.request, one)
            if row >= 0:
                rows.append(row)
                requests.append(one.request)
                places.append(one.places)
        found = self._rows[rows]
        current = found[:, _CURRENT].astype(np.int64)
        attained = found[:, _ATTAINED] + current * (snapshot.now_s - found[:, _STARTED])
        return ActiveJobs(
            requests, places, self._tables, self._dense, self._kept, found[:, _ARRIVAL], found[:, _PREDICTED],
            attained,
            found[:, _TABLE].astype(np.int64), found[:, _MOST].astype(np.int64), current, found[:, _RESTARTS],
            found[:, _RESTART_S],
        )  # fmt: skip

    def _enter(self, job: JobRequest, one: RunningJob | None) -> int:
        """The row of a job that is new, or about which something is."""
        entry = self._known.get(job.job_id)
        elastic = resizable(job) and (one is None or job.preemptible)
        row = -1
        if elastic:
            row = self._used if entry is None or entry[1] < 0 else entry[1]
            if row == self._used:
                self._used += 1
            if row >= len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._rows[row] = (
                job.arrival_s, job.predicted_s or _UNKNOWN_S, job.attained_gpu_s, one.started_s if one else 0.0,
                self._number(job.speed), job.max_tasks or job.tasks, len(one.places) if one else 0,
                one.restarts if one else 0, job.checkpoint_s,
            )  # fmt: skip
        self._known[job.job_id] = (one or job), row
        return row

    def _number(self, speed: SpeedTable | None) -> int:
        assert speed is not None
        known = self._table_of.get(id(speed))
        if known is None:
            known = self._table_of[id(speed)] = len(self._tables)
            self._dense.append((np.array(speed.one_node), np.array(speed.many_nodes)))
            self._tables.append(speed)  # kept, so that no other object gets its id
        return known
