"""Speculation: decides whose rows carry drafted tokens, and whether the next step waits to know them. An
extension of the scheduler.

A draft continues tokens that are known, so a sequence whose token is still being drawn cannot have one: planning
ahead and drafting exclude each other. Drafts by n-gram lookup take no model, so what they would have been is noted
for every sequence all the same, and planning ahead stops when drafting is worth more than the host's time between
steps. Drafts of a model or a head are asked for in a plan (`StepPlan.proposals`) and come with its result.

A drafted token is accepted if it is the token that is drawn at its place, with the random number of that place. So
tokens are those of a run without drafts, each of them, sampled or greedy.
"""

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight, StepTiming
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.plan import Draft, StepPlan, StepResult
from cumulo.engine.decide.speculation.accepted import draft_budget
from cumulo.engine.decide.speculation.choose import (
    MOST_DRAFTED,
    Acceptance,
    AskedGain,
    DraftChoice,
    Offer,
    choose,
    worth_asking,
)
from cumulo.engine.decide.speculation.drafts import NgramDraft, ProposedDraft

_LEAST_GAIN = 1.03  # from which waiting for the tokens is worth the host's time between two steps
_LEAST_ASKED = 1.01  # the same for a model's drafts, whose own time is counted already
_HOST_S = 4e-4  # ... which is about this on a GPU, and there a step may be no longer
_CAUTION = 1.1  # a draft must be worth so much more than it is thought to cost: both are estimates
_NEWS = 0.15
_SHORTER, _LONGER = 0.4, 0.05  # share of the news in what a proposal takes
_SHARE_NEWS = 0.02  # at least, in how often it is how sure
_LEARNING = 32  # a model's first tokens, asked for one by one: what they take, and how right they are
_TRY_AGAIN = 128  # tokens without a model's draft, after which one is tried again
_HOPE = 0.7  # how right it is then hoped to be


class Drafting:
    """What is known of one sequence's drafts."""

    __slots__ = ("acceptance", "draft", "idle_tokens", "worth")

    def __init__(self, everybody: Acceptance, draft: NgramDraft | ProposedDraft) -> None:
        self.draft = draft
        self.acceptance = Acceptance(everybody)
        self.worth = 0.0  # how often the next token was expected, and came
        self.idle_tokens = 0  # since a model's draft was last verified

    @property
    def offer(self) -> Offer:
        kinds = self.draft.kinds
        rates = [self.acceptance.rate(kind) for kind in kinds]
        return Offer(self.draft.length, rates[0], rates if len(rates) > 1 else ())

    def follow(self, sequence: Sequence) -> None:
        """Take note of the tokens that came since."""
        draft, tokens = self.draft, sequence.tokens
        expected, kinds = draft.expects, draft.kinds
        known = len(tokens)
        came = known - draft.size
        if came <= 0:
            return
        if draft.size == 0:  # a prompt says nothing about answers
            draft.advance(tokens, sequence.prompt_length)
            came = known - draft.size
            expected = False
        hits, misses = draft.advance(tokens, known)
        self.idle_tokens = 0 if expected else self.idle_tokens + came
        if expected:
            for index in range(hits + misses):
                kind = kinds[min(index, len(kinds) - 1)]
                self.acceptance.observe(kind, int(index < hits), int(index >= hits))
        for index in range(came):
            self.worth += _NEWS * ((index < hits) - self.worth)


