"""TenantQueue: sequences that wait for room, and whose turn it is. Takes the place of the core's WaitingQueue.

Every tenant has a line of its own, first in order first. Whose turn it is: the request that is first in order
over all lines (`Request.order`: by arrival and priority) names the *level*; among the tenants whose first request
is as important as that or more, the one that has been served least goes first (tenants.py), and between equals
the order decides. With a single tenant that is the order and nothing else.

Nothing here searches. Lines are heaps; entries of sequences that have ended are passed over when they come up.
Tenants are in two heaps per priority, by order and by counter; counters only grow, so an entry that has become
too small is put right when it comes up. Adding, aborting and looking at the first cost the same with ten waiting
as with a hundred thousand, of one tenant or of as many.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field

from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.sharing.tenants import FairShares, Tenant

Order = tuple[float, int]


class _Line:
    """One tenant's queued sequences."""

    __slots__ = ("heap", "number", "place", "tenant")

    def __init__(self, tenant: Tenant, number: int) -> None:
        self.tenant, self.number = tenant, number  # the number breaks ties with its tenant's former lines
        self.heap: list[tuple[Order, int, Sequence]] = []
        self.place: tuple[int, Order] | None = None  # its first's priority and order, as the levels know it

    def first(self) -> Sequence | None:
        heap = self.heap
        while heap and heap[0][2].queued != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def push(self, sequence: Sequence) -> None:
        if len(self.heap) > 64 and len(self.heap) > 2 * self.tenant.waiting:
            # Mostly entries of ended sequences: drop them, so that memory follows the live ones.
            self.heap = [entry for entry in self.heap if entry[2].queued == entry[1]]
            heapq.heapify(self.heap)
        heapq.heappush(self.heap, (sequence.request.order, sequence.queued, sequence))


_ByCounter = tuple[float, Order, int, _Line]


@dataclass(slots=True)
class _Level:
    """The lines whose first has this priority; entries that no longer say so are dropped when they come up."""

    lines: int = 0
    by_order: list[tuple[Order, int, _Line]] = field(default_factory=list)
    by_counter: list[_ByCounter] = field(default_factory=list)

    def add(self, priority: int, order: Order, line: _Line) -> None:
        self.lines += 1
        if len(self.by_order) + len(self.by_counter) > 64 + 4 * self.lines:
            # Mostly entries that no longer hold; a line that came back to an old place may have several.
            self.by_order = sorted({one for one in self.by_order if one[2].place == (priority, one[0])})
            self.by_counter = sorted((one[2].tenant.counter, *one) for one in self.by_order)
        heapq.heappush(self.by_order, (order, line.number, line))
        heapq.heappush(self.by_counter, (line.tenant.counter, order, line.number, line))


