"""Beam search as decisions: which beam continues with which token, and which hypotheses are kept.

The engine feeds each live beam's candidates of a step to `advance` and turns the answer into sequences
of the next plan. The rules are those of transformers' `generate(num_beams=...)`, so results agree.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence: its output tokens, stop token included, and how good it is."""

    tokens: list[int]
    logprob: float  # sum over the tokens
    score: float  # logprob / length ** length_penalty
    finish_reason: Literal["stop", "length"]  # ended by a stop token, or by reaching max_tokens


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What one step decided. Beam i of the next step is beam parents[i] of this one plus tokens[i]."""

    parents: list[int]
    tokens: list[int]
    finished: list[Hypothesis]  # newly kept by this step (a later, better one may displace them)
    done: bool  # nothing live is worth continuing; parents and tokens are empty


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
    """Search for the `n` best sequences with `width` beams. Begins with one live beam: the prompt.

    `early_stopping` True: end as soon as `width` hypotheses are finished. False: end when the best live beam,
    scored at its present length, cannot beat the worst of them. "never": the same, scored at the length most
    favourable to it, which is the only rule that loses nothing.
    """

    width: int
    max_tokens: int
    n: int = 1
    length_penalty: float = 1.0
    stop_ids: Collection[int] = ()  # tokens that end a beam
    early_stopping: EarlyStopping = False
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

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> BeamStep:
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
        finished = [hypothesis for hypothesis in new if any(hypothesis is kept for kept in self.kept)]
        self.live = live
        self.done = not live or self._cannot_improve(length)
        if self.done:
            return BeamStep([], [], finished, True)
        return BeamStep(parents, tokens, finished, False)

    def best(self) -> list[Hypothesis]:
        """The `n` best hypotheses, best first. Complete once `done`."""
        return self.kept[: self.n]

    def _cannot_improve(self, length: int) -> bool:
        if len(self.kept) < self.width:
            return False
        if self.early_stopping is True:
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens  # log-probabilities are negative: a longer divisor flatters them most
        best_possible: float = self.live[0].logprob / length**self.length_penalty
        return best_possible <= self.kept[-1].score
