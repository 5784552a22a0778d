"""Admission: which requests can run at all, which waiting sequence gets a slot and blocks, and which running one is
preempted for it. Asked by the scheduler; what is decided is told in the stories of the requests.
"""

from collections.abc import Iterator
from collections.abc import Sequence as ListLike

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.story import OutputLimit, PreemptionCause, WaitCause
from cumulo.errors import InvalidRequest


# -- on arrival ----------------------------------------------------------------------------------------------------
def output_limit(
    prompt_tokens: int, params: SamplingParams, config: SchedulerConfig
) -> tuple[int, OutputLimit]:
    """The number of output tokens at which a request ends, and what ends it there.

    Raises InvalidRequest for one that could never run. What passes always fits when it runs alone.
    """
    if params.pooling is not None:
        check_whole(prompt_tokens, config, "embed")
        return 0, "max_tokens"
    if prompt_tokens >= config.max_context:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens; the context holds {config.max_context} including the "
            f"answer: shorten the prompt or raise max_context"
        )
    if params.samples > config.max_running:
        raise InvalidRequest(
            f"{params.samples} samples were asked for, but only {config.max_running} sequences run at a "
            f"time: lower n, best_of or beam_width, or raise max_running"
        )
    # The last token drawn is never computed, so it needs no room in a block.
    cache_tokens = config.blocks // config.dp * config.block_size + 1
    if prompt_tokens >= cache_tokens:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens; the KV cache holds {cache_tokens - 1}: shorten the "
            f"prompt or give the cache more memory (kv_memory_gib)"
        )
    room = min(config.max_context, cache_tokens) - prompt_tokens
    if params.max_tokens is None or params.max_tokens > room:
        return room, "context" if room == config.max_context - prompt_tokens else "KV cache"
    return params.max_tokens, "max_tokens"


def check_whole(tokens: int, config: SchedulerConfig, verb: str) -> None:
    """Nothing is drawn, so the text may fill the context to its end."""
    cache_tokens = config.blocks // config.dp * config.block_size
    what, limit = "context", config.max_context
    if cache_tokens < limit:
        what, limit = "KV cache", cache_tokens
    if tokens > limit:
        option = "max_context" if what == "context" else "kv_memory_gib"
        raise InvalidRequest(
            f"there are {tokens} tokens to {verb}; the {what} holds {limit}: shorten the text or raise {option}"
        )


# -- from the queue ------------------------------------------------------------------------------------------------
def tokens_to_compute(batch: RequestBatch, sequence: Sequence) -> int:
    """Tokens of a waiting sequence that are in no cache."""
    cached = len(batch.kv.blocks_wanted(sequence)[0]) * batch.pool.block_size
    elsewhere = sum(one.tokens_elsewhere(sequence, cached) for one in batch.points.tokens_elsewhere)
    return len(sequence.tokens) - cached - elsewhere


def obstacle(batch: RequestBatch, sequence: Sequence) -> tuple[WaitCause, str] | None:
    """What keeps a waiting sequence from being admitted, also in words; None if it fits."""
    if sequence.pending:
        return "step_in_flight", "the step in flight, which draws its next token"
    slots_short, blocks_short = batch.kv.shortage(sequence, len(batch.running))
    if slots_short > 0:
        in_use = batch.config.max_running - len(batch.kv.free_slots)
        return "slots", f"{slots_short} of the {in_use} slots in use"
    if blocks_short > 0:
        return "kv_blocks", f"{blocks_short} of the {batch.pool.used_count} KV blocks in use"
    return None


def admit_next(batch: RequestBatch, plan: StepPlan, now_s: float) -> Sequence | None:
    """Give the first waiting sequence a slot and blocks for all its known tokens, if there is room."""
    sequence = batch.queue.first()
    return None if sequence is None else admit(batch, sequence, plan, now_s)


def admit(batch: RequestBatch, sequence: Sequence, plan: StepPlan, now_s: float) -> Sequence | None:
    """Admit what the queue's `first` returned; None if there is no room."""
    request = sequence.request
    if (found := obstacle(batch, sequence)) is not None:
        request.story.block(now_s, *found)
        return None
    batch.queue.take_first()
    for one in batch.points.take_admission:
        if one.take_admission(sequence, plan, now_s):
            return sequence
    cached = batch.kv.seat(sequence, plan)
    batch.add_running(sequence)
    cached += sum(one.admitted(sequence, cached, plan, now_s) for one in batch.points.admitted)
    lost, sequence.lost = sequence.lost, 0
    request.story.admit(now_s, plan.index, len(sequence.tokens), cached, lost)
    return sequence


