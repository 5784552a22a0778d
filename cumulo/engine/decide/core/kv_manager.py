"""KVManager: who has a slot and KV blocks. Seats sequences, makes room for their next token, sends them away.

Owned by the batch. The scheduler decides *who*; here it is decided *where*, and written into the plan. Within one
plan the runner applies changes in a fixed order, so what is freed while planning is held back until the plan is
complete: slots and the sources of copies.
"""

from collections.abc import Iterable

from cumulo.engine.decide.core.block_pool import BlockPool
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.core.step_cost import StepCost
from cumulo.engine.decide.plan import NewSlot, StepPlan


class KVManager:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(
            config.blocks, config.block_size, prefix_cache=config.prefix_cache, ranks=config.dp
        )
        self.costs = StepCost(config.shared_step_s)
        # Whether others than the runner's steps write into blocks: then no step may be played before it is planned.
        self.written_by_others = False
        self.free_slots = list(range(config.max_running - 1, -1, -1))
        self.slots_freed: list[int] = []  # these two: held back until the plan is complete
        self._copy_sources: list[int] = []

    # -- is there room? -----------------------------------------------------------------------------------
    def blocks_wanted(self, sequence: Sequence) -> tuple[list[int], int]:
        """Cached blocks the sequence can share, and how many free ones seating it takes in all."""
        pool = self.pool
        needed = -(-len(sequence.tokens) // pool.block_size)
        if not pool.prefix_cache:
            return [], needed
        cached = pool.cached_prefix(sequence.extend_hashes(self.usable_blocks(sequence), pool.block_size))
        wanted = needed - len(cached) + pool.idle_among(cached)
        if pool.ranks > 1 and cached and wanted > pool.free_on(pool.rank_of(cached[0])):
            # Where its prefix is there is no room: if there is elsewhere, it is computed again there.
            elsewhere = needed <= pool.free_on(pool.emptiest_rank)
            return ([], needed) if elsewhere else (cached, wanted)
        return cached, wanted

    def usable_blocks(self, sequence: Sequence) -> int:
        """How many blocks of a waiting sequence need not be computed, if they are found."""
        request = sequence.request
        if request.prompt_logprobs is not None and len(request.prompt_logprobs) < sequence.prompt_length - 1:
            return 0
        if request.pooled is not None and request.pooled.needs_every_token:
            return 0
        # One token is computed: its logits are wanted.
        return (len(sequence.tokens) - 1) // self.pool.block_size

    def rank_for(self, cached: list[int]) -> int:
        """Where a sequence is seated that shares these blocks, or none."""
        pool = self.pool
        if pool.ranks == 1:
            return 0
        return pool.rank_of(cached[0]) if cached else pool.emptiest_rank

    def shortage(self, sequence: Sequence, running: int) -> tuple[int, int]:
        """How many slots and blocks are missing to seat the sequence; (0, 0) or less: it fits."""
        cached, blocks = self.blocks_wanted(sequence)
        # Leave some blocks to those who run, so that a newcomer is not preempted in the next step.
        blocks += -(-running // 8)
        slots = 1 + max(0, sequence.request.slots_to_reserve)
        return slots - len(self.free_slots), blocks - self.pool.free_on(self.rank_for(cached))

    # -- coming -------------------------------------------------------------------------------------------
    def allocate(self, sequence: Sequence) -> int:
        """Give a slot, and blocks for all known tokens. Returns how many of the blocks were in the prefix cache."""
        request, pool = sequence.request, self.pool
        cached, _ = self.blocks_wanted(sequence)
        request.reserved_slots += [self.free_slots.pop() for _ in range(max(0, request.slots_to_reserve))]
        sequence.slot = self.free_slots.pop()
        pool.share(cached)
        needed = -(-len(sequence.tokens) // pool.block_size)
        rank = self.rank_for(cached)
        sequence.blocks = cached + [pool.allocate(rank) for _ in range(needed - len(cached))]
        sequence.capacity, sequence.shares_tail = needed * pool.block_size, False
        return len(cached)

    def seat(self, sequence: Sequence, plan: StepPlan) -> int:
        """Let a sequence run. Returns the tokens found in the prefix cache."""
        sequence.computed = self.allocate(sequence) * self.pool.block_size
        sequence.state = State.RUNNING
        plan.begin.append(new_slot(sequence))
        return sequence.computed

    def seat_twin(self, twin: Sequence) -> None:
        """A fork takes one of its request's reserved slots and shares all blocks."""
        twin.slot = twin.request.reserved_slots.pop()
        self.pool.share(twin.blocks)

    # -- one more token -----------------------------------------------------------------------------------
    def needs_block(self, sequence: Sequence, position: int) -> bool:
        """Whether writing `position` takes a free block: there is none yet, or it is shared."""
        if position >= sequence.capacity:
            return True
        if self.pool.references[sequence.blocks[position // self.pool.block_size]] > 1:
            return True
        sequence.shares_tail = False
        return False

    def rank(self, sequence: Sequence) -> int:
        """Where the blocks of a seated sequence are."""
        return 0 if self.pool.ranks == 1 else self.pool.rank_of(sequence.blocks[0])

    def give_block(self, sequence: Sequence, position: int, plan: StepPlan) -> None:
        """A fresh block for `position`; if it was shared, a copy of it (copy-on-write)."""
        pool = self.pool
        own = pool.allocate(self.rank(sequence) if pool.ranks > 1 else 0)
        if position >= sequence.capacity:
            sequence.blocks.append(own)
            sequence.capacity += pool.block_size
            plan.extend.append((sequence.slot, own))
        else:
            index = position // pool.block_size
            shared = sequence.blocks[index]
            sequence.blocks[index] = own
            plan.copies.append((shared, own))
            plan.replace.append((sequence.slot, index, own))
            # Its reference keeps the source alive until the plan is complete.
            self._copy_sources.append(shared)
        sequence.shares_tail = False

    def room_ahead(self, sequence: Sequence, position: int, count: int, spare: int, plan: StepPlan) -> int:
        """For how many of the `count` tokens after `position`, whose own block is there, there is room: in blocks
        that the sequence has, or in free ones while more than `spare` are left to others."""
        while position + count >= sequence.capacity and self.pool.free_on(self.rank(sequence)) > spare:
            self.give_block(sequence, sequence.capacity, plan)
        return max(0, min(count, sequence.capacity - 1 - position))

    def register_full(self, rows: Iterable[Sequence], plan: StepPlan) -> None:
        """Blocks this step filled can serve others from now on."""
        if not self.pool.prefix_cache:
            return
        size = self.pool.block_size
        for sequence, start, count in zip(rows, plan.starts, plan.counts, strict=True):
            end = start + count
            if start // size == end // size or sequence.state != State.RUNNING or sequence.computed < end:
                continue  # nothing filled, or preempted since
            self.register_blocks(sequence, start, end)

    def register_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        """The blocks that computing tokens [start, end) has filled can be found by their hashes."""
        size = self.pool.block_size
        full = min(end, len(sequence.tokens)) // size
        first, hashes = start // size, sequence.extend_hashes(full, size)
        self.pool.register_many(sequence.blocks[first:full], hashes[first:])

    # -- going --------------------------------------------------------------------------------------------
    def send_away(self, victim: Sequence) -> None:
        """Preemption: what it has computed stays in the prefix cache for as long as nobody needs the room."""
        victim.lost, victim.computed = max(victim.lost, victim.computed), 0
        self.release_blocks(victim)
        self.slots_freed.append(victim.slot)
        # Nobody who waits keeps a slot, or two that wait could keep each other out for ever.
        self.slots_freed += victim.request.reserved_slots
        victim.request.reserved_slots = []
        victim.slot = -1

    def reuse_slots(self) -> None:
        """Slots freed while planning may begin anew: at once, if the plan has no rows."""
        self.free_slots += self.slots_freed
        self.slots_freed = []

    def plan_complete(self) -> None:
        self.pool.release(self._copy_sources)
        self._copy_sources = []
        self.reuse_slots()

    def release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.capacity, sequence.shares_tail = [], 0, False


def new_slot(sequence: Sequence) -> NewSlot:
    """What a runner must know of a sequence that begins, resumes or forks."""
    request = sequence.request
    return NewSlot(
        sequence.slot, sequence.tokens[:], sequence.prompt_length, sequence.blocks[:], request.params, request.seed,
        sequence.sample_index, request.adapter,
    )  # fmt: skip