class TenantQueue:
    def __init__(self, shares: FairShares) -> None:
        self.count = 0  # sequences that wait, queued or (beams waiting for their fellows) not
        self.level = 0  # the priority whose turn it was when `first` was last asked
        self.passed_over: Sequence | None = None  # first in order, but its tenant had been served more
        self.by_order = False  # whoever has been served more or less: promises are kept by deadline
        self._shares = shares
        self._lines: dict[str, _Line] = {}  # of tenants that have an entry
        self._levels: dict[int, _Level] = {}
        self._pushes = 0  # numbers entries and lines; breaks ties: samples of one request have the same order
        self._last_to_leave: Tenant | None = None
        self._turn: _Line | None = None

    # -- coming and going ---------------------------------------------------------------------------------
    def arrive(self, sequence: Sequence) -> None:
        """A new request's first sequence."""
        tenant = sequence.request.usage
        if tenant.name not in self._lines:
            if len(self._lines) > 1:
                level = min(found[0] for priority in self._levels if (found := self._least(priority)))
            elif self._lines:
                level = next(iter(self._lines.values())).tenant.counter
            else:
                level = self._last_to_leave.counter if self._last_to_leave is not None else 0.0
            tenant.lift(level)
            self._shares.forget_idle(level)
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        self.park(sequence)
        self.push(sequence)

    def park(self, sequence: Sequence) -> None:
        """It waits, but is not queued: a beam whose next token is not chosen yet."""
        sequence.state = State.WAITING
        sequence.request.usage.waiting += 1
        self.count += 1

    def push(self, sequence: Sequence) -> None:
        """Queue a waiting sequence that is not queued now."""
        tenant = sequence.request.usage
        self._pushes += 1
        line = self._lines.get(tenant.name)
        if line is None:
            line = self._lines[tenant.name] = _Line(tenant, self._pushes)
            if len(self._lines) == 2:
                self._place(next(iter(self._lines.values())))  # it was alone
        sequence.queued = self._pushes
        line.push(sequence)
        self._place(line)

    def set_aside(self, sequence: Sequence) -> None:
        """A beam that waits has been computed meanwhile: it is queued again when it is given its next token."""
        sequence.queued = 0
        if (line := self._lines.get(sequence.request.usage.name)) is not None:
            self._place(line)

    def take_first(self) -> None:
        """What `first` returned is admitted."""
        line = self._turn
        assert line is not None
        _, _, sequence = heapq.heappop(line.heap)
        sequence.queued = 0
        self._left(line.tenant)
        self._place(line)

    def leave(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        self._left(sequence.request.usage)
        self.set_aside(sequence)

    def _left(self, tenant: Tenant) -> None:
        self.count -= 1
        tenant.waiting -= 1
        if tenant.waiting == 0:
            tenant.rested = True

    def _place(self, line: _Line) -> None:
        """Tell the levels who is first in this line now. A line that was always alone has no place: nobody asks."""
        place = _place_of(line.first())
        if place != line.place and (line.place is not None or len(self._lines) > 1):
            if line.place is not None:
                level = self._levels[line.place[0]]
                level.lines -= 1
                if level.lines == 0:
                    del self._levels[line.place[0]]
            line.place = place
            if place is not None:
                found = self._levels.get(place[0])
                if found is None:
                    found = self._levels[place[0]] = _Level()
                found.add(*place, line)
        if place is None:
            del self._lines[line.tenant.name]
            self._last_to_leave = line.tenant

    # -- who is next --------------------------------------------------------------------------------------
    def first(self, passing: Collection[Tenant] = ()) -> Sequence | None:
        """Whose turn it is, tenants in `passing` left out; None if nobody can be admitted."""
        if not self._lines:
            self._turn = None
            return None
        if len(self._lines) == 1:
            (self._turn,) = self._lines.values()
            if self._turn.tenant in passing:
                self._turn = None
                return None
            first = self._turn.first()
            assert first is not None
            self.level = first.request.priority
            return first
        *_, earliest = min(self._earliest(priority) for priority in self._levels)
        assert earliest.place is not None
        self.level = earliest.place[0]
        if self.by_order:
            self._turn = earliest
            return earliest.first()
        found = [self._least(priority, passing) for priority in self._levels if priority <= self.level]
        *_, self._turn = min(
            (one for one in found if one is not None), default=(None,), key=lambda entry: entry[:3]
        )
        if self._turn is None:
            return None
        if earliest is not self._turn:
            self.passed_over = earliest.first()
        return self._turn.first()

    def _earliest(self, priority: int) -> tuple[Order, int, _Line]:
        """The first in order of the lines of this level."""
        heap = self._levels[priority].by_order
        while heap[0][2].place != (priority, heap[0][0]):
            heapq.heappop(heap)
        return heap[0]

    def _least(self, priority: int, passing: Collection[Tenant] = ()) -> _ByCounter | None:
        """Of the lines of this level, the one whose tenant has been served least; None: all are passed over."""
        heap, aside = self._levels[priority].by_counter, list[_ByCounter]()
        found: _ByCounter | None = None
        while heap and found is None:
            counter, order, number, line = heap[0]
            if line.place != (priority, order):
                heapq.heappop(heap)
            elif counter != line.tenant.counter:
                heapq.heapreplace(heap, (line.tenant.counter, order, number, line))
            elif line.tenant in passing:
                aside.append(heapq.heappop(heap))
            else:
                found = heap[0]
        for entry in aside:
            heapq.heappush(heap, entry)
        return found


def _place_of(sequence: Sequence | None) -> tuple[int, Order] | None:
    return None if sequence is None else (sequence.request.priority, sequence.request.order)