def make_room_for_priority(batch: RequestBatch, plan: StepPlan, now_s: float) -> None:
    """Preempt strictly less important sequences when that lets the first in the queue start."""
    head = batch.queue.first()
    if head is None or head.pending:
        return
    victims = less_important(head, batch.running, batch.queue.level)
    if batch.pool.ranks > 1:
        rank = batch.kv.rank_for(batch.kv.blocks_wanted(head)[0])
        victims = [victim for victim in victims if batch.kv.rank(victim) == rank]
    if not victims:
        return
    slots_short, blocks_short = still_short(batch, head)
    references = batch.pool.references
    sole = sum(references[block] == 1 for victim in victims for block in victim.blocks)
    if slots_short > len(victims) or blocks_short > sole:
        return  # not even all of them would do
    for one in batch.points.order_victims:
        victims = one.order_victims(victims)
    for victim in victims:
        if max(still_short(batch, head)) <= 0:
            return
        preempt(batch, victim, plan, now_s, "priority", head, "which is more important")


def still_short(batch: RequestBatch, head: Sequence) -> tuple[int, int]:
    """How many slots and blocks the first in the queue lacks, besides those that preemption has freed."""
    slots_short, blocks_short = batch.kv.shortage(head, len(batch.running))
    return slots_short - len(batch.kv.slots_freed), blocks_short


def admit_past_parked(batch: RequestBatch, plan: StepPlan, now_s: float) -> Sequence | None:
    """Nobody who runs can compute: beams that wait for each other hold blocks and slots idly. If nothing
    is in flight either, the youngest of them give way until the first in the queue fits."""
    head = batch.queue.first()
    batch.kv.reuse_slots()
    if head is None:
        return None
    for victim in reversed(batch.running) if not batch.in_flight else ():
        if obstacle(batch, head) is None:
            break
        if victim.state == State.RUNNING:
            why = "which is first in the queue, while these beams waited for each other"
            preempt(batch, victim, plan, now_s, "parked_beams", head, why)
            batch.kv.reuse_slots()
    batch.drop_ended()
    return admit_next(batch, plan, now_s)


# -- back to the queue ---------------------------------------------------------------------------------------------
def younger(sequence: Sequence, running: ListLike[Sequence], step: int) -> Iterator[Sequence]:
    """Who may give a block to this sequence, the youngest first: only younger ones, so that the oldest always gets
    on, and none that is in this step already. `running` is in order, oldest first."""
    for other in reversed(running):
        if other.request.order < sequence.request.order:
            return
        if other.state != State.RUNNING or other.last_step == step or other is sequence:
            continue
        if not other.request.prefill_only:  # its blocks are the receiver's, too: it would not free them
            yield other


def less_important(head: Sequence, running: ListLike[Sequence], level: int) -> list[Sequence]:
    """Who may have to give way to the first in the queue, the youngest first. Beyond the level whose turn it is and
    younger in order: any other would only come straight back."""
    order = head.request.order
    return [
        s
        for s in reversed(running)
        if s.request.priority > level and s.request.order > order and not s.request.prefill_only
    ]


def preempt(
    batch: RequestBatch,
    victim: Sequence,
    plan: StepPlan,
    now_s: float,
    cause: PreemptionCause,
    by: Sequence,
    why: str,
) -> None:
    """Take the victim's blocks and slot; if it has something to do, it takes its old place in the queue."""
    blocks = len(victim.blocks)
    batch.kv.send_away(victim)
    victim.request.story.preempt(now_s, plan.index, cause, by.request.id, why, blocks)
    if victim.candidates is None:
        batch.queue.enter(victim)
    else:  # a beam with nothing to compute until its fellows are there, too
        batch.queue.park(victim)


def make_room(batch: RequestBatch, sequence: Sequence, position: int, plan: StepPlan, now_s: float) -> bool:
    """A block of its own for the sequence's next token. If none is free, a younger sequence that is not yet
    in this plan gives way; False if there is none."""
    kv = batch.kv
    while kv.needs_block(sequence, position):
        rank = kv.rank(sequence)
        if batch.pool.free_on(rank):
            kv.give_block(sequence, position, plan)
            return True
        running = batch.running
        if batch.pool.ranks > 1:  # a block of another rank would not help
            running = [s for s in running if s.state == State.RUNNING and kv.rank(s) == rank]
        victims = younger(sequence, running, plan.index)
        for one in batch.points.order_victims:
            victims = iter(one.order_victims(list(victims)))
        victim = next(victims, None)
        if victim is None:
            return False
        preempt(batch, victim, plan, now_s, "kv_blocks", sequence, "which is older and needed a KV block")
    return True
