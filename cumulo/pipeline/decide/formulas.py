"""The published bubble and memory of each schedule, for the catalogue; the command and the tests compare with them.

All stages are alike and communication is free. f, i, w are a chunk's forward, input-gradient and weight-gradient
time, b is i + w, and fb a forward and a backward overlapped.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cumulo.pipeline.decide.costs import Costs


@dataclass(frozen=True)
class Formula:
    """A bubble in seconds per stage, and where it is exact."""

    text: str
    bubble_s: Callable[[int, Costs], float]  # (stages, costs of a chunk)
    peak_text: str  # most live activations of the fullest stage, in micro-batches × chunks
    peak: Callable[[int, int, int], int]  # (stages, micro-batches, chunks per stage)
    least_micro_batches: Callable[[int], int] = lambda stages: 1
    condition: str = "any costs"
    holds_for: Callable[[Costs], bool] = lambda costs: True
    # No more than a stage holds at once: (stages, micro-batches, chunks per stage, stage). For pruning a search.
    least_peak: Callable[[int, int, int, int], int] = lambda p, m, v, stage: 1
    # Whether a stage's bubble is counted from its own first to its own last action, not over the whole step.
    inner: bool = False

    def applies(self, stages: int, micro_batches: int, costs: Costs) -> bool:
        """Whether the paper's assumptions hold, so that a simulated bubble must equal the formula's."""
        alike = len(costs.chunks) == 1
        free = costs.transfer_s == 0 and costs.link.latency_s == 0
        return alike and free and micro_batches >= self.least_micro_batches(stages) and self.holds_for(costs)


def _overlapped_s(costs: Costs) -> float:
    chunk = costs.chunks[0]
    return (chunk.forward_s + chunk.backward_s) * (1 - costs.overlap_saving)


def _weight_is_least(costs: Costs) -> bool:
    chunk = costs.chunks[0]
    return chunk.backward_weight_s <= min(chunk.forward_s, chunk.backward_input_s)


def _all_equal(costs: Costs) -> bool:
    chunk = costs.chunks[0]
    return chunk.forward_s == chunk.backward_input_s == chunk.backward_weight_s


def _dual_assumptions(costs: Costs) -> bool:
    chunk = costs.chunks[0]
    fits = chunk.forward_s == chunk.backward_input_s and _weight_is_least(costs)
    return fits and _overlapped_s(costs) >= chunk.backward_s


def _flush_s(stages: int, costs: Costs) -> float:
    return (stages - 1) * (costs.chunks[0].forward_s + costs.chunks[0].backward_s)


def _zero_bubble_h1_s(stages: int, costs: Costs) -> float:
    chunk = costs.chunks[0]
    return (stages - 1) * (chunk.forward_s + chunk.backward_input_s - chunk.backward_weight_s)


def _dual_s(positions: int, costs: Costs) -> float:
    chunk = costs.chunks[0]
    return (positions - 1) * (_overlapped_s(costs) + chunk.backward_s - 3 * chunk.backward_weight_s)


def _down_the_stages(stages: int, micro_batches: int, chunks_per_stage: int, stage: int) -> int:
    return min(micro_batches, stages - stage) * chunks_per_stage


def _interleaved_peak(stages: int, micro_batches: int, chunks_per_stage: int, stage: int) -> int:
    if micro_batches % stages:
        return _down_the_stages(stages, micro_batches, chunks_per_stage, stage)
    ahead = (chunks_per_stage - 1) * stages + 2 * (stages - stage) - 1
    return min(micro_batches * chunks_per_stage, ahead)


# Huang et al. 2019: the bubble is a share (p-1)/(m+p-1) of the step.
GPIPE = Formula("(p-1)(f+b)", _flush_s, "m", lambda p, m, v: m, least_peak=_down_the_stages)
# Narayanan et al. 2021, section 2.2.1: the same bubble, p activations at most.
ONE_F_ONE_B = Formula(
    "(p-1)(f+b)", _flush_s, "min(m, p)", lambda p, m, v: min(m, p), least_peak=_down_the_stages
)
# Narayanan et al. 2021, section 2.2.2: f and b are those of a chunk, 1/v of a stage.
INTERLEAVED = Formula(
    "(p-1)(f+b), f and b being 1/v of a stage's",
    _flush_s,
    "(v-1)p + 2(p-1) + 1 where p divides m",
    lambda p, m, v: min(m * v, (v - 1) * (m if m < p else -(-m // (m // p))) + 2 * (p - 1) + 1),
    least_micro_batches=lambda stages: stages,
    least_peak=_interleaved_peak,
)
# Qi et al. 2023, table 2.
ZERO_BUBBLE_H1 = Formula(
    "(p-1)(f+i-w)",
    _zero_bubble_h1_s,
    "min(m, p)",
    lambda p, m, v: min(m, p),
    least_micro_batches=lambda stages: stages,
    condition="w ≤ f and w ≤ i",
    holds_for=_weight_is_least,
    least_peak=lambda p, m, v, stage: min(m, p),
)
# Qi et al. 2023, section 6: 0 from a stage's first action to its last; over the step, the stages' staggered start.
ZERO_BUBBLE_V = Formula(
    "0 inside each stage",
    lambda stages, costs: 0.0,
    "2p",
    lambda p, m, v: min(2 * m, 2 * p),
    least_micro_batches=lambda stages: 2 * stages - 1,
    condition="f = i = w",
    holds_for=_all_equal,
    least_peak=lambda p, m, v, stage: min(m + 1 + stage, 2 * p, 2 * m),
    inner=True,
)
# DeepSeek-AI 2024, table 2, with PP = p.
DUALPIPE = Formula(
    "(p/2-1)(fb+b-3w)",
    lambda stages, costs: _dual_s(stages // 2, costs),
    "p+1",
    lambda p, m, v: p + 1,
    condition="f = i ≥ w and fb ≥ b",
    holds_for=_dual_assumptions,
    least_peak=lambda p, m, v, stage: p + 1,
)
# The same table with PP = 2p: a V of p stages has 2p chunks.
DUALPIPE_V = Formula(
    "(p-1)(fb+b-3w)",
    _dual_s,
    "2p+1",
    lambda p, m, v: 2 * p + 1,
    condition="f = i ≥ w and fb ≥ b",
    holds_for=_dual_assumptions,
    least_peak=lambda p, m, v, stage: 2 * p + 1,
)
