"""Beams: beam search, as an extension of the scheduler. `BeamSearch` decides which beam continues with which
token and which hypotheses are kept; `Beams` makes these decisions sequences of the next plan.

The rules are those of transformers' `generate(num_beams=...)`, so results agree. Every live beam is a sequence of
its own. When all of a request's beams have been computed, the best continuations are chosen: a parent's first child
goes on in its place, further children share its blocks (copy-on-write), childless beams end.
"""

from collections.abc import Collection
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Literal

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight
from cumulo.engine.decide.core.kv_manager import new_slot
from cumulo.engine.decide.core.request import Request, Sequence, State
from cumulo.engine.decide.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence: its output tokens, stop token included, and how good it is."""

    tokens: list[int]
    logprob: float  # sum over the tokens
    score: float  # logprob / length ** length_penalty
    finish_reason: Literal["stop", "length"]  # ended by a stop token, or by reaching max_tokens


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What one step decided. Beam i of the next step is beam parents[i] of this one plus tokens[i]. Both are empty
    where nothing live is worth continuing."""

    parents: list[int]
    tokens: list[int]


@dataclass(slots=True)
class _Beam:
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0


def candidates_per_beam(width: int, stops: int) -> int:
    """How many of its most likely tokens `BeamSearch.advance` must be given for each beam: `width` continuations
    that do not end must be left even if every one of `stops` stop tokens comes before them."""
    return max(2 * width, width + stops)


@dataclass(slots=True)
class BeamSearch:
    """Search for the `n` best sequences with `width` beams. It begins with one live beam, the prompt, and ends when
    the best live beam, scored at its present length, cannot beat the worst of `width` finished hypotheses."""

    width: int
    max_tokens: int
    n: int = 1
    length_penalty: float = 1.0
    stop_ids: Collection[int] = ()  # tokens that end a beam
    done: bool = False
    live: list[_Beam] = field(default_factory=lambda: [_Beam()])
    kept: list[Hypothesis] = field(default_factory=list)  # best first, at most `width`

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.width:
            raise ValueError(f"n must be 1 to the beam width ({self.width}), got {self.n}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, got {self.max_tokens}")

    @property
    def length(self) -> int:
        """Tokens in each live beam."""
        return len(self.live[0].tokens) if self.live else 0

    def advance(self, candidates: ListLike[ListLike[tuple[int, float]]]) -> BeamStep:
        """Decide one step from each live beam's most likely (token, log-probability), likeliest first.

        Ties are broken towards the earlier beam and then the lower token id, so equal inputs give equal
        results everywhere.
        """
        if self.done:
            raise ValueError("this beam search is done; it takes no more candidates")
        if len(candidates) != len(self.live):
            raise ValueError(f"candidates of {len(candidates)} beams for {len(self.live)} live ones")
        length = self.length + 1
        ranked = sorted(
            (-(beam.logprob + logprob), index, token)
            for index, (beam, options) in enumerate(zip(self.live, candidates, strict=True))
            for token, logprob in options
        )
        out_of_length = length >= self.max_tokens
        new: list[Hypothesis] = []
        parents: list[int] = []
        tokens: list[int] = []
        live: list[_Beam] = []
        for rank, (minus_logprob, parent, token) in enumerate(ranked):
            stops = token in self.stop_ids
            if stops or out_of_length:
                # An ending that is not among the `width` best continuations was not worth a beam.
                if rank < self.width:
                    sequence = [*self.live[parent].tokens, token]
                    score = -minus_logprob / length**self.length_penalty
                    new.append(Hypothesis(sequence, -minus_logprob, score, "stop" if stops else "length"))
            elif len(live) < self.width:
                parents.append(parent)
                tokens.append(token)
                live.append(_Beam([*self.live[parent].tokens, token], -minus_logprob))
            if rank + 1 >= self.width and (out_of_length or len(live) == self.width):
                break
        # sorted is stable: of equal scores the earlier found stays ahead.
        self.kept = sorted([*self.kept, *new], key=lambda hypothesis: -hypothesis.score)[: self.width]
        self.live = live
        self.done = not live or self._cannot_improve(length)
        return BeamStep([], []) if self.done else BeamStep(parents, tokens)

    def best(self) -> list[Hypothesis]:
        """The `n` best hypotheses, best first. Complete once `done`."""
        return self.kept[: self.n]

    def _cannot_improve(self, length: int) -> bool:
        if len(self.kept) < self.width:
            return False
        best_possible: float = self.live[0].logprob / length**self.length_penalty
        return best_possible <= self.kept[-1].score


