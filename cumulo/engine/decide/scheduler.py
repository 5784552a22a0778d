"""Scheduler: decides what every step computes. Called by the engine loop; played by any Runner.

One rule: each sequence has tokens not yet computed, and a step spends its token budget on them. So chunked
prefill, decoding, prefix hits and recomputation after preemption are the same case. Sequences that need one
token go first (nobody who is being answered waits for somebody's long prompt), then prompts, in order. With API
keys, steps are kept short and shared between them (sharing/).

Order is `arrival + priority * priority_step_s`: a more important request overtakes, and one that has waited
long enough is overtaken no more, so nobody starves. Among tenants of a priority, who has been served least is
admitted first (waiting_queue.py, fairness.py). A request is admitted only when all of its known tokens fit; one
alone always fits (checked on arrival); the oldest may always take blocks from younger ones. Hence no deadlock.
"""

from functools import partial

from cumulo.engine.decide import admission, handover
from cumulo.engine.decide.admission_rules import check_whole, output_limit
from cumulo.engine.decide.beam_groups import start_beam
from cumulo.engine.decide.books import Books, Flight
from cumulo.engine.decide.plan import Send, StepPlan, StepResult
from cumulo.engine.decide.preemption import PreemptionCosts
from cumulo.engine.decide.request import FinishReason, Request, Sequence, State
from cumulo.engine.decide.residency import new_slot
from cumulo.engine.decide.scheduler_config import SchedulerConfig
from cumulo.engine.decide.sharing.steps import SharedSteps
from cumulo.engine.decide.slo.entrance import promise
from cumulo.engine.decide.slo.prompts import promised_prompts
from cumulo.engine.decide.speculation.choose import most_draws
from cumulo.engine.decide.speculation.policy import Speculation
from cumulo.engine.decide.speculation.rounds import STEP_S, RoundPolicy
from cumulo.engine.decide.step_result import enter_result
from cumulo.engine.decide.tiers.fetch import order_fetch
from cumulo.errors import InvalidRequest

