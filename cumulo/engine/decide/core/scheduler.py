"""The scheduler's core: decides what every step computes. `decide/scheduler.py` adds the extensions to it.

One rule: each sequence has tokens not yet computed, and a step spends its token budget on them. So chunked
prefill, decoding, prefix hits and recomputation after preemption are the same case. Sequences that need one
token go first (nobody who is being answered waits for somebody's long prompt), then prompts, in order.

Order is `arrival + priority * priority_step_s`: a more important request overtakes, and one that has waited
long enough is overtaken no more, so nobody starves. A request is admitted only when all of its known tokens
fit; one alone always fits (checked on arrival); the oldest may always take blocks from younger ones. Hence no
deadlock.
"""

from collections.abc import Iterable

from cumulo.engine.decide.core import admission
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.extension import Extension, Flight, Points, PromptChunk, Prompts, StepTiming
from cumulo.engine.decide.core.kv_manager import new_slot
from cumulo.engine.decide.core.queue import WaitingQueue
from cumulo.engine.decide.core.request import Request, Sequence, State
from cumulo.engine.decide.core.step_cost import StepCost, StepMix
from cumulo.engine.decide.core.step_result import enter_result
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.story import OutputLimit, WaitCause
from cumulo.errors import InvalidRequest

_MOST_WAITED = 1.5  # times what a step took its runner: more of a wait for its result is not the step's doing
_SHORT_SHARE = 4  # a newcomer that needs a quarter of a step or less is short


