"""The orders in which waiting jobs are tried. A queue keeps each of them from the first time it is asked for."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.queue import SortKey, WaitingRow, by_arrival_key, rows_in_order
from cumulo.cluster.decide.shapes import GangShape
from cumulo.cluster.decide.snapshot import Snapshot

Order = Callable[[Snapshot], Iterator[WaitingRow]]
_STRETCH = 10.0


class SkippingRows(Iterator[WaitingRow]):
    """Waiting jobs in an order that is costly to make, where jobs that are passed over anyway cost less."""

    @abstractmethod
    def besides(self, failed: Container[GangShape], at_most: int) -> Iterable[WaitingRow]:
        """The last that somebody reads: of the next so many jobs those of other shapes."""


def rows_besides(
    rows: Iterator[WaitingRow], failed: Container[GangShape], at_most: int
) -> Iterable[WaitingRow]:
    """Of the next so many jobs those of other shapes."""
    if isinstance(rows, SkippingRows):
        return rows.besides(failed, at_most)
    return [row for row in itertools.islice(rows, at_most) if row[1] not in failed]


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