_SHORT_SHARE = 4  # a newcomer that needs a quarter of a step or less is short


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.books = books = Books(config)
        self.residency, self.pool, self.queue, self.shares = (
            books.residency,
            books.pool,
            books.queue,
            books.shares,
        )
        self.requests, self.closed, self.running = books.requests, books.closed, books.running
        self.transfers, self.shared_steps = books.transfers, SharedSteps(books)
        self.speculation: Speculation | RoundPolicy | None = None
        if config.speculate == "rounds":
            self.speculation = RoundPolicy(config.max_context, config.draft_tree, self.transfers)
        elif config.speculate:
            self.speculation = Speculation(config.speculate == "model")
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
        if request.sends:
            check_whole(prompt, self.config, "compute")
        request.output_limit, why = (0, None) if request.sends else output_limit(prompt, params, self.config)
        self._arrivals += 1
        request.order = (request.arrived_s + request.priority * self.config.priority_step_s, self._arrivals)
        request.story.add(request.arrived_s, "arrived", prompt_tokens=prompt, behind=self.queue.count)
        if request.slo is not None or self.config.slo is not None or self.books.promises is not None:
            promise(self.books, request)
        if why is not None:
            request.story.add(request.arrived_s, "limited", limit=request.output_limit, why=why)
        if request.adapter is not None:
            request.story.add(
                request.arrived_s, "adapter", name=request.adapter.name, rank=request.adapter.rank
            )
        if request.pooled is not None:
            wants = request.pooled.wants
            request.story.add(request.arrived_s, "embed", pooling=request.pooled.kind, wants=wants)
        leader, *others = [one for one in request.sequences if one.state != State.FINISHED]
        for sequence in (leader, *others):
            sequence.limit = prompt + request.output_limit
        if params.beam_width is not None:
            start_beam(request)
        self.requests[request.id] = request
        self.books.adapters.begin(request.adapter)
        request.share = self.shares.tenant(request.share.name)
        self.shares.came(request.share, request.arrived_s)
        self.queue.arrive(leader)
        for sequence in others:  # samples that another engine has begun
            self.queue.enter(sequence)
        if (self.residency.tiers is not None and order_fetch(self.books, leader, request.arrived_s)) or (
            self.transfers.receives and handover.order_prefill(self.books, leader, request.arrived_s)
        ):
            self.queue.set_aside(leader)

    def abort(self, request_id: str, now_s: float) -> bool:
        """End a request wherever it is; False if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is not None:
            self.books.finish_all(request, "abort", now_s)
        return request is not None

    def finish(
        self, sequence: Sequence, reason: FinishReason, now_s: float, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence and free what it holds. Ending it twice does nothing."""
        self.books.finish(sequence, reason, now_s, stop_reason)

    # -- planning -----------------------------------------------------------------------------------------
    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed until a result arrives."""
        books, rows = self.books, list[Sequence]()
        plan, books.next_plan = books.next_plan, StepPlan(books.next_plan.index + 1)
        self.shares.tick(now_s)
        books.drop_ended()
        if self.transfers.receives:
            handover.give_up_late(books, now_s)
        if self.queue.count:
            admission.make_room_for_priority(books, plan, now_s)
        budget = self.config.max_tokens_per_step
        chunks: list[Sequence] = []
        starved = False  # somebody running could not get a block: admit nobody

        # Sequences that need one token. This loop runs for every sequence at every step: keep it lean.
        promises = books.promises
        shared = promises is None and self.shares.ever_keys and self.shared_steps.begin(now_s)
        index, slots, starts = plan.index, plan.slots, plan.starts
        stages, most = self.config.stages, -(-len(self.running) // self.config.stages)
        for sequence in self.shared_steps.rows(plan, now_s) if shared else self.running:
            position = sequence.computed
            known = len(sequence.tokens) + sequence.pending
            if position + 1 != known or position < sequence.prompt_length:
                if position < known:
                    chunks.append(sequence)
                continue
            slot = sequence.slot
            if slot < 0 or known >= sequence.limit:
                continue  # preempted in this very loop, or its last token is being drawn
            if stages > 1 and (sequence.pending or len(rows) >= most):
                continue  # it, or the steps behind this one, would wait for another stage
            if (position >= sequence.capacity or sequence.shares_tail) and not admission.make_room(
                books, sequence, position, plan, now_s
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
        if promises is not None:
            promises.begin_step(plan)
        budget -= len(rows)  # which is enough for all that can run (SchedulerConfig)
        draws = rows[:]

        # Then prompts (and recomputed contexts) and newcomers, unless room is short.
        chunks = [sequence for sequence in chunks if sequence.state == State.RUNNING]
        may_admit = not starved and not self.residency.slots_freed
        share = self.shared_steps.prompts if shared else self._order_prompts
        if promises is not None:
            share = partial(promised_prompts, books, promises)
        wanted = chunks or self.queue.count or shared or promises is not None
        spent = not budget
        for sequence, count, cut in (
            share(chunks, budget, may_admit, plan, now_s) if wanted and budget else ()
        ):
            if count:
                self._plan_chunk(sequence, count, cut, plan, rows, draws, now_s)
                budget -= count
            spent = spent or cut or budget <= 0
        spent = spent or (promises is not None and promises.step_full)
        if starved:
            admission.tell_first(books, now_s, "kv_blocks", "a KV block for one that runs already")
        elif self.residency.slots_freed:
            admission.tell_first(books, now_s, "slots", "the slots that preemption frees after this step")
        elif spent:
            admission.tell_first(books, now_s, "token_budget", "a step with tokens to spare")
        newcomer = None if rows else admission.admit_past_parked(books, plan, now_s)
        if newcomer is not None and newcomer.to_compute:
            self._plan_chunk(newcomer, min(newcomer.to_compute, budget), False, plan, rows, draws, now_s)
        if self.speculation is not None:
            budget = min(budget, self.shared_steps.spare_tokens(plan)) if shared else budget
            if promises is not None:
                budget = min(budget, promises.draft_room())
                if isinstance(self.speculation, RoundPolicy):
                    self.speculation.step_s = min(STEP_S, promises.step_s)
            places = most_draws(self.config.max_running, True) - len(draws)
            self.speculation.extend(plan, rows, draws, self.residency, min(budget, places), now_s)
        self.residency.plan_complete()
        if not rows:
            books.next_plan = plan  # nothing to run: what changed becomes the beginning of the next plan
            handover.issue_fetches(books, now_s)
            return None
        books.in_flight[index] = Flight(rows, draws)
        if promises is not None:
            promises.planned(plan, now_s)
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
            held = (
                need
                if need <= budget // _SHORT_SHARE and admission.obstacle(self.books, first) is None
                else 0
            )
        given: list[tuple[Sequence, int, bool]] = []
        left = budget - held
        for sequence in chunks:
            given.append((sequence, min(sequence.to_compute, left), False))
            left -= given[-1][1]
        left += held
        while (
            may_admit and left > 0 and (newcomer := admission.admit_next(self.books, plan, now_s)) is not None
        ):
            given.append((newcomer, min(newcomer.to_compute, left), False))
            left -= given[-1][1]
        return given

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
        if not request.story.preemptions:
            request.share.computed_tokens += count  # recomputation is not the tenant's doing
        if request.prompt_logprobs is not None and start < sequence.prompt_length:
            plan.prompt_logprob_rows.append(row)
        if request.pooled is not None:
            if (first := request.pooled.first_wanted(start, sequence.computed)) is not None:
                plan.pool_rows.append(row)
                plan.pool_starts.append(first)
            return  # nothing is drawn
        if request.sends:
            plan.sends.append(Send(row, request.id, sequence.computed))
            return
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
            self.books.add_running(twin)
            twins.append(twin)
        request.forks_left = 0
        request.story.add(now_s, "forked", samples=len(twins) + 1)
        return twins

    def plans_ahead(self, in_flight: StepPlan, now_s: float) -> bool:
        """Whether to plan the next step while this one is computed. With speculation, tokens may have to be known
        first. The stages of a pipeline always have steps behind each other."""
        if self.speculation is not None and (
            in_flight.may_accept or self.speculation.waits(self.books.in_flight[in_flight.index].rows)
        ):
            return False
        if self.config.stages > 1 or self.books.promises is not None or not self.shares.ever_keys:
            return True
        return self.shared_steps.plans_ahead(in_flight, now_s)

    # -- results ------------------------------------------------------------------------------------------
    def observe(
        self, plan: StepPlan, seconds: float, now_s: float, proposing_s: float = 0.0, proposed: int = 0,
        busy_s: float = 0.0,
    ) -> None:  # fmt: skip
        """How long a step took, whose result is here now: later ones are planned by it. `proposing_s`: of that, the
        draft model's part, which proposed so many tokens. `busy_s`: its processor time, if known."""
        if self.books.promises is not None:
            self.books.promises.observe(plan, self.books.in_flight[plan.index].draws, now_s)
        if self.residency.tiers is not None:
            self.residency.played(plan.index)
        rows, tokens = len(plan.slots), plan.tokens
        if plan.rounds is not None:
            seconds /= plan.rounds.times
        self.costs.observe_compute(tokens, rows, seconds)
        if self.speculation is not None:
            # Drafts make steps longer by less than another program on the same cores does.
            self.speculation.observe(plan, busy_s or seconds, now_s, proposed, proposing_s)
        if tokens and seconds > 0:
            single = plan.counts.count(1)
            self.shared_steps.pace.observe(single, tokens - single, seconds)

    def apply(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Sequence]:
        """Take a step's tokens in; returns the sequences that gained one (beams excepted), or as many as
        `books.gained` says."""
        flight = self.books.in_flight.pop(plan.index)
        advanced = enter_result(self.books, flight, plan, result, now_s)
        if self.speculation is not None:
            self.speculation.learn(plan, flight.draws, result)
        if self.transfers.fetches:
            handover.issue_fetches(self.books, now_s)
        return advanced

    def fail_step(self, plan: StepPlan, error: str, now_s: float) -> list[Request]:
        """The runner could not play this plan: everyone in it fails, everyone else goes on."""
        flight = self.books.in_flight.pop(plan.index)
        if self.residency.tiers is not None:
            self.residency.tiers.failed(plan.index)
        for sequence in flight.draws:
            sequence.pending -= 1
        failed = {s.request.id: s.request for s in flight.rows if s.request.id in self.requests}
        for request in failed.values():
            self.books.fail(request, error, now_s)
        handover.issue_fetches(self.books, now_s)
        return list(failed.values())

    def problems(self) -> list[str]:
        """Everything inconsistent in the scheduler's books; empty when all is well. For tests."""
        return self.books.problems()
