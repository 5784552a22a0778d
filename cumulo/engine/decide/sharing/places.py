"""Places: how many slots and KV blocks each tenant may hold while several are about. Asked by steps.py.

An equal part for each tenant that has requests is its *share*. Three rules:

- A tenant that holds something leaves an eighth of all slots and blocks to the others when it is given more.
- A request that does not fit keeps only those waiting who would go beyond their share; others pass.
- If a request within its tenant's share finds no room, sequences of tenants beyond theirs are preempted.

So no tenant keeps the others out, however many samples it asks for at once or however long its contexts are; and as
the others never take more than their shares from it, a request that is no larger than a share finds its room.
"""

from collections.abc import Collection
from dataclasses import dataclass

from cumulo.engine.decide.core import admission
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.sharing.queue import TenantQueue
from cumulo.engine.decide.sharing.tenants import FairShares, Tenant

_LEFT_TO_OTHERS = 8  # an eighth


@dataclass(slots=True)
class Holding:
    slots: int = 0
    blocks: int = 0


class Places:
    def __init__(self, batch: RequestBatch, shares: FairShares, queue: TenantQueue) -> None:
        self._batch, self._shares, self._queue = batch, shares, queue

    def held_by_tenant(self) -> dict[Tenant, Holding]:
        """The slots and blocks of those who run. A block that several sequences share counts for each of them."""
        held: dict[Tenant, Holding] = {}
        for sequence in self._batch.running:
            if sequence.state == State.RUNNING:
                own = held.setdefault(sequence.request.share, Holding())
                own.slots += 1
                own.blocks += len(sequence.blocks)
        for request in self._batch.requests.values():
            if request.reserved_slots:
                held.setdefault(request.share, Holding()).slots += len(request.reserved_slots)
        return held

    def _wanted(self, sequence: Sequence) -> Holding:
        blocks = -(-len(sequence.tokens) // self._batch.pool.block_size)
        return Holding(1 + max(0, sequence.request.slots_to_reserve), blocks)

    def _share(self) -> Holding:
        tenants = max(1, self._shares.here)
        return Holding(
            max(1, self._batch.config.max_running // tenants), max(1, self._batch.pool.blocks // tenants)
        )

    def _is_within_share(self, sequence: Sequence, held: dict[Tenant, Holding]) -> bool:
        own, wanted = held.get(sequence.request.share, Holding()), self._wanted(sequence)
        share = self._share()
        return own.slots + wanted.slots <= share.slots and own.blocks + wanted.blocks <= share.blocks

    def _leaves_room(self, sequence: Sequence, held: dict[Tenant, Holding]) -> bool:
        """Whether the others' eighth stays free. One that holds nothing need not leave it:
        alone, everything fits."""
        if sequence.request.share not in held:
            return True
        wanted = self._wanted(sequence)
        return (
            len(self._batch.kv.free_slots) - wanted.slots >= self._batch.config.max_running // _LEFT_TO_OTHERS
            and self._batch.pool.free_count - wanted.blocks >= self._batch.pool.blocks // _LEFT_TO_OTHERS
        )

    def admit(self, plan: StepPlan, now_s: float, passing: Collection[Tenant] = ()) -> Sequence | None:
        """As admission.admit_next, by the rules above."""
        held = self.held_by_tenant()
        passed = set(passing)
        blocked = False
        while (sequence := self._queue.first(passed)) is not None:
            within = self._is_within_share(sequence, held)
            if within or not blocked:
                fits = admission.obstacle(self._batch, sequence) is None
                if fits and not within and not self._leaves_room(sequence, held):
                    sequence.request.story.block(
                        now_s, "fair_share", "places and KV blocks that are left to other keys"
                    )
                elif (admitted := admission.admit(self._batch, sequence, plan, now_s)) is not None:
                    return admitted
                else:
                    blocked = True
            passed.add(sequence.request.share)
        return None

    def make_room(self, plan: StepPlan, now_s: float) -> None:
        """Preempt sequences of tenants beyond their share for a request whose tenant stays within its own."""
        if not self._queue.count:
            return
        head = self._first_within_share()
        if head is None or head.pending:
            return
        slots_short, blocks_short = self._batch.kv.shortage(head, len(self._batch.running))
        if slots_short <= 0 and blocks_short <= 0:
            return
        held, share = self.held_by_tenant(), self._share()
        for victim in reversed(
            self._batch.running[1:]
        ):  # the youngest first, and never the oldest: it always gets on
            own = held.get(victim.request.share)
            if victim.state != State.RUNNING or victim.request.prefill_only or own is None:
                continue
            if victim.request.share is head.request.share or victim.request.priority < head.request.priority:
                continue
            has_slots, has_blocks = own.slots > share.slots, own.blocks > share.blocks
            if not ((slots_short > 0 and has_slots) or (blocks_short > 0 and has_blocks)):
                continue
            own.slots -= 1 + len(victim.request.reserved_slots)
            own.blocks -= len(victim.blocks)
            admission.preempt(
                self._batch, victim, plan, now_s, "fair_share", head, "whose key holds less than its share"
            )
            slots_short, blocks_short = self._batch.kv.shortage(head, len(self._batch.running))
            slots_short -= len(self._batch.kv.slots_freed)
            if slots_short <= 0 and blocks_short <= 0:
                return

    def _first_within_share(self) -> Sequence | None:
        held = self.held_by_tenant()
        passed: set[Tenant] = set()
        while (sequence := self._queue.first(passed)) is not None:
            if self._is_within_share(sequence, held):
                return sequence
            passed.add(sequence.request.share)
        return None
