"""MemoryLedger: where the bytes of one rank go. The memory model fills it; search, reports and `why` read it."""

from dataclasses import dataclass

from cumulo.base.ledger import LedgerLine


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
    reserved: int  # the driver's context and libraries, and the allocator's fragments
    host: int = 0  # beside the device, in its host's memory: what was offloaded

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """What the framework's allocator hands out at most (`max_memory_allocated`)."""
        return self.states + self.activations + self.logits + self.temporary

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.peak + self.reserved

    @property
    def lines(self) -> tuple[LedgerLine, ...]:
        """What `total` is made of."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "temporary", "reserved")
        return tuple(LedgerLine(name, getattr(self, name)) for name in names)
