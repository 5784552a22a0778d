"""Scheduler: decides what every step computes. Called by the engine loop; played by any Runner.

One rule: each sequence has tokens not yet computed, and a step spends its token budget on them. So chunked
prefill, decoding, prefix hits and recomputation after preemption are the same case. Sequences that need one
token go first (nobody who is being answered waits for somebody's long prompt), then prompts: in order, or, while
several tenants are about, by what each has been served (prompt_shares.py).

Order is `arrival + priority * priority_step_s`: a more important request overtakes, and one that has waited
long enough is overtaken no more, so nobody starves. Among tenants of a priority, who has been served least is
admitted first (waiting_queue.py, fairness.py). A request is admitted only when all of its known tokens fit; one
alone always fits (checked on arrival); the oldest may always take blocks from younger ones. Hence no deadlock.
"""

from bisect import insort
from collections.abc import Collection
from operator import attrgetter

from cumulo.engine.decide.admission_rules import output_limit
from cumulo.engine.decide.beam_groups import start_beam
from cumulo.engine.decide.fairness import FairShares, Tenant
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.preemption import PreemptionCosts, less_important, victim_for
from cumulo.engine.decide.prompt_shares import SHORT_SHARE, Want, by_share, shared_step_tokens
from cumulo.engine.decide.request import FinishReason, Request, Sequence, State
from cumulo.engine.decide.residency import Residency, new_slot
from cumulo.engine.decide.scheduler_config import SchedulerConfig
from cumulo.engine.decide.step_result import Flight, take_in
from cumulo.engine.decide.story import PreemptionCause, WaitCause
from cumulo.engine.decide.waiting_queue import WaitingQueue
from cumulo.errors import InvalidRequest

