"""Sharing: how long a step may be, and whose tokens it computes, so that no tenant waits long for another's. An
extension of the scheduler.

Nothing is bounded where there are no API keys. With keys, another key's request may come at any moment, and it
waits for the step that runs: a step takes `shared_step_s` while several are about, and twice as long at most while
one is here alone. That time is split between sequences that draw a token and prompts (step_shares.py), and `Places`
says who may hold how many slots and KV blocks.
"""

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter

from cumulo.engine.decide.core import admission
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight, PromptChunk, Prompts
from cumulo.engine.decide.core.request import Request, Sequence, State
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.sharing.queue import TenantQueue
from cumulo.engine.decide.sharing.step_shares import (
    Want,
    by_share,
    decoding,
    first_of,
    rows_to_leave_out,
    shared_step_tokens,
    short_tokens,
)
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
                own = held.setdefault(sequence.request.usage, Holding())
                own.slots += 1
                own.blocks += len(sequence.blocks)
        for request in self._batch.requests.values():
            if request.reserved_slots:
                held.setdefault(request.usage, Holding()).slots += len(request.reserved_slots)
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
        own, wanted = held.get(sequence.request.usage, Holding()), self._wanted(sequence)
        share = self._share()
        return own.slots + wanted.slots <= share.slots and own.blocks + wanted.blocks <= share.blocks

    def _leaves_room(self, sequence: Sequence, held: dict[Tenant, Holding]) -> bool:
        """Whether the others' eighth stays free. One that holds nothing need not leave it:
        alone, everything fits."""
        if sequence.request.usage not in held:
            return True
        wanted = self._wanted(sequence)
        return (
            len(self._batch.kv.free_slots) - wanted.slots >= self._batch.config.max_running // _LEFT_TO_OTHERS
            and self._batch.pool.free_count - wanted.blocks >= self._batch.pool.blocks // _LEFT_TO_OTHERS
        )

    def admit(self, plan: StepPlan, now_s: float, passing: Collection[Tenant] = ()) -> Sequence | None:
        """Admit the next in the queue, by the rules above."""
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
            passed.add(sequence.request.usage)
        return None

    def make_room(self, plan: StepPlan, now_s: float) -> None:
        """Preempt sequences of tenants beyond their share for a request whose tenant stays within its own."""
        if not self._queue.count:
            return
        head = self._first_within_share()
        if head is None or head.pending:
            return
        slots_short, blocks_short = admission.still_short(self._batch, head)
        held, share = self.held_by_tenant(), self._share()
        # The youngest first, and never the oldest: it always gets on.
        for victim in reversed(self._batch.running[1:]):
            if slots_short <= 0 and blocks_short <= 0:
                return
            own = held.get(victim.request.usage)
            if victim.state != State.RUNNING or victim.request.prefill_only or own is None:
                continue
            if victim.request.usage is head.request.usage or victim.request.priority < head.request.priority:
                continue
            has_slots, has_blocks = own.slots > share.slots, own.blocks > share.blocks
            if not ((slots_short > 0 and has_slots) or (blocks_short > 0 and has_blocks)):
                continue
            own.slots -= 1 + len(victim.request.reserved_slots)
            own.blocks -= len(victim.blocks)
            admission.preempt(
                self._batch, victim, plan, now_s, "fair_share", head, "whose key holds less than its share"
            )
            slots_short, blocks_short = admission.still_short(self._batch, head)

    def _first_within_share(self) -> Sequence | None:
        held = self.held_by_tenant()
        passed: set[Tenant] = set()
        while (sequence := self._queue.first(passed)) is not None:
            if self._is_within_share(sequence, held):
                return sequence
            passed.add(sequence.request.usage)
        return None


_by_counter = attrgetter("request.usage.counter")
_ALONE = 2.0  # times shared_step_s, for a key whose steps nobody shares at present
_LEAST_FOR_PROMPTS = 4  # a quarter of a step, however many sequences draw tokens
_ROWS_WITH_PROMPTS = 0.5  # of a step's time that has prompts, too,
_ROWS_WITH_SHORT = 0.25  # ... or a short prompt that goes first
_FEW_REQUESTS = 2  # of a tenant: with more, none of them is urgent because it is short
_MOST_NEWCOMERS = 4  # whose prompts are looked at when a step's rows are chosen