class Speculation(Extension):
    def __init__(self, batch: RequestBatch, by_model: bool = False) -> None:
        """`by_model`: drafts come from the runner, which has a model for them."""
        self._batch = batch
        self.by_model = by_model
        self.cost = batch.kv.costs
        self.proposal_s = 0.0  # for one token that a model proposes; measured
        self.proposed = 0  # tokens in all
        self.everybody = Acceptance(by_chance=by_model)
        # Of a model's first proposals, how many are of each class of sureness.
        self._shares = [0.0] * (self.everybody.classes - 1) + [1.0]
        self._judged = 0  # such proposals
        self.fixed_count: int | None = None  # drafts of every row, for measurements; None: as many as pay

    def _follow(self, sequence: Sequence) -> Drafting:
        drafting: Drafting | None = sequence.drafting
        if drafting is None:
            draft = ProposedDraft() if self.by_model else NgramDraft()
            drafting = sequence.drafting = Drafting(self.everybody, draft)
        drafting.follow(sequence)
        return drafting

    # -- the points of a step ---------------------------------------------------------------------------------
    def plans_ahead(self, in_flight: StepPlan, now_s: float) -> bool:
        """Drafts continue tokens that are known: where they pay, the next step waits for these tokens."""
        return not in_flight.may_accept and not self.waits(self._batch.in_flight[in_flight.index].rows)

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        budget = draft_budget(self._batch, plan, flight)
        if self.cost.knows_rows and budget > 0:
            self._verify(plan, flight.rows, budget, now_s)
        if self.by_model and flight.draws:
            self._ask(plan, flight.draws)

    def observe(self, plan: StepPlan, timing: StepTiming, now_s: float) -> None:
        if timing.proposed and timing.proposing_s > 0:
            measured = timing.proposing_s / timing.proposed
            # Others on the machine, and prompts that a drafter follows first, only make it longer.
            measured = min(measured, 2 * self.proposal_s or measured)
            news = 1.0 if not self.proposal_s else _SHORTER if measured < self.proposal_s else _LONGER
            self.proposal_s += news * (measured - self.proposal_s)

    def after_result(self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float) -> None:
        if result.proposed:
            self._learn(flight.draws, result)

    # -- whether tokens must be known -------------------------------------------------------------------------
    def waits(self, rows: list[Sequence]) -> bool:
        """Whether the next step is to be planned only when the tokens of these rows, in flight, are known."""
        if self.fixed_count is not None:
            return True
        if not self.cost.knows_rows:
            return self.by_model
        if self.by_model:  # on a CPU, where the host's time is short next to a step's
            return self.proposed < _LEARNING or self._asked(rows).gain >= _LEAST_ASKED
        # Behind a step whose tokens must be known the device waits for the host: a short step must gain the more.
        fixed_s, token_s = self._step_s(rows)
        least = max(_LEAST_GAIN, 1 + _HOST_S / (fixed_s + token_s * len(rows)))
        return self._prospects(rows).gain >= least

    def _step_s(self, rows: list[Sequence]) -> tuple[float, float]:
        """The time of a step in which these draw a token each: all but what as many drafts would take, and that of
        one draft."""
        context = sum(sequence.computed for sequence in rows)
        draft_s = self.cost.draft_s(len(rows), context)
        return self.cost.decode_s(len(rows), context) - len(rows) * draft_s, draft_s

    def _asked(self, rows: list[Sequence]) -> AskedGain:
        fixed_s, token_s = self._step_s(rows)
        rates = [self._rates(sequence) for sequence in rows]
        return worth_asking(self._shares, rates, fixed_s, _CAUTION * token_s, self.proposal_s)

    def _rates(self, sequence: Sequence) -> list[float]:
        """How often a model's token is right, by class."""
        if sequence.request.beam is not None:
            return [0.0] * self.everybody.classes
        drafting = self._follow(sequence)
        rates = [drafting.acceptance.rate(kind) for kind in range(self.everybody.classes)]
        # Drafts of a model that are not made are not judged either: after a while it is given another chance.
        return rates if drafting.idle_tokens < _TRY_AGAIN else [max(rate, _HOPE) for rate in rates]

    def _prospects(self, rows: list[Sequence]) -> DraftChoice:
        """How many tokens are worth drafting for each of these rows, by what is known of them."""
        offers = [Offer(MOST_DRAFTED, self._prospect(sequence)) for sequence in rows]
        fixed_s, token_s = self._step_s(rows)
        budget = len(offers) * MOST_DRAFTED
        return choose(offers, len(rows), len(rows), fixed_s, token_s + self.proposal_s, budget)

    def _prospect(self, sequence: Sequence) -> float:
        if sequence.request.beam is not None:
            return 0.0
        if self.by_model:
            return self._rates(sequence)[-1]  # at best: it stops itself where it is less sure
        drafting = self._follow(sequence)
        # What is expected now will mostly still be expected behind the token that is being drawn.
        return drafting.offer.rate if drafting.draft.expects else drafting.worth

    # -- planning ---------------------------------------------------------------------------------------------
    def _verify(self, plan: StepPlan, rows: list[Sequence], budget: int, now_s: float) -> None:
        """Add drafts to the plan's rows of one token that is known. Never takes a block from anybody."""
        members: list[int] = []
        offers: list[Offer] = []
        for row, (sequence, start, count) in enumerate(zip(rows, plan.starts, plan.counts, strict=True)):
            known = len(sequence.tokens)
            if row >= len(plan.draw_rows) or plan.draw_rows[row] != row:
                break  # the others are prompts
            if count != 1 or start != known - 1 or start < sequence.prompt_length:
                continue  # (a prompt's last token may begin several samples)
            if sequence.request.beam is not None:
                continue
            offer = self._follow(sequence).offer
            length = min(offer.length, sequence.limit - known - 1)
            if length > 0:
                members.append(row)
                offers.append(offer._replace(length=length))
        if not members:
            return
        if self.fixed_count is None:
            fixed_s, token_s = self._step_s(rows)
            cautious_s = _CAUTION * token_s
            counts = choose(offers, len(plan.draw_slots), plan.tokens, fixed_s, cautious_s, budget).counts
        else:
            counts = [min(self.fixed_count, offer.length, budget // len(offers)) for offer in offers]
        for row, offer, count in zip(members, offers, counts, strict=True):
            count = self._batch.kv.room_ahead(rows[row], plan.starts[row], count, len(rows), plan)
            if count > 0:
                self._add(plan, rows[row], row, count, offer.rate, now_s)

    @staticmethod
    def _add(plan: StepPlan, sequence: Sequence, row: int, count: int, rate: float, now_s: float) -> None:
        plan.drafts.append(Draft(row, sequence.drafting.draft.next_tokens(sequence.tokens, count)))
        plan.counts[row] += count
        sequence.computed += count
        sequence.request.story.note_drafts(now_s, plan.index, count, rate)

    def _ask(self, plan: StepPlan, draws: list[Sequence]) -> None:
        """Ask for drafts behind the tokens that this plan draws, for whom they are worth it."""
        if self.fixed_count is not None:
            counts = [self.fixed_count] * len(draws)
        elif self.cost.knows_rows and self.proposed >= _LEARNING:
            asked = self._asked(draws)
            longest = self._prospects(draws).counts
            counts = [count if value > 0 else 0 for count, value in zip(longest, asked.row, strict=True)]
            fixed_s, token_s = self._step_s(draws)
            seconds = fixed_s + token_s * len(draws)
            plan.proposal_floor = len(draws) / seconds * (_CAUTION * token_s + self.proposal_s)
        else:
            counts = [1] * len(draws)
        for draw, (sequence, count) in enumerate(zip(draws, counts, strict=True)):
            row = plan.draw_rows[draw]
            end = plan.starts[row] + plan.counts[row]
            count = min(count, sequence.limit - end - 2)
            if (
                count <= 0
                or sequence.request.beam is not None
                or sequence.shares_tail
                or sequence.pending > 1
            ):
                continue
            # Of the tokens drafted now, all or none may be accepted: room for the drafts behind all of them.
            self._batch.kv.room_ahead(sequence, end - 1, count + 1, len(draws), plan)
            plan.proposals.append((draw, count))

    def _learn(self, draws: list[Sequence], result: StepResult) -> None:
        """What the runner's model expects behind the tokens that were just entered."""
        for draw, tokens in result.proposed.items():
            sequence = draws[draw]
            self.proposed += len(tokens)
            if sequence.state == State.RUNNING and tokens:
                drafting = self._follow(sequence)
                assert isinstance(drafting.draft, ProposedDraft)
                drafting.draft.propose(tokens, result.chances.get(draw))
                self._judged += 1
                news = max(_SHARE_NEWS, 1 / self._judged)
                for kind in range(self.everybody.classes):
                    self._shares[kind] += news * ((kind == drafting.draft.kinds[0]) - self._shares[kind])
