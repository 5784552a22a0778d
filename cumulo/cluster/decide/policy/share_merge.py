"""The waiting jobs of several tenants merged by share. `ShareOrder` reads them in two ways: in order, a stretch of
shares at a time, because gathering the jobs of a stretch and sorting them is less work than to compare the tenants'
next jobs after each one; or in columns, where only those are made rows that somebody needs.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.queue import SortedJobs, WaitingRow

# Share, arrival, tenant, and the number among its jobs.
ShareEntry = tuple[float, float, str, int, WaitingRow]
Numbers = NDArray[Any]
_MANY = 256  # entries of a stretch
_MOST_OF_ONE = 1024  # tenant, in one stretch
_WINDOW = 512  # jobs that are looked at together
_FEW = 64  # jobs of one tenant that are counted at once, at least


def by_share(
    tenant: str,
    weight: float,
    total: tuple[float, float],
    milli: float,
    cpu: float,
    rows: Iterator[WaitingRow],
) -> Iterator[ShareEntry]:
    """A tenant's jobs, each with the share that the tenant has before it. `total`: thousandths of GPUs and of cores
    of the cluster; `milli` and `cpu`: the same, of the tenant."""
    for number, row in enumerate(rows):
        yield max(milli / total[0], cpu / total[1]) / weight, row[0].arrival_s, tenant, number, row
        milli += row[1].milli
        cpu += row[4]


@dataclass(slots=True)
class RestOfLine:
    """A tenant's jobs from the one of this number on."""

    tenant: str
    weight: float
    total: tuple[float, float]  # thousandths of GPUs and of cores of the cluster
    number: int
    milli: float  # of GPUs that it has with the jobs before
    cpu_milli: float
    line: SortedJobs

    def share(self) -> float:
        return max(self.milli / self.total[0], self.cpu_milli / self.total[1]) / self.weight

    def column(self, which: int, many: int) -> Numbers:
        """Of so many jobs, if there are so many. To look at only, and not to be kept."""
        return np.frombuffer(self.line.columns(self.number + many)[which])[self.number : self.number + many]

    def shares(self, many: int) -> Numbers:
        """Before each of so many jobs, if there are so many."""
        milli = self.column(0, many)
        before: Numbers = np.empty((2, len(milli)))
        before[:, 0] = self.milli, self.cpu_milli
        before[0, 1:] = milli[:-1]  # what the last asks for does not count
        before[1, 1:] = self.column(1, many)[:-1]
        np.add.accumulate(before, axis=1, out=before)
        shares: Numbers = np.maximum(before[0] / self.total[0], before[1] / self.total[1]) / self.weight
        return shares

    def take_below(self, share: float, found: list[ShareEntry]) -> bool:
        """Those with a smaller share, at most so many as one tenant may have in a stretch; whether there may be
        more."""
        (total_milli, total_cpu), weight, tenant = self.total, self.weight, self.tenant
        number, milli, cpu = self.number, self.milli, self.cpu_milli
        last: WaitingRow | None = None
        for last in itertools.islice(self.line.rows(number), _MOST_OF_ONE):
            by_gpus, by_cpu = milli / total_milli, cpu / total_cpu
            own = (by_gpus if by_gpus >= by_cpu else by_cpu) / weight
            if own >= share:
                break
            found.append((own, last[0].arrival_s, tenant, number, last))
            milli += last[1].milli
            cpu += last[4]
            number += 1
        self.number, self.milli, self.cpu_milli = number, milli, cpu
        return last is not None


def _by_share(rests: Iterable[RestOfLine]) -> list[tuple[float, int, RestOfLine]]:
    heap = [(rest.share(), number, rest) for number, rest in enumerate(rests)]
    heapq.heapify(heap)
    return heap


def merged(rests: Iterable[RestOfLine], distance: float) -> Iterator[list[ShareEntry]]:
    """All entries in order, some at a time. `distance`: about how far the shares of neighbours are apart."""
    heap, width, held = _by_share(rests), distance * _MANY / 4, list[ShareEntry]()
    while heap:
        until, found = _above(heap[0][0], width), held
        while heap and heap[0][0] < until:
            _, number, rest = heapq.heappop(heap)
            if rest.take_below(until, found):
                share = rest.share()
                until = min(until, share)  # smaller where it has too many
                heapq.heappush(heap, (share, number, rest))
        found.sort()
        at = bisect.bisect_left(found, (until,))
        yield found[:at]
        held = found[at:]
        width = _next_width(width, at)
    yield held


def _above(lowest: float, width: float) -> float:
    return max(lowest + width, math.nextafter(lowest, math.inf))


def _next_width(width: float, many: int) -> float:
    """After a stretch of so many."""
    if many < _MANY:
        return 2 * width or math.ulp(1.0)
    return width / 2 if many > 4 * _MANY else width


class FirstInColumns:
    """The first so many jobs of all, in order: when they would end, and their shapes."""

    def __init__(self, rests: Iterable[RestOfLine], at_most: int, now_s: float) -> None:
        live = sorted([one for one in rests if one.number < len(one.line.jobs)], key=lambda one: one.tenant)
        self._live, self.ends_s, self.shapes = live, np.empty(0), np.empty(0, dtype=np.int64)
        if not live:
            return
        parts, until = _first_shares(live, at_most)
        sizes = [int(np.searchsorted(part, until, "right")) for part in parts]
        shares = np.concatenate([part[:size] for part, size in zip(parts, sizes, strict=True)])
        arrivals, seconds, shapes = (
            np.concatenate([one.column(which, size) for one, size in zip(live, sizes, strict=True) if size])
            for which in (2, 3, 4)
        )
        # Lines are in the order of tenants, and jobs in that of their numbers.
        order = np.lexsort((arrivals, shares))[:at_most]
        self.ends_s, self.shapes = now_s + seconds[order], shapes[order].astype(np.int64)
        self._order, self._until = order, list(itertools.accumulate(sizes))

    def row(self, at: int) -> WaitingRow:
        number = self._order.item(at)
        part = bisect.bisect(self._until, number)
        one = self._live[part]
        return one.line.row_at(one.number + number - (self._until[part - 1] if part else 0))

    def next_one(self, at: int, latest_s: Numbers) -> int | None:
        """From this one on, the first that would not end after what is the latest for its shape."""
        while at < len(self.ends_s):  # it is often among the next few
            able = self.ends_s[at : at + _WINDOW] <= latest_s[self.shapes[at : at + _WINDOW]]
            found = int(able.argmax())
            if able[found]:
                return at + found
            at += _WINDOW
        return None


def _first_shares(live: list[RestOfLine], at_most: int) -> tuple[list[Numbers], float]:
    """Of each line the shares of its first jobs, as far as they may be among the first so many of all; and the
    share of the last of these."""
    parts = [rest.shares(max(_FEW, 2 * at_most // len(live))) for rest in live]
    while True:
        every = np.concatenate(parts)
        enough = len(every) > at_most
        until = float(np.partition(every, at_most - 1)[at_most - 1]) if enough else math.inf
        short = [
            at for at, (rest, part) in enumerate(zip(live, parts, strict=True))
            if part[-1] <= until and len(part) <= at_most and rest.number + len(part) < len(rest.line.jobs)
        ]  # fmt: skip
        if not short:
            return parts, until
        for at in short:
            parts[at] = live[at].shares(4 * len(parts[at]))
