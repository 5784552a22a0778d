"""Admission: which waiting sequence gets a slot and blocks, and which running one is preempted for it. Asked by the
scheduler while it plans a step; what is decided is told in the stories of the requests.
"""

from collections.abc import Collection

from cumulo.engine.decide import handover
from cumulo.engine.decide.books import Books
from cumulo.engine.decide.fairness import Tenant
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.preemption import less_important, victim_for
from cumulo.engine.decide.request import Sequence, State
from cumulo.engine.decide.story import PreemptionCause, WaitCause


def obstacle(books: Books, sequence: Sequence) -> tuple[WaitCause, str] | None:
    """What keeps a waiting sequence from being admitted, also in words; None if it fits."""
    if sequence.pending:
        return "step_in_flight", "the step in flight, which draws its next token"
    slots_short, blocks_short = books.residency.shortage(sequence, len(books.running))
    if slots_short > 0:
        in_use = books.config.max_running - len(books.residency.free_slots)
        return "slots", f"{slots_short} of the {in_use} slots in use"
    if blocks_short > 0:
        return "kv_blocks", f"{blocks_short} of the {books.pool.used_count} KV blocks in use"
    return None


def tell_first(books: Books, now_s: float, cause: WaitCause, why: str) -> None:
    """Record what the first in the queue waits for; and of one passed over for it, that this is fairness."""
    first = books.queue.first()
    if first is not None:
        first.request.story.block(now_s, cause, why)
        _tell_passed_over(books, now_s)


def _tell_passed_over(books: Books, now_s: float) -> None:
    if (passed_over := books.queue.passed_over) is not None:
        passed_over.request.story.block(now_s, "fair_share", "those whose keys have been served less")


def admit_next(
    books: Books, plan: StepPlan, now_s: float, passing: Collection[Tenant] = ()
) -> Sequence | None:
    """Give the first waiting sequence a slot and blocks for all its known tokens, if there is room. Tenants in
    `passing` are passed over."""
    sequence = books.queue.first(passing)
    if sequence is None:
        return None
    _tell_passed_over(books, now_s)
    if (found := obstacle(books, sequence)) is not None:
        sequence.request.story.block(now_s, *found)
        return None

    books.queue.take_first()
    incoming = books.transfers.of_request.get(sequence.request.id)
    if incoming is not None and handover.reserve(books, sequence, incoming, plan.index, now_s):
        return sequence  # with nothing to compute until its KV is here
    before = len(plan.swap_in)
    cached, how = books.residency.seat(sequence, plan)
    moved = len(plan.swap_in) - before
    if books.residency.tiers is not None and moved and cached:
        _tell_fetched(books, sequence, moved, now_s)
    books.add_running(sequence)
    if sequence.request.sends:
        # What this very step fetches from host memory cannot be read yet: the step's end tells of it.
        handover.offer(books, sequence, cached - moved * books.config.block_size)
    lost, sequence.lost = sequence.lost, 0
    request, tokens = sequence.request, len(sequence.tokens)
    if request.story.admitted_s is None:
        request.share.prompt_tokens += tokens - cached  # recomputation is not the tenant's doing
    request.story.admit(now_s, plan.index, tokens, cached, lost, how)
    return sequence


def _tell_fetched(books: Books, sequence: Sequence, blocks: int, now_s: float) -> None:
    """What came from host memory; what was read from disk before that has been told."""
    tiers, costs, story = books.residency.tiers, books.residency.costs, sequence.request.story
    if tiers is None or any(event.kind == "fetched" for event in story.events):
        return
    tokens = blocks * books.config.block_size
    tiers.counts.host_hit_tokens += tokens
    story.add(
        now_s, "fetched", where="in host memory", tokens=tokens, fetch_ms=1e3 * blocks * costs.swap_s_per_block,
        compute_ms=1e3 * tokens * costs.recompute_s_per_token,
    )  # fmt: skip


def make_room_for_priority(books: Books, plan: StepPlan, now_s: float) -> None:
    """Preempt strictly less important sequences when that lets the first in the queue start."""
    head = books.queue.first()
    if head is None or head.pending:
        return
    victims = less_important(head, books.running, books.queue.level)
    if books.pool.homes > 1:
        home = books.residency.home_for(books.residency.blocks_wanted(head)[0])
        victims = [victim for victim in victims if books.residency.home(victim) == home]
    if not victims:
        return
    slots_short, blocks_short = books.residency.shortage(head, len(books.running))
    references = books.pool.references
    sole = sum(references[block] == 1 for victim in victims for block in victim.blocks)
    if slots_short > len(victims) or blocks_short > sole:
        return  # not even all of them would do
    while victims and (slots_short > 0 or blocks_short > 0):
        preempt(books, victims.pop(), plan, now_s, "priority", head, "which is more important")
        slots_short, blocks_short = books.residency.shortage(head, len(books.running))
        slots_short -= len(books.residency.slots_freed)


def admit_past_parked(books: Books, plan: StepPlan, now_s: float) -> Sequence | None:
    """Nobody who runs can compute: beams that wait for each other hold blocks and slots idly. If nothing
    is in flight either, the youngest of them give way until the first in the queue fits."""
    head = books.queue.first()
    books.residency.reuse_slots()
    if head is None:
        return None
    for victim in reversed(books.running) if not books.in_flight else ():
        if obstacle(books, head) is None:
            break
        if victim.state == State.RUNNING:
            why = "which is first in the queue, while these beams waited for each other"
            preempt(books, victim, plan, now_s, "parked_beams", head, why)
            books.residency.reuse_slots()
    books.drop_ended()
    return admit_next(books, plan, now_s)


def preempt(
    books: Books,
    victim: Sequence,
    plan: StepPlan,
    now_s: float,
    cause: PreemptionCause,
    by: Sequence,
    why: str,
) -> None:
    """Take the victim's blocks and slot; if it has something to do, it takes its old place in the queue."""
    blocks = len(victim.blocks)
    choice = books.residency.send_away(victim, plan)
    victim.request.story.preempt(now_s, plan.index, cause, by.request.id, why, blocks, choice.why)
    if victim.candidates is None:
        books.queue.enter(victim)
    else:  # a beam with nothing to compute until its fellows are there, too
        books.queue.park(victim)


def make_room(books: Books, sequence: Sequence, position: int, plan: StepPlan, now_s: float) -> bool:
    """A block of its own for the sequence's next token. If none is free, a younger sequence that is not yet
    in this plan gives way; False if there is none."""
    while books.residency.needs_block(sequence, position):
        residency = books.residency
        home = residency.home(sequence) if books.pool.homes > 1 else 0
        if books.pool.free_in(home):
            residency.give_block(sequence, position, plan)
            return True
        running = books.running
        if books.pool.homes > 1:  # a block elsewhere would not help
            running = [s for s in running if s.state == State.RUNNING and residency.home(s) == home]
        victim = victim_for(sequence, running, plan.index, len(books.shares.tenants))
        if victim is None:
            return False
        preempt(books, victim, plan, now_s, "kv_blocks", sequence, "which is older and needed a KV block")
    return True
