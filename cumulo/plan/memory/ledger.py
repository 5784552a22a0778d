"""MemoryLedger: where the bytes of one rank go. The memory model fills it; search, reports and `why` read it."""

import math
from dataclasses import dataclass

from cumulo.base.quantities import LedgerLine

_ERROR_SCALE = 0.055  # of the logarithm: 3% in the median and 15% at p90 over 253 measured peaks


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes of one rank at the step's peak, by component."""

    stage: int  # the pipeline stage of the rank: the one that needs most, unless asked for another
    weights: int
    gradients: int
    optimizer: int  # master weights and moments
    activations: int  # kept for backward, of all live micro-batches
    logits: int  # the loss's own: logits and their gradients
    temporary: int  # gathered weights, communication buffers, one layer's working memory
    fragments: int  # what the framework's allocator keeps and cannot hand out
    context: int  # never passes through it: the driver's context, loaded kernels, NCCL's buffers
    host: int = 0  # beside the device, in its host's memory: what was offloaded

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """What the framework's allocator hands out at most (`max_memory_allocated`)."""
        return self.states + self.activations + self.logits + self.temporary

    @property
    def reserved(self) -> int:
        """What the allocator takes from the device at most (`max_memory_reserved`)."""
        return self.peak + self.fragments

    @property
    def total(self) -> int:
        """What the device must have, and what `nvidia-smi` shows of it."""
        return self.reserved + self.context

    def fits_with_probability(self, limit_bytes: float) -> float:
        """In so much memory, with errors like those of measured peaks (docs/plan-memory.md): a Laplace curve."""
        beyond = math.log(limit_bytes / self.total) / _ERROR_SCALE
        return 1 - 0.5 * math.exp(-beyond) if beyond >= 0 else 0.5 * math.exp(beyond)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of `total`: where nine of ten measured peaks would lie, by the same curve."""
        factor = 10**_ERROR_SCALE
        return self.total / factor, self.total * factor

    @property
    def lines(self) -> tuple[LedgerLine, ...]:
        """What `total` is made of."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "temporary", "fragments",
                 "context")  # fmt: skip
        return tuple(LedgerLine(name, getattr(self, name)) for name in names)


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a prediction's measurement is expected, with probability `level`."""

    low: float
    high: float
    level: float = 0.9


# TrainEstimate: what a step is predicted to take. The cost model makes it; search, reports and the ledger read it.
#
# FLOPs are counted one way everywhere. Model FLOPs: two for each weight of a matrix product that a token meets, and
# two for each element of the attention scores and of their product with the values, over the causal half of the
# positions when `causal` says so; three times that for forward and backward. Hardware FLOPs add what is recomputed.
# MFU and HFU are those over the peak rate of all devices in the job's number format.
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