_by_order = attrgetter("request.order")


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.residency = Residency(config)
        self.pool = self.residency.pool
        self.shares = FairShares()
        self.queue = WaitingQueue(self.shares)
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.closed: list[Request] = []  # ended since the engine last looked; it empties the list
        self.running: list[Sequence] = []  # in order; may hold ended sequences until the next plan
        self.in_flight: dict[int, Flight] = {}
        self.next_plan = StepPlan(0)  # collects what happens between plans: ended slots, the next beams
        self._arrivals = 0

    @property
    def costs(self) -> PreemptionCosts:
        return self.residency.costs

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # -- requests come and go ---------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest if it could never run."""
        if request.id in self.requests:
            raise InvalidRequest(f"request id {request.id!r} is already in use")
        prompt, params = request.prompt_length, request.params
        request.output_limit, why = output_limit(prompt, params, self.config)
        self._arrivals += 1
        request.order = (request.arrived_s + request.priority * self.config.priority_step_s, self._arrivals)
        request.story.add(request.arrived_s, "arrived", prompt_tokens=prompt, behind=self.queue.count)
        if why is not None:
            request.story.add(request.arrived_s, "limited", limit=request.output_limit, why=why)
        if request.pooled is not None:
            wants = request.pooled.wants
            request.story.add(request.arrived_s, "embed", pooling=request.pooled.kind, wants=wants)
        leader = request.sequences[0]
        leader.limit = prompt + request.output_limit
        if params.beam_width is not None:
            start_beam(request)
        self.requests[request.id] = request
        request.share = self.shares.tenant(request.share.name)
        self.shares.came(request.share)
        self.queue.arrive(leader)

    def abort(self, request_id: str, now_s: float) -> bool:
        """End a request wherever it is; False if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish_all(request, "abort", now_s)
        return request is not None

    def fail(self, request: Request, error: str, now_s: float) -> None:
        """End a request with an error its client sees."""
        request.error = error
        request.story.add(now_s, "failed", error=error)
        self._finish_all(request, "error", now_s)

    def _finish_all(self, request: Request, reason: FinishReason, now_s: float) -> None:
        request.forks_left = 0
        for sequence in list(request.sequences):
            self.finish(sequence, reason, now_s)
        self._close_if_done(request, now_s)

    def finish(
        self, sequence: Sequence, reason: FinishReason, now_s: float, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence and free what it holds. Ending it twice does nothing."""
        if sequence.state == State.FINISHED:
            return
        slot = self.remove(sequence)
        if slot is not None:
            self.next_plan.end.append(slot)
            self.residency.free_slots.append(slot)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        sequence.hashes = []
        request = sequence.request
        request.story.add(
            now_s, "finished", sample=sequence.sample_index, reason=reason, tokens=sequence.output_length
        )
        self._close_if_done(request, now_s)

    def remove(self, sequence: Sequence) -> int | None:
        """Take a sequence out of the running or the queue; the slot it had, if any, is the caller's."""
        slot, was, sequence.state = None, sequence.state, State.FINISHED
        if was == State.RUNNING:
            slot = self.residency.vacate(sequence)
        else:
            self.queue.leave(sequence)
            self.residency.forget_swapped(sequence)
        return slot

    def _close_if_done(self, request: Request, now_s: float) -> None:
        if request.finished and self.requests.pop(request.id, None) is not None:
            self.residency.free_slots += request.reserved_slots
            request.reserved_slots = []
            self.shares.went(request.share, now_s)
            request.story.finish(now_s, sum(s.output_length for s in request.sequences))
            self.closed.append(request)

    # -- planning -----------------------------------------------------------------------------------------
    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed until a result arrives."""
        plan, rows = self.next_plan, []  # type: StepPlan, list[Sequence]
        self.next_plan = StepPlan(plan.index + 1)
        self.shares.tick(now_s)
        self.running = [sequence for sequence in self.running if sequence.state == State.RUNNING]
        self._make_room_for_priority(plan, now_s)
        budget = self.config.max_tokens_per_step
        chunks: list[Sequence] = []
        starved = False  # somebody running could not get a block: admit nobody

        # Sequences that need one token. This loop runs for every sequence at every step: keep it lean.
        index, slots, starts = plan.index, plan.slots, plan.starts
        for sequence in self.running:
            position = sequence.computed
            known = len(sequence.tokens) + sequence.pending
            if position + 1 != known or position < sequence.prompt_length:
                if position < known:
                    chunks.append(sequence)
                continue
            slot = sequence.slot
            if slot < 0 or known >= sequence.limit:
                continue  # preempted in this very loop, or its last token is being drawn
            if (position >= sequence.capacity or sequence.shares_tail) and not self._make_room(
                sequence, position, plan, now_s
            ):
                starved = True
                continue
            sequence.last_step = index
            slots.append(slot)
            starts.append(position)
            rows.append(sequence)
            sequence.computed = known
            sequence.pending += 1
        # So far a row is one token and draws one. A step's budget is enough for all that can run (SchedulerConfig).
        budget -= len(rows)
        plan.counts, plan.draw_rows, plan.draw_slots = [1] * len(rows), list(range(len(rows))), slots[:]
        draws = rows[:]

        # Then prompts (and recomputed contexts) and newcomers, unless room is short.
        chunks = [sequence for sequence in chunks if sequence.state == State.RUNNING]
        may_admit = not starved and not self.residency.slots_freed
        share = self._share_prompts if self.shares.several_about(now_s) else self._order_prompts
        spent = not budget
        for sequence, count, cut in share(chunks, budget, may_admit, plan, now_s) if budget else ():
            if count:
                self._plan_chunk(sequence, count, cut, plan, rows, draws, now_s)
                budget -= count
            spent = spent or cut or budget <= 0
        if starved:
            self._tell_first(now_s, "kv_blocks", "a KV block for one that runs already")
        elif self.residency.slots_freed:
            self._tell_first(now_s, "slots", "the slots that preemption frees after this step")
        elif spent:
            self._tell_first(now_s, "token_budget", "a step with tokens to spare")
        if not rows and (newcomer := self._admit_past_parked(plan, now_s)) is not None:
            self._plan_chunk(newcomer, min(newcomer.to_compute, budget), False, plan, rows, draws, now_s)
        self.residency.plan_complete()
        if not rows:
            self.next_plan = plan  # nothing to run: what changed becomes the beginning of the next plan
            return None
        self.in_flight[index] = Flight(rows, draws)
        return plan

    def _order_prompts(
        self, chunks: list[Sequence], budget: int, may_admit: bool, plan: StepPlan, now_s: float
    ) -> list[tuple[Sequence, int, bool]]:
        """One tenant: its prompts in order, then newcomers while tokens are left. Prompts that take further steps
        anyway leave room for a short newcomer."""
        held = 0
        if (
            may_admit
            and sum(sequence.to_compute for sequence in chunks) > budget
            and (first := self.queue.first()) is not None
        ):
            need = self.residency.tokens_to_compute(first)
            held = need if need <= budget // SHORT_SHARE and self._obstacle(first) is None else 0
        given: list[tuple[Sequence, int, bool]] = []
        left = budget - held
        for sequence in chunks:
            given.append((sequence, min(sequence.to_compute, left), False))
            left -= given[-1][1]
        left += held
        while may_admit and left > 0 and (newcomer := self._admit_next(plan, now_s)) is not None:
            given.append((newcomer, min(newcomer.to_compute, left), False))
            left -= given[-1][1]
        return given

    def _share_prompts(
        self, chunks: list[Sequence], budget: int, may_admit: bool, plan: StepPlan, now_s: float
    ) -> list[tuple[Sequence, int, bool]]:
        """Several tenants: those who have no prompt in the step yet come in, one each; then all by their shares."""
        bound = shared_step_tokens(budget, self.config.shared_step_s, self.costs.prompt_s_per_token)
        seated, running, new = chunks[:], sum(sequence.to_compute for sequence in chunks), 0
        served = {sequence.request.share for sequence in chunks}
        while may_admit and new < bound:
            newcomer = self._admit_next(plan, now_s, served)
            if newcomer is None and running + new < bound:
                newcomer = self._admit_next(plan, now_s)
            if newcomer is None:
                break
            seated.append(newcomer)
            served.add(newcomer.request.share)
            new += newcomer.to_compute
        wants = [Want(s.request.share, s.to_compute, s.request.priority) for s in seated]
        given = by_share(wants, budget, bound, now_s)
        return [(s, count, count < min(s.to_compute, budget)) for s, count in zip(seated, given, strict=True)]

    def _plan_chunk(
        self, sequence: Sequence, count: int, cut: bool, plan: StepPlan, rows: list[Sequence],
        draws: list[Sequence], now_s: float,
    ) -> None:  # fmt: skip
        """Add a row for so many of the sequence's uncomputed tokens; `cut`: alone it would have had more."""
        start, request = sequence.computed, sequence.request
        row = len(plan.slots)
        plan.slots.append(sequence.slot)
        plan.starts.append(start)
        plan.counts.append(count)
        rows.append(sequence)
        sequence.computed = start + count
        sequence.last_step = plan.index
        request.story.chunk(now_s, plan.index, start, count, cut)
        if request.prompt_logprobs is not None and start < sequence.prompt_length:
            plan.prompt_logprob_rows.append(row)
        if request.pooled is not None:
            if (first := request.pooled.first_wanted(start, sequence.computed)) is not None:
                plan.pool_rows.append(row)
                plan.pool_starts.append(first)
            return  # nothing is drawn
        if sequence.computed == len(sequence.tokens):
            drawn = [sequence]
            if request.forks_left:
                drawn += self._fork_samples(sequence, plan, now_s)
            for member in drawn:
                plan.draw_rows.append(row)
                plan.draw_slots.append(member.slot)
                draws.append(member)
                member.pending += 1

    def _fork_samples(self, leader: Sequence, plan: StepPlan, now_s: float) -> list[Sequence]:
        """Parallel samples begin: they share the prompt's blocks and are drawn from the same logits."""
        request, twins = leader.request, []
        for sample_index in range(1, request.forks_left + 1):
            twin = leader.fork(sample_index)
            self.residency.seat_twin(twin)
            plan.begin.append(new_slot(twin))
            request.sequences.append(twin)
            insort(self.running, twin, key=_by_order)
            twins.append(twin)
        request.forks_left = 0
        request.story.add(now_s, "forked", samples=len(twins) + 1)
        return twins

    def _make_room(self, sequence: Sequence, position: int, plan: StepPlan, now_s: float) -> bool:
        """A block of its own for the sequence's next token. If none is free, a younger sequence that is not yet
        in this plan gives way; False if there is none."""
        while self.residency.needs_block(sequence, position):
            if self.pool.free_count:
                self.residency.give_block(sequence, position, plan)
                return True
            victim = victim_for(sequence, self.running, plan.index, len(self.shares.tenants))
            if victim is None:
                return False
            self._preempt(victim, plan, now_s, "kv_blocks", sequence, "which is older and needed a KV block")
        return True

    # -- admission and preemption -------------------------------------------------------------------------
    def _obstacle(self, sequence: Sequence) -> tuple[WaitCause, str] | None:
        """What keeps a waiting sequence from being admitted, also in words; None if it fits."""
        if sequence.pending:
            return "step_in_flight", "the step in flight, which draws its next token"
        slots_short, blocks_short = self.residency.shortage(sequence, len(self.running))
        if slots_short > 0:
            in_use = self.config.max_running - len(self.residency.free_slots)
            return "slots", f"{slots_short} of the {in_use} slots in use"
        if blocks_short > 0:
            return "kv_blocks", f"{blocks_short} of the {self.pool.used_count} KV blocks in use"
        return None

    def _tell_first(self, now_s: float, cause: WaitCause, why: str) -> None:
        """Record what the first in the queue waits for; and of one passed over for it, that this is fairness."""
        first = self.queue.first()
        if first is not None:
            first.request.story.block(now_s, cause, why)
            self._tell_passed_over(now_s)

    def _tell_passed_over(self, now_s: float) -> None:
        if (passed_over := self.queue.passed_over) is not None:
            passed_over.request.story.block(now_s, "fair_share", "those whose keys have been served less")

    def _admit_next(self, plan: StepPlan, now_s: float, passing: Collection[Tenant] = ()) -> Sequence | None:
        """Give the first waiting sequence a slot and blocks for all its known tokens, if there is room. Tenants in
        `passing` are passed over."""
        sequence = self.queue.first(passing)
        if sequence is None:
            return None
        self._tell_passed_over(now_s)
        if (obstacle := self._obstacle(sequence)) is not None:
            sequence.request.story.block(now_s, *obstacle)
            return None

        self.queue.take_first()
        cached, how = self.residency.seat(sequence, plan)
        insort(self.running, sequence, key=_by_order)
        lost, sequence.lost = sequence.lost, 0
        request, tokens = sequence.request, len(sequence.tokens)
        if request.story.admitted_s is None:
            request.share.prompt_tokens += tokens - cached  # recomputation is not the tenant's doing
        request.story.admit(now_s, plan.index, tokens, cached, lost, how)
        return sequence

    def _make_room_for_priority(self, plan: StepPlan, now_s: float) -> None:
        """Preempt strictly less important sequences when that lets the first in the queue start."""
        head = self.queue.first()
        if head is None or head.pending:
            return
        victims = less_important(head, self.running, self.queue.level)
        if not victims:
            return
        slots_short, blocks_short = self.residency.shortage(head, len(self.running))
        references = self.pool.references
        sole = sum(references[block] == 1 for victim in victims for block in victim.blocks)
        if slots_short > len(victims) or blocks_short > sole:
            return  # not even all of them would do
        while victims and (slots_short > 0 or blocks_short > 0):
            self._preempt(victims.pop(), plan, now_s, "priority", head, "which is more important")
            slots_short, blocks_short = self.residency.shortage(head, len(self.running))
            slots_short -= len(self.residency.slots_freed)

    def _admit_past_parked(self, plan: StepPlan, now_s: float) -> Sequence | None:
        """Nobody who runs can compute: beams that wait for each other hold blocks and slots idly. If nothing
        is in flight either, the youngest of them give way until the first in the queue fits."""
        head = self.queue.first()
        self.residency.reuse_slots()
        if head is None:
            return None
        for victim in reversed(self.running) if not self.in_flight else ():
            if self._obstacle(head) is None:
                break
            if victim.state == State.RUNNING:
                why = "which is first in the queue, while these beams waited for each other"
                self._preempt(victim, plan, now_s, "parked_beams", head, why)
                self.residency.reuse_slots()
        self.running = [sequence for sequence in self.running if sequence.state == State.RUNNING]
        return self._admit_next(plan, now_s)

    def _preempt(
        self, victim: Sequence, plan: StepPlan, now_s: float, cause: PreemptionCause, by: Sequence, why: str
    ) -> None:
        """Take the victim's blocks and slot; if it has something to do, it takes its old place in the queue."""
        blocks = len(victim.blocks)
        choice = self.residency.send_away(victim, plan)
        victim.request.story.preempt(now_s, plan.index, cause, by.request.id, why, blocks, choice.why)
        if victim.candidates is None:
            self.queue.enter(victim)
        else:  # a beam with nothing to compute until its fellows are there, too
            self.queue.park(victim)

    # -- results ------------------------------------------------------------------------------------------
    def apply(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Sequence]:
        """Take a step's tokens in; returns the sequences that gained one (beams excepted)."""
        return take_in(self, self.in_flight.pop(plan.index), plan, result, now_s)

    def fail_step(self, plan: StepPlan, error: str, now_s: float) -> list[Request]:
        """The runner could not play this plan: everyone in it fails, everyone else goes on."""
        flight = self.in_flight.pop(plan.index)
        for sequence in flight.draws:
            sequence.pending -= 1
        failed = {s.request.id: s.request for s in flight.rows if s.request.id in self.requests}
        for request in failed.values():
            self.fail(request, error, now_s)
        return list(failed.values())

    # -- invariants ---------------------------------------------------------------------------------------
    def problems(self) -> list[str]:
        """Everything inconsistent in the scheduler's books; empty when all is well. For tests."""
        requests = list(self.requests.values())
        found = self.residency.problems([s for s in self.running if s.state == State.RUNNING], requests)
        waiting = sum(s.state == State.WAITING for request in requests for s in request.sequences)
        if waiting != self.queue.count:
            found.append(f"{waiting} sequences wait, {self.queue.count} counted")
        return found
