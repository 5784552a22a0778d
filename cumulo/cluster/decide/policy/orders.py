"""The orders in which waiting jobs are tried. A queue keeps each of them from the first time it is asked for."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.queue import SortKey, WaitingRow, by_arrival_key, rows_in_order
from cumulo.cluster.decide.shapes import GangShape
from cumulo.cluster.decide.snapshot import Snapshot

Order = Callable[[Snapshot], Iterator[WaitingRow]]
_STRETCH = 10.0


class PassedOver(Protocol):
    """Which jobs behind one that waits need no look, while a decision is made."""

    failed: dict[GangShape, str]  # these shapes do not fit, and never will in this decision
    harmful: dict[GangShape, float]  # jobs that end after this moment; another dictionary after each start


class SkippingRows(Iterator[WaitingRow]):
    """Waiting jobs in an order that is costly to make, where jobs that are passed over cost less."""

    @abstractmethod
    def besides(self, at_most: int, passed: PassedOver) -> Iterator[WaitingRow]:
        """The last that somebody reads: the next so many jobs, without those that are passed over, or with some."""


def rows_besides(rows: Iterator[WaitingRow], at_most: int, passed: PassedOver) -> Iterable[WaitingRow]:
    """As `SkippingRows` has them."""
    if isinstance(rows, SkippingRows):
        return rows.besides(at_most, passed)
    return [row for row in itertools.islice(rows, at_most) if row[1] not in passed.failed]


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
