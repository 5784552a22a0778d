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

from cumulo.engine.decide import admission
from cumulo.engine.decide.books import Books
from cumulo.engine.decide.fairness import Tenant
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.request import Sequence, State

_LEFT_TO_OTHERS = 8  # an eighth


@dataclass(slots=True)
class Holding:
    slots: int = 0
    blocks: int = 0


def held_by_tenant(books: Books) -> dict[Tenant, Holding]:
    """Of those who run. A block that several sequences share counts for each of them."""
    held: dict[Tenant, Holding] = {}
    for sequence in books.running:
        if sequence.state == State.RUNNING:
            own = held.setdefault(sequence.request.share, Holding())
            own.slots += 1
            own.blocks += len(sequence.blocks)
    for request in books.requests.values():
        if request.reserved_slots:
            held.setdefault(request.share, Holding()).slots += len(request.reserved_slots)
    return held


def _wanted(books: Books, sequence: Sequence) -> Holding:
    blocks = -(-len(sequence.tokens) // books.pool.block_size)
    return Holding(1 + max(0, sequence.request.slots_to_reserve), blocks)


def _share(books: Books) -> Holding:
    tenants = max(1, books.shares.here)
    return Holding(max(1, books.config.max_running // tenants), max(1, books.pool.blocks // tenants))


def _is_within_share(books: Books, sequence: Sequence, held: dict[Tenant, Holding]) -> bool:
    own, wanted = held.get(sequence.request.share, Holding()), _wanted(books, sequence)
    share = _share(books)
    return own.slots + wanted.slots <= share.slots and own.blocks + wanted.blocks <= share.blocks


def _leaves_room(books: Books, sequence: Sequence, held: dict[Tenant, Holding]) -> bool:
    """Whether the others' eighth stays free. One that holds nothing need not leave it: alone, everything fits."""
    if sequence.request.share not in held:
        return True
    wanted = _wanted(books, sequence)
    return (
        len(books.residency.free_slots) - wanted.slots >= books.config.max_running // _LEFT_TO_OTHERS
        and books.pool.free_count - wanted.blocks >= books.pool.blocks // _LEFT_TO_OTHERS
    )


def admit(books: Books, plan: StepPlan, now_s: float, passing: Collection[Tenant] = ()) -> Sequence | None:
    """As admission.admit_next, by the rules above."""
    held = held_by_tenant(books)
    passed = set(passing)
    blocked = False
    while (sequence := books.queue.first(passed)) is not None:
        within = _is_within_share(books, sequence, held)
        if within or not blocked:
            fits = admission.obstacle(books, sequence) is None
            if fits and not within and not _leaves_room(books, sequence, held):
                sequence.request.story.block(
                    now_s, "fair_share", "places and KV blocks that are left to other keys"
                )
            elif (admitted := admission.admit_next(books, plan, now_s, passed)) is not None:
                return admitted
            else:
                blocked = True
        passed.add(sequence.request.share)
    return None


def make_room(books: Books, plan: StepPlan, now_s: float) -> None:
    """Preempt sequences of tenants beyond their share for a request whose tenant stays within its own."""
    if not books.queue.count:
        return
    head = _first_within_share(books)
    if head is None or head.pending:
        return
    slots_short, blocks_short = books.residency.shortage(head, len(books.running))
    if slots_short <= 0 and blocks_short <= 0:
        return
    held, share = held_by_tenant(books), _share(books)
    for victim in reversed(books.running[1:]):  # the youngest first, and never the oldest: it always gets on
        own = held.get(victim.request.share)
        if victim.state != State.RUNNING or victim.request.sends or own is None:
            continue
        if victim.request.share is head.request.share or victim.request.priority < head.request.priority:
            continue
        has_slots, has_blocks = own.slots > share.slots, own.blocks > share.blocks
        if not ((slots_short > 0 and has_slots) or (blocks_short > 0 and has_blocks)):
            continue
        own.slots -= 1 + len(victim.request.reserved_slots)
        own.blocks -= len(victim.blocks)
        admission.preempt(
            books, victim, plan, now_s, "fair_share", head, "whose key holds less than its share"
        )
        slots_short, blocks_short = books.residency.shortage(head, len(books.running))
        slots_short -= len(books.residency.slots_freed)
        if slots_short <= 0 and blocks_short <= 0:
            return


def _first_within_share(books: Books) -> Sequence | None:
    held = held_by_tenant(books)
    passed: set[Tenant] = set()
    while (sequence := books.queue.first(passed)) is not None:
        if _is_within_share(books, sequence, held):
            return sequence
        passed.add(sequence.request.share)
    return None
