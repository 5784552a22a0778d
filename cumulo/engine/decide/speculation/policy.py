"""Speculation: decides whose rows carry drafted tokens, and whether the next step waits to know them. Owned by the
scheduler, which asks it once a plan's rows are settled.

A draft continues tokens that are known, so a sequence whose token is still being drawn cannot have one: planning
ahead and drafting exclude each other. What drafts would have been right is followed for every sequence all the same
(it takes no model), so planning ahead stops when drafting is worth more than the host's time between steps.

A drafted token is accepted if it is the token that is drawn at its place, with the random number of that place. So
tokens are those of a run without drafts, each of them, sampled or greedy.
"""

from cumulo.engine.decide.plan import Draft, StepPlan
from cumulo.engine.decide.request import Sequence
from cumulo.engine.decide.residency import Residency
from cumulo.engine.decide.speculation.acceptance import Acceptance, class_of
from cumulo.engine.decide.speculation.choose import MOST_DRAFTED, Offer, choose
from cumulo.engine.decide.speculation.learnt_cost import LearntCost
from cumulo.engine.decide.speculation.ngram import NgramDraft

_LEAST_GAIN = 1.03  # from which waiting for the tokens is worth the host's time between two steps
_NEWS = 0.15


class Drafting:
    """What is known of one sequence's drafts."""

    __slots__ = ("acceptance", "draft", "worth")

    def __init__(self, everybody: Acceptance) -> None:
        self.draft = NgramDraft()
        self.acceptance = Acceptance(everybody)
        self.worth = 0.0  # how often the next token was expected, and came

    def follow(self, sequence: Sequence) -> None:
        """Take note of the tokens that came since."""
        draft, tokens = self.draft, sequence.tokens
        expected, kind = draft.expects, class_of(draft.matched)
        known = len(tokens)
        came = known - draft.size
        if came <= 0:
            return
        if draft.size == 0:  # a prompt says nothing about answers
            draft.advance(tokens, sequence.prompt_length)
            came = known - draft.size
            expected = False
        hits, misses = draft.advance(tokens, known)
        if expected:
            self.acceptance.observe(kind, hits, misses)
        for index in range(came):
            self.worth += _NEWS * ((index < hits) - self.worth)


class Speculation:
    def __init__(self) -> None:
        self.cost = LearntCost()
        self.everybody = Acceptance()
        self.fixed_count: int | None = None  # drafts of every row, for measurements; None: as many as pay

    def _follow(self, sequence: Sequence) -> Drafting:
        drafting: Drafting | None = sequence.drafting
        if drafting is None:
            drafting = sequence.drafting = Drafting(self.everybody)
        drafting.follow(sequence)
        return drafting

    def waits(self, rows: list[Sequence]) -> bool:
        """Whether the next step is to be planned only when the tokens of these rows, in flight, are known."""
        if not self.cost.known:
            return False
        offers = [
            Offer(MOST_DRAFTED, self._follow(sequence).worth)
            for sequence in rows
            if sequence.request.beam is None and sequence.computed >= sequence.prompt_length
        ]
        fixed_s, token_s = self.cost.line
        found = choose(offers, len(rows), len(rows), fixed_s, token_s, len(offers) * MOST_DRAFTED)
        return found.gain >= _LEAST_GAIN

    def extend(
        self, plan: StepPlan, rows: list[Sequence], residency: Residency, budget: int, now_s: float
    ) -> None:
        """Add drafts to the plan's rows of one token that is known. Never takes a block from anybody."""
        if not self.cost.known or budget <= 0:
            return
        fixed_s, token_s = self.cost.line
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
            drafting = self._follow(sequence)
            length = min(MOST_DRAFTED, sequence.limit - known - 1)
            if length > 0 and drafting.draft.expects:
                members.append(row)
                offers.append(Offer(length, drafting.acceptance.rate(class_of(drafting.draft.matched))))
        if not members:
            return
        draws = len(plan.draw_slots)
        if self.fixed_count is None:
            counts = choose(offers, draws, plan.tokens, fixed_s, token_s, budget).counts
        else:
            counts = [min(self.fixed_count, offer.length, budget // len(offers)) for offer in offers]
        for row, offer, count in zip(members, offers, counts, strict=True):
            count = residency.room_ahead(rows[row], plan.starts[row], count, len(rows), plan)
            if count > 0:
                self._add(plan, rows[row], row, count, offer.rate, now_s)

    def _add(
        self, plan: StepPlan, sequence: Sequence, row: int, count: int, rate: float, now_s: float
    ) -> None:
        assert sequence.drafting is not None
        tokens = sequence.drafting.draft.take(sequence.tokens, count)
        plan.drafts.append(Draft(row, tokens))
        plan.counts[row] += count
        sequence.computed += count
        story = sequence.request.story
        if not story.drafted_tokens:
            story.add(now_s, "drafting", step=plan.index, count=count, rate=f"{rate:.0%}")
        story.drafted_tokens += count
