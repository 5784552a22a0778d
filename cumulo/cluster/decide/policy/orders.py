"""The orders in which waiting jobs are tried. A queue keeps each of them from the first time it is asked for."""

from collections.abc import Callable, Iterator

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.queue import SortKey, WaitingRow, by_arrival_key, rows_in_order
from cumulo.cluster.decide.snapshot import Snapshot

Order = Callable[[Snapshot], Iterator[WaitingRow]]
_STRETCH = 10.0


def by_arrival(snapshot: Snapshot) -> Iterator[WaitingRow]:
    return rows_in_order(snapshot.waiting, by_arrival_key)


def by_prediction(snapshot: Snapshot) -> Iterator[WaitingRow]:
    """Short jobs first; a job of unknown duration counts as an hour. Nobody starves: ten times its duration after
    its arrival a job is before everybody who arrives then."""
    return rows_in_order(snapshot.waiting, _stretched)


def _stretched(job: JobRequest) -> float:
    return job.arrival_s + _STRETCH * (3600.0 if job.predicted_s is None else job.predicted_s)


def by_priority(snapshot: Snapshot) -> Iterator[WaitingRow]:
    return rows_in_order(snapshot.waiting, _urgent)


def _urgent(job: JobRequest) -> tuple[int, float]:
    return -job.priority, job.arrival_s


KEYS: dict[Order, SortKey] = {by_arrival: by_arrival_key, by_prediction: _stretched, by_priority: _urgent}