class CoreScheduler:
    def __init__(self, config: SchedulerConfig, queue: WaitingQueue | None = None) -> None:
        self.config = config
        self.batch = batch = RequestBatch(config, queue or WaitingQueue())
        self.kv, self.pool, self.requests, self.closed = batch.kv, batch.pool, batch.requests, batch.closed
        self.running, self.queue = batch.running, batch.queue
        self._arrivals = 0

    def extend(self, extensions: Iterable[Extension]) -> None:
        """Attach extensions. At each point they are called in this order."""
        self.batch.points = Points(extensions)

    @property
    def costs(self) -> StepCost:
        return self.kv.costs

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # -- requests come and go ---------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest if it could never run."""
        if request.id in self.requests:
            raise InvalidRequest(f"request id {request.id!r} is already in use")
        batch, prompt, now_s = self.batch, request.prompt_length, request.arrived_s
        limit: OutputLimit = "max_tokens"
        if request.prefill_only:
            admission.check_whole(prompt, self.config, "compute")
            request.output_limit = 0
        else:
            request.output_limit, limit = admission.output_limit(prompt, request.params, self.config)
        self._arrivals += 1
        request.order = (now_s + request.priority * self.config.priority_step_s, self._arrivals)
        request.story.add(now_s, "arrived", prompt_tokens=prompt, behind=batch.queue.count)
        for one in batch.points.arrive:
            one.arrive(request)
        request.story.limited_by = limit
        if limit != "max_tokens" and request.params.max_tokens is not None:
            request.story.add(now_s, "limited", limit=request.output_limit, why=f"the {limit} ends there")
        if request.pooled is not None:
            request.story.add(now_s, "embed", pooling=request.pooled.kind, wants=request.pooled.wants)
        self.requests[request.id] = request
        leader, *others = [one for one in request.sequences if one.state != State.FINISHED]
        for sequence in (leader, *others):
            sequence.limit = sequence.limit or prompt + request.output_limit
        batch.queue.arrive(leader)
        for sequence in others:  # samples that another engine has begun
            batch.queue.enter(sequence)
        if any(one.hold_back(leader, now_s) for one in batch.points.hold_back):
            batch.queue.set_aside(leader)

    def abort(self, request_id: str, now_s: float) -> bool:
        """End a request wherever it is; False if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is not None:
            self.batch.finish_all(request, "abort", now_s)
        return request is not None

    # -- planning -----------------------------------------------------------------------------------------
    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed until a result arrives."""
        batch, points, flight = self.batch, self.batch.points, Flight(planned_s=now_s)
        plan, batch.next_plan = batch.next_plan, StepPlan(batch.next_plan.index + 1)
        batch.drop_ended()
        for one in points.begin_step:
            one.begin_step(plan, now_s)
        if batch.queue.count:
            admission.make_room_for_priority(batch, plan, now_s)

        waiting, starved = self._draw_one_each(plan, flight, now_s)
        self._compute_prompts(waiting, starved, plan, flight, now_s)
        if not flight.rows and (newcomer := admission.admit_past_parked(batch, plan, now_s)) is not None:
            self._add_chunk(
                PromptChunk(newcomer, min(newcomer.to_compute, flight.spare_tokens)), plan, flight, now_s
            )

        if not flight.rows:
            batch.next_plan = plan  # nothing to run: what changed becomes the beginning of the next plan
        for one in points.end_step:
            one.end_step(plan, flight, now_s)
        batch.kv.plan_complete()
        if not flight.rows:
            return None
        batch.in_flight[plan.index] = flight
        return plan

    def _draw_one_each(self, plan: StepPlan, flight: Flight, now_s: float) -> tuple[list[Sequence], bool]:
        """A row for every sequence that needs one token. Returns those that need more, and whether one that runs
        could not get a block."""
        batch, rows = self.batch, flight.rows
        running = self.running
        for one in batch.points.choose_rows:
            if (chosen := one.choose_rows(plan, now_s)) is not None:
                running = chosen
        waiting: list[Sequence] = []
        starved = False
        index, slots, starts = plan.index, plan.slots, plan.starts
        stages, most = self.config.pp, -(-len(self.running) // self.config.pp)
        # This loop runs for every sequence at every step: keep it lean.
        for sequence in running:
            position = sequence.computed
            known = len(sequence.tokens) + sequence.pending
            if position + 1 != known or position < sequence.prompt_length:
                if position < known:
                    waiting.append(sequence)
                continue
            slot = sequence.slot
            if slot < 0 or known >= sequence.limit:
                continue  # preempted in this very loop, or its last token is being drawn
            if stages > 1 and (sequence.pending or len(rows) >= most):
                continue  # it, or the steps behind this one, would wait for another stage
            if (position >= sequence.capacity or sequence.shares_tail) and not admission.make_room(
                batch, sequence, position, plan, now_s
            ):
                starved = True
                continue
            sequence.last_step = index
            slots.append(slot)
            starts.append(position)
            rows.append(sequence)
            sequence.computed = known
            sequence.pending += 1
        plan.draw_one_each()
        flight.draws, flight.decoding = rows[:], len(rows)
        return [sequence for sequence in waiting if sequence.state == State.RUNNING], starved

    def _compute_prompts(
        self, waiting: list[Sequence], starved: bool, plan: StepPlan, flight: Flight, now_s: float
    ) -> None:
        """Prompts, recomputed contexts and newcomers, with the tokens that are left; nobody is admitted while room
        is short."""
        batch = self.batch
        budget = self.config.max_tokens_per_step - flight.decoding  # which holds all rows (SchedulerConfig)
        may_admit = not starved and not batch.kv.slots_freed
        prompts: Prompts | None = None
        for one in batch.points.share_prompts:
            if prompts is None:
                prompts = one.share_prompts(waiting, budget, may_admit, plan, now_s)
        if prompts is None:
            prompts = self._prompts_in_order(waiting, budget, may_admit, plan, now_s)
        for chunk in prompts.chunks:
            if chunk.tokens:
                self._add_chunk(chunk, plan, flight, now_s)
                budget -= chunk.tokens
        flight.spare_tokens = budget
        if starved:
            self._tell_first(now_s, "kv_blocks", "a KV block for one that runs already")
        elif batch.kv.slots_freed:
            self._tell_first(now_s, "slots", "the slots that preemption frees after this step")
        elif budget <= 0 or prompts.full:
            self._tell_first(now_s, "token_budget", "a step with tokens to spare")

    def _tell_first(self, now_s: float, cause: WaitCause, why: str) -> None:
        """Record what the first in the queue waits for."""
        first = self.batch.queue.first()
        if first is not None:
            first.request.story.block(now_s, cause, why)

    def _prompts_in_order(
        self, waiting: list[Sequence], budget: int, may_admit: bool, plan: StepPlan, now_s: float
    ) -> Prompts:
        """Prompts in order, then newcomers while tokens are left. Prompts that take further steps anyway leave room
        for a short newcomer."""
        batch, held = self.batch, 0
        if (
            may_admit
            and sum(sequence.to_compute for sequence in waiting) > budget
            and (first := batch.queue.first()) is not None
        ):
            need = admission.tokens_to_compute(batch, first)
            if need <= budget // _SHORT_SHARE and admission.obstacle(batch, first) is None:
                held = need
        given: list[PromptChunk] = []
        left = budget - held
        for sequence in waiting:
            given.append(PromptChunk(sequence, min(sequence.to_compute, left)))
            left -= given[-1].tokens
        left += held
        while may_admit and left > 0 and (newcomer := admission.admit_next(batch, plan, now_s)) is not None:
            given.append(PromptChunk(newcomer, min(newcomer.to_compute, left)))
            left -= given[-1].tokens
        return Prompts(given)

    def _add_chunk(self, chunk: PromptChunk, plan: StepPlan, flight: Flight, now_s: float) -> None:
        """Add a row for some of a sequence's uncomputed tokens, and a draw if they are all."""
        sequence, count, cut = chunk
        if not count:
            return
        start, request, row = sequence.computed, sequence.request, len(plan.slots)
        plan.slots.append(sequence.slot)
        plan.starts.append(start)
        plan.counts.append(count)
        flight.rows.append(sequence)
        sequence.computed = start + count
        sequence.last_step = plan.index
        request.story.chunk(now_s, plan.index, start, count, cut)
        if request.prompt_logprobs is not None and start < sequence.prompt_length:
            plan.prompt_logprob_rows.append(row)
        if request.pooled is not None:
            if (first := request.pooled.first_wanted(start, sequence.computed)) is not None:
                plan.pool_rows.append(row)
                plan.pool_starts.append(first)
        elif not request.prefill_only and sequence.computed == len(sequence.tokens):
            for member in (sequence, *self._fork_samples(sequence, plan, now_s)):
                plan.draw_rows.append(row)
                plan.draw_slots.append(member.slot)
                flight.draws.append(member)
                member.pending += 1

    def _fork_samples(self, leader: Sequence, plan: StepPlan, now_s: float) -> list[Sequence]:
        """Parallel samples begin: they share the prompt's blocks and are drawn from the same logits."""
        request, twins = leader.request, list[Sequence]()
        if not request.forks_left:
            return twins
        for sample_index in range(1, request.forks_left + 1):
            twin = leader.fork(sample_index)
            self.kv.seat_twin(twin)
            plan.begin.append(new_slot(twin))
            request.sequences.append(twin)
            self.batch.add_running(twin)
            twins.append(twin)
        request.forks_left = 0
        request.story.add(now_s, "forked", samples=len(twins) + 1)
        return twins

    def plans_ahead(self, in_flight: StepPlan, now_s: float) -> bool:
        """Whether to plan the next step while this one is computed."""
        return all(one.plans_ahead(in_flight, now_s) for one in self.batch.points.plans_ahead)

    # -- results ------------------------------------------------------------------------------------------
    def observe(self, plan: StepPlan, timing: StepTiming, now_s: float) -> None:
        """How long a step took, whose result is here now: later ones are planned by it."""
        for one in self.batch.points.observe:
            one.observe(plan, timing, now_s)
        # Clients see the time since the result before, or since the step was planned.
        waited_s = now_s - max(self.batch.last_result_s, self.batch.in_flight[plan.index].planned_s)
        took_s = min(max(waited_s, timing.seconds), _MOST_WAITED * timing.seconds) - timing.proposing_s
        self.batch.last_result_s = now_s
        if plan.rounds is None:
            self.costs.observe(StepMix.from_plan(plan), took_s, self.batch.longest_step_s)
        else:  # of several steps in one little is learned about one
            self.costs.observe_rows(len(plan.slots), took_s / plan.rounds.times)

    def apply(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Sequence]:
        """Take a step's tokens in; returns the sequences that gained one (beams excepted), or as many as
        `batch.gained` says."""
        return enter_result(self.batch, self.batch.in_flight.pop(plan.index), plan, result, now_s)

    def fail_step(self, plan: StepPlan, error: str, now_s: float) -> list[Request]:
        """The runner could not play this plan: everyone in it fails, everyone else goes on."""
        flight = self.batch.in_flight.pop(plan.index)
        for sequence in flight.draws:
            sequence.pending -= 1
        failed = {s.request.id: s.request for s in flight.rows if s.request.id in self.requests}
        for request in failed.values():
            self.batch.fail(request, error, now_s)
        for one in self.batch.points.step_failed:
            one.step_failed(plan, now_s)
        return list(failed.values())
