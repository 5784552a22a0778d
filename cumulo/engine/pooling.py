"""Pooled: the hidden states of one request on their way to an embedding. Held by Request, fed by the scheduler.

A runner sums hidden states over the tokens a plan names; how the sums of a request's chunks become one vector
is decided here, so every runner pools alike and keeps nothing between two steps.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cumulo.engine.params import Pooling

Vector = NDArray[np.float64]


class Pooled:
    """`mean`: of the final hidden states of all tokens; `last`: that of the last token, which has seen all."""

    __slots__ = ("_covered", "_length", "_total", "kind", "vector")

    def __init__(self, kind: Pooling, length: int) -> None:
        self.kind, self._length = kind, length
        self._covered = 0  # tokens summed so far
        self._total: Vector | None = None
        self.vector: Vector | None = None  # of length 1; set when the last token has come

    @property
    def needs_every_token(self) -> bool:
        """Whether a cached prefix is of no use: its keys and values are there, its hidden states are not."""
        return self.kind == "mean"

    @property
    def wants(self) -> str:
        """In words, for the request's story."""
        if self.needs_every_token:
            return "every token's hidden state is needed, so no cached prefix serves"
        return "only the last token's hidden state is needed"

    def first_wanted(self, start: int, end: int) -> int | None:
        """Of a chunk [start, end), the first token whose hidden state is wanted; None: none of them."""
        if self.kind == "mean":
            return start
        return end - 1 if end == self._length else None

    def add(self, first: int, end: int, total: Vector) -> bool:
        """Take in the sum over tokens [first, end); True when the vector is complete."""
        if self.kind == "last" or first == 0:  # from the beginning: also after a preemption by recomputation
            self._covered, self._total = first, np.zeros(len(total))
        if self._total is None or first != self._covered:
            raise RuntimeError(
                f"{self._covered} tokens are pooled, and {first} comes next: a bug in the scheduler"
            )
        self._total = self._total + total
        self._covered = end
        if end == self._length:
            # A mean's divisor goes with the normalisation: only the direction is kept.
            self.vector = normalised(self._total)
            self._total = None
        return self.vector is not None


def normalised(vector: Vector) -> Vector:
    """At length 1 (L2). A vector of zeros has no direction and stays."""
    largest = float(np.abs(vector).max(initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return vector
    scaled = vector / largest  # squares of what is near 1 neither overflow nor vanish
    return scaled / np.sqrt(scaled @ scaled)


def shortened(vector: Sequence[float] | NDArray[np.floating], dimensions: int | None) -> Vector:
    """The first `dimensions` numbers, at length 1 again; None: all of them."""
    whole: Vector = np.asarray(vector, dtype=np.float64)
    return whole if dimensions is None else normalised(whole[:dimensions])