class Beams(Extension):
    def __init__(self, batch: RequestBatch) -> None:
        self._batch = batch

    def arrive(self, request: Request) -> None:
        params = request.params
        if params.beam_width is not None:
            request.beam = BeamSearch(
                width=params.beam_width,
                n=params.n,
                length_penalty=params.length_penalty,
                stop_ids=request.stop_ids,
                max_tokens=request.output_limit,
            )
            _one_token_at_a_time(request.sequences[0])

    def after_result(self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float) -> None:
        """Beams take their candidates from the log-probabilities at their places."""
        searching: dict[str, Request] = {}
        for index, found in result.logprobs.items():
            sequence = flight.draws[index]
            if sequence.state != State.FINISHED and sequence.request.beam is not None:
                sequence.candidates = found.top
                if sequence.state == State.WAITING:
                    self._batch.queue.set_aside(sequence)
                searching[sequence.request.id] = sequence.request
        for request in searching.values():
            _advance(self._batch, request, now_s)


def _advance(batch: RequestBatch, request: Request, now_s: float) -> None:
    """If all beams have candidates, choose the next generation; otherwise wait for the rest."""
    beam, live = request.beam, [s for s in request.sequences if s.state != State.FINISHED]
    assert beam is not None
    if any(sequence.candidates is None for sequence in live):
        return
    step = beam.advance([sequence.candidates or [] for sequence in live])
    request.story.note_token(now_s)
    for sequence in live:
        sequence.candidates = None
    if beam.done:
        for sequence in live:
            batch.finish(sequence, "stop", now_s)
        return
    parents = [live[index] for index in step.parents]
    for sequence in live:
        if sequence not in parents:
            _drop(batch, sequence)
    generation: list[Sequence] = []
    for index, parent in enumerate(parents):
        # Forks before take-overs: a parent must not have grown when its other children are made.
        if parent in parents[:index]:
            generation.append(_fork(batch, parent, index))
        else:
            generation.append(parent)
    for index, (sequence, token) in enumerate(zip(generation, step.tokens, strict=True)):
        sequence.tokens.append(token)
        sequence.sample_index = index
        _one_token_at_a_time(sequence)
        _restate(batch, sequence)
    request.sequences = generation


def _drop(batch: RequestBatch, sequence: Sequence) -> None:
    """A beam without children: its blocks go, its slot stays with the request."""
    slot = batch.remove(sequence)
    if slot >= 0:
        sequence.request.reserved_slots.append(slot)


def _fork(batch: RequestBatch, parent: Sequence, sample_index: int) -> Sequence:
    """A second child: shares the parent's blocks if those are here and a slot is, else waits."""
    twin = parent.fork(sample_index)
    if parent.state == State.RUNNING and parent.request.reserved_slots:
        batch.kv.seat_twin(twin)
        batch.add_running(twin)
    else:
        twin.blocks, twin.capacity, twin.computed, twin.lost = [], 0, 0, twin.computed
        batch.queue.park(twin)
    return twin


def _restate(batch: RequestBatch, sequence: Sequence) -> None:
    """A beam was given its next token: tell the runner, or queue it if it has to wait."""
    if sequence.state == State.RUNNING:
        batch.next_plan.begin.append(new_slot(sequence))
    else:
        batch.queue.push(sequence)


def _one_token_at_a_time(sequence: Sequence) -> None:
    """A beam's next token is not the one drawn but the one chosen: never plan past a draw in flight."""
    sequence.limit = len(sequence.tokens) + 1