class Sharing(Extension):
    def __init__(self, batch: RequestBatch, shares: FairShares, queue: TenantQueue) -> None:
        self.shares, self.queue = shares, queue
        self.places = Places(batch, shares, queue)
        self._cost = batch.kv.costs
        self.bounds_steps = True  # not where an SLO does
        self._batch = batch
        self._several, self._most_s = False, batch.config.shared_step_s  # of the step that is planned
        self._bounded = False

    # -- what tenants are served ------------------------------------------------------------------------------
    def arrive(self, request: Request) -> None:
        request.usage = self.shares.tenant(request.tenant)
        self.shares.came(request.usage, request.arrived_s)

    def order_victims(self, victims: list[Sequence]) -> list[Sequence]:
        """The youngest of the tenant served most goes first."""
        if len(self.shares.tenants) == 1:
            return victims
        return sorted(victims, key=_by_counter, reverse=True)

    def admitted(self, sequence: Sequence, cached: int, plan: StepPlan, now_s: float) -> int:
        request = sequence.request
        if request.story.admitted_s is None:  # recomputation is not the tenant's doing
            request.usage.prompt_tokens += sequence.to_compute
        return 0

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        for row in range(flight.decoding, len(flight.rows)):
            request = flight.rows[row].request
            if not request.story.preemptions:
                request.usage.computed_tokens += plan.counts[row]
        passed_over, self.queue.passed_over = self.queue.passed_over, None
        if passed_over is not None and passed_over.queued:
            passed_over.request.story.block(now_s, "fair_share", "those whose keys have been served less")

    def request_ended(self, request: Request, now_s: float) -> None:
        self.shares.went(request.usage, now_s)

    # -- how long steps are, and whose tokens they compute ----------------------------------------------------
    def begin_step(self, plan: StepPlan, now_s: float) -> None:
        self.shares.tick(now_s)
        self._bounded = self.bounds_steps and self.shares.ever_keys and self.begin(now_s)

    def begin(self, now_s: float) -> bool:
        """A step is planned: whether it is bounded."""
        shares, shared_s = self.shares, self._batch.config.shared_step_s
        self._several = shares.several_about(now_s)
        self._most_s = shared_s if self._several else _ALONE * shared_s
        return self._several or shares.has_keys

    def choose_rows(self, plan: StepPlan, now_s: float) -> list[Sequence] | None:
        """Those who run, without the sequences that do not draw a token in this step."""
        if not self._bounded:
            return None
        self.places.make_room(plan, now_s)
        running = self._batch.running
        prompts = self._prompts_wanted()
        first = first_of(prompts, now_s)
        is_short = first is not None and first.is_short
        part = _ROWS_WITH_SHORT if is_short else _ROWS_WITH_PROMPTS if prompts else 1.0
        newcomer = first.tenant if first is not None and is_short else None
        left_out = rows_to_leave_out(
            decoding(running), self._cost.rows_in(part * self._most_s), newcomer, now_s
        )
        if not left_out:
            return running
        for request in {sequence.request for sequence in left_out}:
            request.story.take_turns(now_s, plan.index)
        waiting = set(left_out)
        return [sequence for sequence in running if sequence not in waiting]

    def _prompts_wanted(self) -> list[Want]:
        """What the step could compute: of those who run and of the next to be admitted."""
        batch = self._batch
        wanted = [
            self._want(one, one.to_compute) for one in batch.running if one.computed < one.prompt_length
        ]
        tenants = {want.tenant for want in wanted}
        for _ in range(_MOST_NEWCOMERS):
            first = self.queue.first(tenants)
            if first is None:
                break
            tenants.add(first.request.usage)
            if admission.obstacle(batch, first) is None:
                wanted.append(self._want(first, admission.tokens_to_compute(batch, first)))
        return wanted

    def _want(self, sequence: Sequence, tokens: int) -> Want:
        request = sequence.request
        is_one_of_few = request.params.samples == 1 and request.usage.requests <= _FEW_REQUESTS
        whole = max(tokens, sequence.prompt_length - request.story.cached_tokens)
        is_short = tokens > 0 and whole <= short_tokens(self._tokens(0))
        return Want(request.usage, tokens, is_one_of_few, is_short, request.priority)

    def _tokens(self, rows: int) -> int:
        """Prompt tokens for which a step with so many rows has time."""
        left_s = max(self._most_s - rows * self._cost.s_per_row, self._most_s / _LEAST_FOR_PROMPTS)
        budget = self._batch.config.max_tokens_per_step
        return shared_step_tokens(budget, left_s, self._cost.prompt_s_per_token)

    def share_prompts(
        self, waiting: list[Sequence], budget: int, may_admit: bool, plan: StepPlan, now_s: float
    ) -> Prompts | None:
        """Tenants that have no prompt in the step yet come in, one request each."""
        if not self._bounded:
            return None
        if not budget:
            return Prompts([])
        bound = min(budget, self._tokens(len(plan.slots)))
        seated, running, new = waiting[:], sum(sequence.to_compute for sequence in waiting), 0
        served = {sequence.request.usage for sequence in waiting}
        while may_admit and new < short_tokens(bound):
            newcomer = self._admit(plan, now_s, served)
            if newcomer is None and running + new < bound:
                newcomer = self._admit(plan, now_s)
            if newcomer is None:
                break
            seated.append(newcomer)
            served.add(newcomer.request.usage)
            new += newcomer.to_compute
        wants = [self._want(sequence, sequence.to_compute) for sequence in seated]
        given = by_share(wants, budget, bound, now_s)
        chunks = [
            PromptChunk(sequence, count, count < min(sequence.to_compute, budget))
            for sequence, count in zip(seated, given, strict=True)
        ]
        return Prompts(chunks, full=any(chunk.cut for chunk in chunks))

    def _admit(self, plan: StepPlan, now_s: float, passing: Collection[Tenant] = ()) -> Sequence | None:
        if self._several:
            return self.places.admit(plan, now_s, passing)
        first = self.queue.first(passing)
        return None if first is None else admission.admit(self._batch, first, plan, now_s)

    def plans_ahead(self, in_flight: StepPlan, now_s: float) -> bool:
        """Whether to plan the next step while this one is computed. A newcomer waits for both, so they may take no
        longer together than one step may. Planning late costs the host's time per step, which is little of a long
        one."""
        if self._batch.config.pp > 1 or not self.bounds_steps or not self.shares.ever_keys:
            return True  # the stages of a pipeline always have steps behind each other
        if not self.begin(now_s):
            return True
        return 2 * self._expected_s(in_flight) <= self._most_s

    def bound_tokens(self, plan: StepPlan, tokens: int) -> int:
        if not self._bounded:
            return tokens
        left_s = self._most_s - self._expected_s(plan)
        return min(tokens, max(0, int(left_s / self._cost.prompt_s_per_token)))

    def _expected_s(self, plan: StepPlan) -> float:
        rows = len(plan.slots)
        return self._cost.expected_s(rows, plan.tokens - rows)
