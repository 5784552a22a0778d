"""The simulated player: the engine's loop in virtual time. Called by the planner and `cumulo simulate serve`.

The scheduler and the block pool are the real ones; a StepClock says how long the steps they plan would take. The
loop is the engine's own (engine.py): with `overlap`, step N+1 is planned and submitted while the device
computes N, so a newcomer waits for the step that runs and for the one behind it, here as there. In a pipeline a
step passes one stage after the other, each in its part of the step's time, and as many steps as stages are on
their way. Nothing is random: the same arrivals and costs give the same times to the last bit.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from functools import partial

from cumulo.engine.decide.core.extension import Flight, Points, StepTiming
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.kv_tiers import TierOrder
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.simulate.disk import SimulatedDisk
from cumulo.engine.simulate.drafts import drafted_result, rounds_time
from cumulo.engine.simulate.run import (
    Arrival,
    Landing,
    Run,
    Served,
    StepClock,
    StepInFlight,
    StepTime,
    take_in,
)


def simulate(
    arrivals: ListLike[Arrival],
    scheduler: Scheduler,
    cost: StepClock,
    *,
    overlap: bool = True,
    stop_s: float = float("inf"),
    step_by_step: bool = False,
    acceptance: float = 0.0,
    head_pass_s: float = 0.0,
    itl_bound_s: float | None = None,
) -> Run:
    """Serve all arrivals, given in order of time. Ends when the last is answered or, unfinished, at `stop_s`.
    `acceptance`: with a scheduler that speculates, how often a drafted token is right. `itl_bound_s`: by which
    requests will be judged."""
    engine = SimulatedEngine(
        scheduler,
        cost,
        overlap=overlap,
        step_by_step=step_by_step,
        acceptance=acceptance,
        head_pass_s=head_pass_s,
    )
    engine.arrivals, engine.run.itl_bound_s = list(arrivals), itl_bound_s
    engine.advance(stop_s)
    return engine.end()


class SimulatedEngine:
    """One engine in virtual time. A fleet advances several of them to each arrival and then says who gets it.

    Stretches in which everybody only decodes are played without asking the scheduler at every step, with the same
    outcome; `step_by_step` asks it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepClock,
        *,
        overlap: bool = True,
        step_by_step: bool = False,
        acceptance: float = 0.0,
        head_pass_s: float = 0.0,
        disk: SimulatedDisk | None = None,
    ) -> None:
        """`acceptance` and `head_pass_s`: of drafts, with a scheduler that speculates. `disk`: of the KV tier, with
        one that has it."""
        self.scheduler, self.cost, self.overlap = scheduler, cost, overlap
        scheduler.batch.points = Points((Landing(), *scheduler.batch.points.extensions))
        self.acceptance, self.head_pass_s = acceptance, head_pass_s
        self.disk = disk
        self.run = Run()
        self.arrivals: list[Arrival] = []  # in order of time; those from `_coming` on have not been taken in
        # Of those that a router gave: prompt tokens that were cached here then.
        self.cached_tokens: list[int] = []
        self.first_number = 0  # of its requests: prompts of two engines that share KV must differ
        self.clock_s = 0.0
        self._mail: list[tuple[float, int, Callable[[], None]]] = []  # what happens to it, and when
        self._posted = itertools.count()
        self.turns = 0  # of its loop
        self._counted = (-1, 0)  # after which prompt tokens were counted, and how many
        self._can_plan = False
        stages = scheduler.config.pp
        self._stage_free_s = [0.0] * stages
        self._in_flight: deque[StepInFlight] = deque()  # at most one for each stage
        self._coming = 0
        self._shared: dict[int, int] = {}
        # Blocks of tiers move, and promises are learnt from, in the middle of a stretch.
        plain = scheduler.tiers is None and scheduler.config.slo is None
        plain = plain and scheduler.speculation is None
        self._may_stretch = overlap and not step_by_step and stages == 1 and plain

    def post(self, time_s: float, happens: Callable[[], None]) -> None:
        """Something happens to this engine at a later time: its loop sees it between two steps."""
        heapq.heappush(self._mail, (time_s, next(self._posted), happens))

    @property
    def next_s(self) -> float:
        """When its loop turns next; infinity: nothing comes that is known of."""
        if self._in_flight or self._can_plan:
            return self.clock_s
        coming = self.arrivals[self._coming].arrived_s if self._coming < len(self.arrivals) else float("inf")
        return max(self.clock_s, min(coming, self._mail[0][0] if self._mail else float("inf")))

    def advance(self, until_s: float) -> None:
        """Play steps until the clock reaches `until_s`, or until everything that has arrived is answered."""
        while self._has_work and self.next_s < until_s:
            self.turn(until_s)

    @property
    def _has_work(self) -> bool:
        return bool(self._in_flight or self.scheduler.requests or self._coming < len(self.arrivals))

    def open_mail(self, until_s: float) -> None:
        """Everything happens that was posted for no later a time."""
        while self._mail and self._mail[0][0] <= until_s:
            heapq.heappop(self._mail)[2]()

    def turn(self, until_s: float) -> None:
        """Take in what has come, and play a step, or steps in which nothing is decided up to `until_s`."""
        scheduler, arrivals = self.scheduler, self.arrivals
        self.turns += 1
        self.clock_s = max(self.clock_s, self.next_s)
        self.open_mail(self.clock_s)
        while self._coming < len(arrivals) and arrivals[self._coming].arrived_s <= self.clock_s:
            self._take(arrivals[self._coming])
            self._coming += 1
        self._can_plan = bool(scheduler.requests)
        if self._in_flight or self._can_plan:
            next_s = min(
                until_s, arrivals[self._coming].arrived_s if self._coming < len(arrivals) else until_s
            )
            if not (self._may_stretch and self._in_flight and self._play_stretch(next_s)):
                self._step()
        scheduler.transfers.issue_fetches(self.clock_s)
        if self.disk is not None and scheduler.tiers is not None:
            for order in scheduler.tiers.orders:
                self.post(self.disk.done_s(order, self.clock_s), partial(self._enter_files, self.disk, order))
            scheduler.tiers.orders.clear()

    def _enter_files(self, disk: SimulatedDisk, order: TierOrder) -> None:
        assert self.scheduler.tiers is not None
        for event in disk.carry_out(order):
            self.scheduler.tiers.enter_event(event, self.clock_s)

    def _take(self, arrival: Arrival) -> None:
        number = self.first_number + self._coming
        self.clock_s += take_in(arrival, number, self.scheduler, self.cost, self.run)

    def give(self, arrival: Arrival, cached_tokens: int) -> None:
        """A router sends it a request, at a time up to which it was advanced."""
        self.arrivals.append(arrival)
        self.cached_tokens.append(cached_tokens)

    def waiting_arrivals(self) -> list[Arrival]:
        """Arrivals that the loop has not taken in yet: it looks for them between two steps."""
        return self.arrivals[self._coming :]

    def prompt_tokens_to_compute(self) -> int:
        """Prompt tokens of all that it was given, without what it had cached then. In a burst many requests come
        between two turns of its loop, and only a turn changes what its scheduler has: that is counted once."""
        cached, first = self.cached_tokens, self._coming
        if self._counted[0] != self.turns:
            requests = self.scheduler.requests.values()
            left = (
                one.prompt_length - max(one.sequences[0].computed, cached[int(one.id)]) for one in requests
            )
            self._counted = self.turns, sum(max(0, tokens) for tokens in left)
        coming = zip(self.arrivals[first:], cached[first:], strict=True)
        return self._counted[1] + sum(arrival.prompt_tokens - known for arrival, known in coming)

    def _step(self) -> None:
        """One turn of the engine's loop: plan and submit a step, and take in the oldest one."""
        scheduler, in_flight = self.scheduler, self._in_flight
        if in_flight and not scheduler.plans_ahead(in_flight[-1].plan, self.clock_s):
            self._finish(in_flight.popleft())
            return
        run = self.run
        plan = scheduler.plan(self.clock_s)
        if plan is not None:
            _note_shared(plan, scheduler, self._shared)
            if plan.rounds is None:
                time = self.cost.time_of(plan, self._shared)
            else:
                time = rounds_time(plan, plan.rounds, self.cost, self._shared, self.head_pass_s)
            self.clock_s += time.submit_s
            in_flight.append(StepInFlight(plan, time, self._pass_stages(time.device_s)))
            run.count_step(len(plan.slots), plan.tokens, time.device_s)
        depth = len(self._stage_free_s) if self.overlap else 0
        if in_flight and (plan is None or len(in_flight) > depth):
            self._finish(in_flight.popleft())
        elif plan is None:
            self._can_plan = False  # until something comes

    def _pass_stages(self, device_s: float) -> float:
        """When a step that is submitted now leaves the last stage."""
        done_s, stages = self.clock_s, len(self._stage_free_s)
        for stage, free_s in enumerate(self._stage_free_s):
            done_s = self._stage_free_s[stage] = max(done_s, free_s) + device_s / stages
        return done_s

    def _finish(self, ready: StepInFlight) -> None:
        self.clock_s = max(self.clock_s, ready.done_s)
        self._enter_result(ready)
        self.clock_s += ready.time.apply_s

    def _enter_result(self, ready: StepInFlight) -> None:
        """A step's tokens arrive now: who gained one, or several with speculation, and who has ended."""
        scheduler, run, now_s = self.scheduler, self.run, self.clock_s
        run.most_blocks = max(run.most_blocks, scheduler.pool.used_count)
        scheduler.observe(ready.plan, StepTiming(ready.time.device_s), now_s)
        flight = scheduler.batch.in_flight[ready.plan.index]
        by_lookup = scheduler.config.speculate == "ngram"
        result = drafted_result(ready.plan, flight.rows, flight.draws, self.acceptance, by_lookup=by_lookup)
        advanced = scheduler.apply(ready.plan, result, now_s)
        gaps: Counter[float] = Counter()
        if ready.plan.may_accept:  # tokens that came together with the next one
            gaps[0.0] = sum(count - 1 for count in scheduler.batch.gained.values())
        for sequence in advanced:
            served: Served = sequence.request.tag
            before_s, served.last_token_s = served.last_token_s, now_s
            if before_s is None:
                served.first_token_s = now_s
            else:
                gaps[now_s - before_s] += 1
                if run.itl_bound_s is not None:
                    served.judge_gaps(1, now_s - before_s > run.itl_bound_s)
        for gap_s, count in gaps.items():
            if count:
                run.itl_s.append(gap_s)
                run.itl_counts.append(count)
        for request in scheduler.closed:
            run.close(request, now_s)
        scheduler.closed.clear()

    # -- stretches ----------------------------------------------------------------------------------------
    def _play_stretch(self, until_s: float) -> bool:
        """While nobody waits and everybody only decodes, each plan is the one before, one token further. So steps
        until somebody ends, blocks run short or `until_s` are timed one by one and entered together. False where
        the scheduler has something to decide."""
        scheduler, batch = self.scheduler, self.scheduler.batch
        if batch.queue.count or scheduler.sharing.begin(self.clock_s):
            return False
        rows, most = _decoding(batch.running)
        time = self.cost.decode(len(rows)) if rows else None
        if time is None:
            return False
        ready = self._in_flight[0]
        clock_s, done_s, apply_s = self.clock_s, ready.done_s, ready.time.apply_s
        context = sum(sequence.computed for sequence in rows)
        shared = sum(self._shared.get(sequence.slot, 0) for sequence in rows)
        # The result before it, its end, the clock, its time.
        steps: list[tuple[float, float, float, StepTime]] = []
        while len(steps) < most and clock_s < until_s:
            context += len(rows)
            taken = time.time_with(context, shared)
            result_s = max(clock_s + taken.submit_s, done_s)
            clock_s, done_s, apply_s = result_s + apply_s, result_s + taken.device_s, taken.apply_s
            steps.append((result_s, done_s, clock_s, taken))
        # Blocks are needed before so many steps, by the sequences in these rows, in this order.
        growth = sorted(
            (step, row)
            for row, sequence in enumerate(rows)
            for step in range(sequence.capacity - sequence.computed, len(steps), scheduler.config.block_size)
        )
        free = min(map(batch.pool.free_on, range(batch.pool.ranks)))
        if len(growth) > free:
            del steps[growth[free][0] :]
        if not steps:
            return False
        plan = StepPlan(ready.plan.index + len(steps), slots=[sequence.slot for sequence in rows])
        self._enter_stretch(rows, growth, plan, [result_s for result_s, *_ in steps])
        _, done_s, self.clock_s, taken = steps[-1]
        self._stage_free_s[0] = done_s
        self._in_flight[0] = StepInFlight(plan, taken, done_s)
        self.run.count_stretch(len(rows), [taken.device_s for *_, taken in steps], time)
        return True

    def _enter_stretch(
        self, rows: list[Sequence], growth: list[tuple[int, int]], plan: StepPlan, results_s: list[float]
    ) -> None:
        """Enter the results of the step in flight and of all steps of a stretch but the last, which is in flight
        then. Blocks are given and found in the order in which the scheduler would have done it."""
        batch, run, steps = self.scheduler.batch, self.run, len(results_s)
        size = batch.config.block_size
        for step, row in growth:
            if step == 0:
                batch.kv.give_block(rows[row], rows[row].capacity, plan)
        self.clock_s = results_s[0]
        self._enter_result(self._in_flight[0])
        gaps_s = [after_s - before_s for before_s, after_s in itertools.pairwise(results_s)]
        bound_s = run.itl_bound_s
        late = 0 if bound_s is None else sum(gap_s > bound_s for gap_s in gaps_s)
        run.itl_s.extend(gaps_s)
        run.itl_counts.extend([len(rows)] * len(gaps_s))
        # When, in which row, and for a block that is full: at which token it ends.
        changes = [(2 * step, row, 0) for step, row in growth if 0 < step < steps]
        for row, sequence in enumerate(rows):
            start, served = sequence.computed, sequence.request.tag
            if batch.pool.prefix_cache:
                full = range(size - start % size, steps, size)
                changes += [(2 * step + 1, row, start + step) for step in full]
            sequence.tokens.frombytes(bytes(sequence.tokens.itemsize * (steps - 1)))
            sequence.computed, sequence.pending, sequence.last_step = start + steps, 1, plan.index
            sequence.request.usage.output_tokens += steps - 1
            served.last_token_s = results_s[-1]
            if bound_s is not None:
                served.judge_gaps(len(gaps_s), late)
        for _, row, end in sorted(changes):
            if end:
                batch.kv.register_blocks(rows[row], end - 1, end)
            else:
                batch.kv.give_block(rows[row], rows[row].capacity, plan)
        run.most_blocks = max(run.most_blocks, batch.pool.used_count)
        plan.starts = [sequence.computed - 1 for sequence in rows]
        plan.draw_one_each()
        batch.running[:] = rows
        batch.in_flight[plan.index] = Flight(rows, rows[:], len(rows))
        batch.next_plan = StepPlan(plan.index + 1)

    def end(self) -> Run:
        """What became of everything, as of now."""
        if self.scheduler.requests and self.next_s == float("inf"):
            raise RuntimeError("the scheduler plans nothing for requests that wait: a bug in the scheduler")
        self.run.ended_s = self.clock_s
        self.run.all_finished = self._coming == len(self.arrivals) and not self.scheduler.requests
        return self.run


def _decoding(running: ListLike[Sequence]) -> tuple[list[Sequence], int]:
    """Who draws a token in each of the next steps, and for how many steps all of them do. Nobody, where a sequence
    has more to compute than the token in flight, or may be ended by a token."""
    rows, steps = list[Sequence](), 1 << 30
    for sequence in running:
        request = sequence.request
        if sequence.state != State.RUNNING:
            continue
        if (
            sequence.pending != 1
            or not sequence.prompt_length <= sequence.computed == len(sequence.tokens)
            or sequence.shares_tail
            or request.beam is not None
            or request.stop_ids
        ):
            return [], 0
        left = sequence.limit - 1 - sequence.computed
        if left > 0:  # else its last token is being drawn
            rows.append(sequence)
            steps = min(steps, left)
    return rows, steps


def _note_shared(plan: StepPlan, scheduler: Scheduler, shared: dict[int, int]) -> None:
    """How much of its context a sequence that begins has in common with one that runs."""
    references = scheduler.pool.references
    for new in plan.begin:
        held = sum(references[block] > 1 for block in new.blocks) if references[new.blocks[0]] > 1 else 0
        if held:
            shared[new.slot] = held * scheduler.config.block_size
        else:
            shared.pop(new.slot, None)
