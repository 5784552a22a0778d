"""StepPlan and StepResult: the data between the scheduler, which decides, and a runner, which plays.

A runner keeps one *slot* of state per live sequence (token ids, block table, sampling state). A plan says
which slots begin or end, which blocks they gain, and which of their tokens to compute. It never carries a
sampled token: the runner already has it, so step N+1 can be planned before step N has been sampled.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cumulo.engine.decide.params import SamplingParams

if TYPE_CHECKING:
    from cumulo.engine.decide.core.pooling import Vector


class NewSlot(NamedTuple):
    """A sequence that begins, resumes after preemption, forks or (a beam) was given its next token in this step;
    replaces what the slot held. Its blocks may be shared with others."""

    slot: int
    tokens: ListLike[int]  # prompt, and on a resume the output so far
    prompt_length: int  # tokens[prompt_length:] are output: penalties count them
    blocks: list[int]
    params: SamplingParams
    seed: int  # resolved: given by the user or drawn by the engine
    sample_index: int = 0  # which of the request's n samples; each draws its own random numbers
    adapter: int = -1  # the slot of its adapter; -1: none


class Draft(NamedTuple):
    """A row of one known token that also verifies these, which may follow it. The row is the draw of that index,
    and its count includes them: they are written behind the known token before the row is computed. A draft is
    accepted if it is what is drawn at its place and all before it were."""

    row: int
    tokens: list[int]


class Rounds(NamedTuple):
    """Every row, one known token each, is verified with as many `drafts` of the runner's own head behind it; those
    that agree are kept, the head drafts again behind them, and so on: `times` in one step."""

    times: int
    drafts: int


class Send(NamedTuple):
    """A row that computes another engine's order: the receiver is told of every layer."""

    row: int
    key: str  # of the order
    tokens: int  # that have their KV after this row


@dataclass(slots=True)
class StepPlan:
    """One step. Lists named alike are columns of one table. The runner does, in this order:
    end, swap_out, swap_in, begin, extend, replace, copies; then computes all rows (K and V of every row are
    written before any row attends, layer by layer), then draws.
    """

    index: int
    # -- state changes
    end: list[int] = field(default_factory=list)  # slots whose sequences have ended: their state may go
    begin: list[NewSlot] = field(default_factory=list)
    extend: list[tuple[int, int]] = field(default_factory=list)  # (slot, block) appended to its table
    replace: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, table index, new block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # copy-on-write: block, block
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device block -> host block
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host block -> device block
    # -- rows: tokens [start, start + count) of a slot are computed
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    # -- draws: row index and the slot that receives the drawn token at position start + count of the row
    draw_rows: list[int] = field(default_factory=list)
    draw_slots: list[int] = field(default_factory=list)
    # rows whose logits at every computed position are wanted (prompt log-probabilities)
    prompt_logprob_rows: list[int] = field(default_factory=list)
    # -- embeddings: rows whose final hidden states are wanted, summed from this token's position to the row's end
    pool_rows: list[int] = field(default_factory=list)
    pool_starts: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)  # speculation: rows that draw up to 1 + drafts tokens
    # (draw, count): the runner's draft model proposes so many tokens behind what is drawn
    proposals: list[tuple[int, int]] = field(default_factory=list)
    proposal_floor: float = 0.0  # ... and stops where all of them are right with a lower chance than this
    rounds: Rounds | None = None  # speculation by the device itself
    # Rounds that the device plays behind those: they are the first of the next step, if it continues this one.
    rounds_ahead: int = 0
    feeds_head: bool = True  # a head on the device sees this step's tokens, so that it can draft behind them
    sends: list[Send] = field(default_factory=list)  # rows whose KV goes to other engines; nothing is drawn

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def may_accept(self) -> bool:
        """Whether a row may gain several tokens."""
        return bool(self.drafts) or self.rounds is not None

    def draw_one_each(self) -> None:
        """Every row so far is one token and draws one."""
        rows = len(self.slots)
        self.counts, self.draw_rows, self.draw_slots = [1] * rows, list(range(rows)), self.slots[:]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, after penalties and bias, before temperature and cuts) at one position."""

    token: int
    logprob: float
    rank: int  # 1 = most likely
    top: list[tuple[int, float]]  # most likely first


@dataclass(slots=True)
class StepResult:
    """What a runner returns for a plan."""

    tokens: list[int]  # one per draw, in the plan's order
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by draw index, where asked for
    # by row index: one entry per position start+1 .. start+count that lies inside the prompt
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # by draw index: this sequence failed (NaN logits)
    pooled: "list[Vector]" = field(default_factory=list)  # one sum per entry of pool_rows
    # speculation: by draw index, the drafted tokens that were accepted, before the one in `tokens`
    accepted: dict[int, list[int]] = field(default_factory=dict)
    accepted_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    round_hits: dict[int, list[int]] = field(default_factory=dict)  # by draw index: drafts kept, by round
    # By draw index: a draft model's tokens behind it,
    proposed: dict[int, list[int]] = field(default_factory=dict)
    # ... and, where the drafter says so, with which chance each is right, those before it being right
    chances: dict[int, list[float]] = field(default_factory=dict)
    proposing_s: float = 0.0  # of the step's time
    started_s: float = 0.0  # time.perf_counter() when the runner began and finished
    finished_s: float = 0.0


class PendingStep(Protocol):
    def result(self) -> StepResult: ...


class Runner(Protocol):
    """A player of StepPlans. Plans are executed strictly in the order submitted."""

    def submit(self, plan: StepPlan) -> PendingStep: ...
    def close(self) -> None: ...


# Sizes to which a GPU rounds steps up: of what is captured, and, beyond, of what kernels are compiled for.
_DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
# Tokens to which a step is rounded up that is not captured: kernels are compiled per divisibility.
_EAGER_STEP = 64


def round_rows(count: int) -> int:
    """Up to 128 a few sizes, then multiples of 32: what is wasted stays under a quarter."""
    for size in _DECODE_SIZES:
        if count <= size:
            return size
    return -(-count // 32) * 32


def round_tokens(count: int) -> int:
    """Eight steps per doubling, at least 64 tokens apart; up to 32 powers of two, as a row with drafts is short."""
    if count <= _EAGER_STEP // 2:
        return max(4, 1 << (count - 1).bit_length())
    step = max(_EAGER_STEP, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step
