"""TrainEstimate: what a step is predicted to take. The cost model makes it; search, reports and the ledger read it.

FLOPs are counted one way everywhere. Model FLOPs: two for each weight of a matrix product that a token meets, and
two for each element of the attention scores and of their product with the values, over the causal half of the
positions when `causal` says so; three times that for forward and backward. Hardware FLOPs add what is recomputed.
MFU and HFU are those over the peak rate of all devices in the job's number format.
"""

from dataclasses import dataclass

from cumulo.plan.memory.ledger import MemoryLedger


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a prediction's measurement is expected, with probability `level`."""

    low: float
    high: float
    level: float = 0.9


@dataclass(frozen=True, slots=True)
class TrainEstimate:
    step_s: float
    breakdown: tuple[
        tuple[str, float], ...
    ]  # seconds by cause on the stage that bounds the step; they sum to step_s
    tokens_per_s: float  # of the whole job
    mfu: float  # model FLOPs per second over the peak
    hfu: float  # hardware FLOPs per second over the peak
    interval: Interval  # of step_s
    evidence: tuple[str, ...]  # what the prediction rests on, in sentences
    link_bytes: tuple[
        tuple[str, float], ...
    ] = ()  # bytes one rank sends in a step, by axis: tp, cp, ep, pp, dp
    memory: MemoryLedger | None = None
