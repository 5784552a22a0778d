"""TenantQueue: sequences that wait for room, and whose turn it is. Takes the place of the core's WaitingQueue.

Every tenant has a line of its own, first in order first. Whose turn it is: the request that is first in order
over all lines (`Request.order`: by arrival and priority) names the *level*; among the tenants whose first request
is as important as that or more, the one that has been served least goes first (tenants.py), and between equals
the order decides. With a single tenant that is the order and nothing else.
"""

from collections.abc import Collection

from cumulo.engine.decide.core.queue import WaitingQueue
from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.sharing.tenants import FairShares, Tenant


class TenantQueue(WaitingQueue):
    def __init__(self, shares: FairShares) -> None:
        super().__init__()
        self.passed_over: Sequence | None = None  # first in order, but its tenant had been served more
        self.by_order = False  # whoever has been served more or less: promises are kept by deadline
        self._shares = shares
        self._lines: dict[Tenant, WaitingQueue] = {}  # of tenants that have something queued
        self._last_to_leave: Tenant | None = None
        self._turn: Tenant | None = None

    # -- coming and going ---------------------------------------------------------------------------------
    def arrive(self, sequence: Sequence) -> None:
        tenant = sequence.request.usage
        if tenant not in self._lines:
            away = self._last_to_leave.counter if self._last_to_leave is not None else 0.0
            level = min((one.counter for one in self._lines), default=away)
            tenant.lift(level)
            self._shares.forget_idle(level)
        self.enter(sequence)

    def park(self, sequence: Sequence) -> None:
        super().park(sequence)
        sequence.request.usage.waiting += 1

    def push(self, sequence: Sequence) -> None:
        self._lines.setdefault(sequence.request.usage, WaitingQueue()).push(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        if (line := self._lines.get(sequence.request.usage)) is not None:
            line.set_aside(sequence)
            self._drop_if_empty(sequence.request.usage)

    def take_first(self) -> None:
        assert self._turn is not None
        self._lines[self._turn].take_first()
        self._left(self._turn)
        self._drop_if_empty(self._turn)

    def leave(self, sequence: Sequence) -> None:
        self._left(sequence.request.usage)
        self.set_aside(sequence)

    def _left(self, tenant: Tenant) -> None:
        self.count -= 1
        tenant.waiting -= 1
        if tenant.waiting == 0:
            tenant.rested = True

    def _drop_if_empty(self, tenant: Tenant) -> None:
        if self._lines[tenant].first() is None:
            del self._lines[tenant]
            self._last_to_leave = tenant

    # -- who is next --------------------------------------------------------------------------------------
    def first(self, passing: Collection[Tenant] = ()) -> Sequence | None:
        """Whose turn it is, tenants in `passing` left out; None if nobody can be admitted."""
        heads = [head for line in self._lines.values() if (head := line.first()) is not None]
        earliest = chosen = min(heads, key=lambda one: one.request.order, default=None)
        if earliest is not None:
            self.level = earliest.request.priority
        if not self.by_order:
            chosen = min(
                (
                    one
                    for one in heads
                    if one.request.priority <= self.level and one.request.usage not in passing
                ),
                key=lambda one: (one.request.usage.counter, one.request.order),
                default=None,
            )
            if chosen is not None and chosen is not earliest:
                self.passed_over = earliest
        self._turn = None if chosen is None else chosen.request.usage
        return chosen
