"""Shared steps: how long a step may be, and whose tokens it computes, so that no tenant waits long for another's.
Asked by the scheduler for every step.

Nothing is bounded where there are no API keys. With keys, another key's request may come at any moment, and it
waits for the step that runs: a step takes `shared_step_s` while several are about, and twice as long at most while
one is here alone. That time is split between sequences that draw a token (rows.py) and prompts
(prompts.py); places.py says who may hold how many slots and KV blocks.
"""

from cumulo.engine.decide import admission
from cumulo.engine.decide.books import Books
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.request import Sequence
from cumulo.engine.decide.sharing import places
from cumulo.engine.decide.sharing.prompts import (
    Turns,
    Want,
    by_share,
    shared_step_tokens,
    short_tokens,
    whose_turn,
)
from cumulo.engine.decide.sharing.rows import StepPace, decoding, rows_to_leave_out

_ALONE = 2.0  # times shared_step_s, for a key whose steps nobody shares at present
_LEAST_FOR_PROMPTS = 4  # a quarter of a step, however many sequences draw tokens
_ROWS_WITH_PROMPTS = 0.5  # of a step's time that has prompts, too,
_ROWS_IN_A_TURN = 0.25  # ... or a short prompt that others wait for
_FEW_REQUESTS = 2  # of a tenant: with more, none of them is urgent because it is short
_MOST_NEWCOMERS = 4  # whose prompts are looked at when a step's rows are chosen


class SharedSteps:
    def __init__(self, books: Books) -> None:
        self.pace = StepPace(books.config.shared_step_s)
        self._books, self._turns = books, Turns()
        self._several, self._most_s = False, books.config.shared_step_s  # of the step that is planned

    def begin(self, now_s: float) -> bool:
        """A step is planned: whether it is bounded."""
        shares, shared_s = self._books.shares, self._books.config.shared_step_s
        self._several = shares.several_about(now_s)
        self._most_s = shared_s if self._several else _ALONE * shared_s
        return self._several or shares.has_keys

    def rows(self, plan: StepPlan, now_s: float) -> list[Sequence]:
        """Those who run, without the sequences that do not draw a token in this step."""
        places.make_room(self._books, plan, now_s)
        running = self._books.running
        prompts = self._prompts_wanted()
        turn = None if self._turns.others_wait else whose_turn(prompts, now_s)
        part = _ROWS_IN_A_TURN if turn is not None else _ROWS_WITH_PROMPTS if prompts else 1.0
        newcomer = None if turn is None else turn.tenant
        left_out = rows_to_leave_out(
            decoding(running), self.pace.rows_in(part * self._most_s), newcomer, now_s
        )
        if not left_out:
            return running
        for request in {sequence.request for sequence in left_out}:
            request.story.take_turns(now_s, plan.index)
        waiting = set(left_out)
        return [sequence for sequence in running if sequence not in waiting]

    def _prompts_wanted(self) -> list[Want]:
        """What the step could compute: of those who run and of the next to be admitted."""
        books = self._books
        wanted = [
            self._want(one, one.to_compute) for one in books.running if one.computed < one.prompt_length
        ]
        tenants = {want.tenant for want in wanted}
        for _ in range(_MOST_NEWCOMERS):
            first = books.queue.first(tenants)
            if first is None:
                break
            tenants.add(first.request.share)
            if admission.obstacle(books, first) is None:
                wanted.append(self._want(first, books.residency.tokens_to_compute(first)))
        return wanted

    def _want(self, sequence: Sequence, tokens: int) -> Want:
        request = sequence.request
        # From the beginning: the end of a long prompt is not short.
        whole = max(tokens, sequence.prompt_length - request.story.cached_tokens)
        is_short = (
            0 < tokens <= whole <= short_tokens(self._tokens(0))
            and request.params.samples == 1
            and request.share.requests <= _FEW_REQUESTS
        )
        return Want(request.share, tokens, is_short, request.priority)

    def _tokens(self, rows: int) -> int:
        """Prompt tokens for which a step with so many rows has time."""
        left_s = max(self._most_s - rows * self.pace.s_per_row, self._most_s / _LEAST_FOR_PROMPTS)
        budget = self._books.config.max_tokens_per_step
        return shared_step_tokens(budget, left_s, self.pace.s_per_prompt_token)

    def prompts(
        self, chunks: list[Sequence], budget: int, may_admit: bool, plan: StepPlan, now_s: float
    ) -> list[tuple[Sequence, int, bool]]:
        """Sequences with their tokens in this step, and whether they would have had more alone. Tenants that have
        no prompt in the step yet come in, one request each."""
        books, bound = self._books, min(budget, self._tokens(len(plan.slots)))
        seated, running, new = chunks[:], sum(sequence.to_compute for sequence in chunks), 0
        served = {sequence.request.share for sequence in chunks}
        admit = places.admit if self._several else admission.admit_next
        while may_admit and new < short_tokens(bound):
            newcomer = admit(books, plan, now_s, served)
            if newcomer is None and running + new < bound:
                newcomer = admit(books, plan, now_s)
            if newcomer is None:
                break
            seated.append(newcomer)
            served.add(newcomer.request.share)
            new += newcomer.to_compute
        wants = [self._want(sequence, sequence.to_compute) for sequence in seated]
        given = by_share(wants, budget, bound, now_s, self._turns)
        return [(s, count, count < min(s.to_compute, budget)) for s, count in zip(seated, given, strict=True)]

    def plans_ahead(self, in_flight: StepPlan, now_s: float) -> bool:
        """Whether to plan the next step while this one is computed. A newcomer waits for both, so they may take no
        longer together than one step may. Planning late costs the host's time per step, which is little of a long
        one."""
        if not self.begin(now_s):
            return True
        return 2 * self._expected_s(in_flight) <= self._most_s

    def spare_tokens(self, plan: StepPlan) -> int:
        """For how many more tokens a planned step has time."""
        return max(0, int((self._most_s - self._expected_s(plan)) / self.pace.s_per_prompt_token))

    def _expected_s(self, plan: StepPlan) -> float:
        rows = len(plan.slots)
        return self.pace.s_per_row * rows + self.pace.s_per_prompt_token * (plan.tokens - rows)
