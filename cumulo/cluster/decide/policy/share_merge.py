"""The waiting jobs of several tenants merged by share, a stretch of shares at a time. `ShareOrder` reads them:
gathering the jobs of a stretch and sorting them is less work than to compare the tenants' next jobs after each one.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

from cumulo.cluster.decide.queue import WaitingRow
from cumulo.cluster.decide.shapes import GangShape

ShareEntry = tuple[
    float, float, str, int, WaitingRow
]  # share, arrival, tenant, and the number among its jobs
_MANY = 256  # entries of a stretch
_MOST_OF_ONE = 1024  # tenant, in one stretch


@dataclass(slots=True)
class RestOfLine:
    """A tenant's jobs from the one of this number on, each with the share that the tenant has before it."""

    tenant: str
    weight: float
    total: tuple[float, float]  # GPUs and thousandths of cores of the cluster
    number: int
    gpus: float  # that it has with the jobs before
    cpu_milli: float
    rows: Callable[[int], Iterator[WaitingRow]]  # of its jobs, from that of a number on

    def share(self) -> float:
        return max(self.gpus / self.total[0], self.cpu_milli / self.total[1]) / self.weight

    def copy(self) -> "RestOfLine":
        return RestOfLine(
            self.tenant, self.weight, self.total, self.number, self.gpus, self.cpu_milli, self.rows
        )

    def entries(self) -> Iterator[ShareEntry]:
        (total_gpus, total_cpu), weight, tenant = self.total, self.weight, self.tenant
        gpus, cpu = self.gpus, self.cpu_milli
        for number, row in enumerate(self.rows(self.number), self.number):
            yield max(gpus / total_gpus, cpu / total_cpu) / weight, row[0].arrival_s, tenant, number, row
            gpus += row[3]
            cpu += row[4]

    def take_below(self, share: float, found: list[ShareEntry]) -> bool:
        """Those with a smaller share, at most so many as one tenant may have in a stretch; whether there may be
        more."""
        (total_gpus, total_cpu), weight, tenant = self.total, self.weight, self.tenant
        number, gpus, cpu = self.number, self.gpus, self.cpu_milli
        last: WaitingRow | None = None
        for last in itertools.islice(self.rows(number), _MOST_OF_ONE):
            by_gpus, by_cpu = gpus / total_gpus, cpu / total_cpu
            own = (by_gpus if by_gpus >= by_cpu else by_cpu) / weight
            if own >= share:
                break
            found.append((own, last[0].arrival_s, tenant, number, last))
            gpus += last[3]
            cpu += last[4]
            number += 1
        self.number, self.gpus, self.cpu_milli = number, gpus, cpu
        return last is not None

    def pass_below(
        self, share: float, failed: Container[GangShape], found: list[ShareEntry], at_most: int
    ) -> int:
        """How many have a smaller share; those of other shapes than these are found."""
        (total_gpus, total_cpu), weight, tenant = self.total, self.weight, self.tenant
        first = number = self.number
        gpus, cpu = self.gpus, self.cpu_milli
        for row in itertools.islice(self.rows(number), at_most):
            by_gpus, by_cpu = gpus / total_gpus, cpu / total_cpu
            own = (by_gpus if by_gpus >= by_cpu else by_cpu) / weight
            if own >= share:
                break
            if row[1] not in failed:
                found.append((own, row[0].arrival_s, tenant, number, row))
            gpus += row[3]
            cpu += row[4]
            number += 1
        self.number, self.gpus, self.cpu_milli = number, gpus, cpu
        return number - first


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


def merged_besides(
    rests: Iterable[RestOfLine], distance: float, failed: Container[GangShape], at_most: int
) -> list[WaitingRow]:
    """Of so many in order, the rows of other shapes than these: no entries are made of the others, but where the
    last of them are counted."""
    heap, width, left = _by_share(rests), distance * _MANY / 4, at_most
    rows: list[WaitingRow] = []
    while heap and left:
        until, passed = _above(heap[0][0], width), 0
        found: list[ShareEntry] = []
        before: dict[int, RestOfLine] = {}  # as they were
        while heap and heap[0][0] < until and passed <= left:
            _, number, rest = heapq.heappop(heap)
            if number not in before:
                before[number] = rest.copy()
            some = rest.pass_below(until, failed, found, left + 1)
            if some:  # else it was its last
                passed += some
                heapq.heappush(heap, (rest.share(), number, rest))
        if passed > left:
            again = {number: rest for _, number, rest in heap} | before
            last = itertools.chain.from_iterable(merged(again.values(), width / _MANY))
            rows += [entry[4] for entry in itertools.islice(last, left) if entry[4][1] not in failed]
            break
        found.sort()
        rows += [entry[4] for entry in found]
        left -= passed
        width = _next_width(width, passed)
    return rows


def _above(lowest: float, width: float) -> float:
    return max(lowest + width, math.nextafter(lowest, math.inf))


def _next_width(width: float, many: int) -> float:
    """After a stretch of so many."""
    if many < _MANY:
        return 2 * width or math.ulp(1.0)
    return width / 2 if many > 4 * _MANY else width
