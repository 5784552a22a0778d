"""Extension: what a feature beyond the core does at the named points of a step. Called by the scheduler's core.

The points, in the order in which a request meets them: arrival, admission, budget, rows, result, end. An
extension has the methods of the points that it needs. Those it leaves out are never called, so they cost
nothing, and the core runs without any extension at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from cumulo.engine.decide.core.request import Request, Sequence
from cumulo.engine.decide.plan import StepPlan, StepResult


@dataclass(slots=True)
class Flight:
    """The sequences of a planned step, until its result is there."""

    rows: list[Sequence] = field(default_factory=list)
    draws: list[Sequence] = field(default_factory=list)
    decoding: int = 0  # the first rows, which compute one token each; behind them are prompts
    spare_tokens: int = 0  # of the step's token budget that rows and prompts have left
    planned_s: float = 0.0
    expected_s: float = 0.0  # how long it takes, where somebody was promised a latency


class PromptChunk(NamedTuple):
    """Tokens of a prompt, or of a context that was lost, that a step computes."""

    sequence: Sequence
    tokens: int
    cut: bool = False  # other tenants have a share of the step: alone it would have had more


class Prompts(NamedTuple):
    """The chunks of a step."""

    chunks: list[PromptChunk]
    full: bool = False  # the step had no room for more, although its token budget may have


class StepTiming(NamedTuple):
    """How long a step took, as its runner measured it."""

    seconds: float
    proposing_s: float = 0.0  # of these, the draft model's part
    proposed: int = 0  # tokens that the draft model proposed


class Extension:
    # -- arrival --------------------------------------------------------------------------------------------
    def arrive(self, request: Request) -> None:
        """A request that could run has come. May set its order, or refuse it by raising InvalidRequest."""

    def hold_back(self, sequence: Sequence, now_s: float) -> bool:
        """A new request's first sequence has been queued. True: it waits for this extension, which queues it."""
        return False

    # -- admission ------------------------------------------------------------------------------------------
    def order_victims(self, victims: list[Sequence]) -> list[Sequence]:
        """Sequences that may be preempted, the youngest first: in which order they are."""
        return victims

    def tokens_elsewhere(self, sequence: Sequence, cached: int) -> int:
        """Tokens of a waiting sequence behind its cached ones that need not be computed either."""
        return 0

    def take_admission(self, sequence: Sequence, plan: StepPlan, now_s: float) -> bool:
        """A sequence has its turn and there is room. True: this extension has given it a slot and blocks."""
        return False

    def admitted(self, sequence: Sequence, cached: int, plan: StepPlan, now_s: float) -> int:
        """A sequence has a slot and blocks. Returns how many tokens behind the cached ones it need not compute."""
        return 0

    # -- budget ---------------------------------------------------------------------------------------------
    def share_prompts(
        self, waiting: list[Sequence], budget: int, may_admit: bool, plan: StepPlan, now_s: float
    ) -> Prompts | None:
        """Which prompts the step computes, newcomers' included; None: this extension does not decide it."""
        return None

    def bound_tokens(self, plan: StepPlan, tokens: int) -> int:
        """How many of so many further tokens a planned step has time for."""
        return tokens

    def plans_ahead(self, in_flight: StepPlan, now_s: float) -> bool:
        """Whether the next step may be planned while this one is computed."""
        return True

    # -- rows -----------------------------------------------------------------------------------------------
    def begin_step(self, plan: StepPlan, now_s: float) -> None:
        """A step is going to be planned."""

    def choose_rows(self, plan: StepPlan, now_s: float) -> list[Sequence] | None:
        """Which running sequences may draw a token in this step; None: all."""
        return None

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        """All rows are planned; there may be none. What the extension adds to the plan is added here."""

    # -- result ---------------------------------------------------------------------------------------------
    def observe(self, plan: StepPlan, timing: StepTiming, now_s: float) -> None:
        """How long a step took whose result is entered next."""

    def before_result(
        self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float
    ) -> Iterable[Sequence]:
        """Tokens come, and the drawn ones are not entered yet. Returns sequences that this has ended."""
        return ()

    def after_result(self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float) -> None:
        """All drawn tokens are entered."""

    def step_failed(self, plan: StepPlan, now_s: float) -> None:
        """The runner could not play a plan: nobody knows what it has done."""

    # -- end ------------------------------------------------------------------------------------------------
    def sequence_ended(self, sequence: Sequence, now_s: float) -> None:
        """A sequence has ended, wherever it was."""

    def request_ended(self, request: Request, now_s: float) -> None:
        """All sequences of a request have ended."""


class Points:
    """The extensions of a scheduler by point: `points.arrive` are those that have something to do on arrival, in
    their order."""

    def __init__(self, extensions: Iterable[Extension] = ()) -> None:
        self.extensions = tuple(extensions)

    def __getattr__(self, point: str) -> tuple[Extension, ...]:
        """Asked once of each point: then it is an attribute."""
        plain = getattr(Extension, point)
        found = tuple(one for one in self.extensions if getattr(type(one), point) is not plain)
        setattr(self, point, found)
        return found
