"""Pooled: the hidden states of one request on their way to an embedding. Held by Request, fed by the scheduler.

A runner sums hidden states over the tokens a plan names; how the sums of a request's chunks become one is decided
here, so every runner pools alike and keeps nothing between two steps.
"""

from typing import TYPE_CHECKING

from cumulo.engine.decide.params import Pooling

if TYPE_CHECKING:  # sums are only added up here: what decides does without numpy
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]


class Pooled:
    """`mean`: of the final hidden states of all tokens; `last`: that of the last token, which has seen all."""

    __slots__ = ("_covered", "_length", "_total", "kind")

    def __init__(self, kind: Pooling, length: int) -> None:
        self.kind, self._length = kind, length
        self._covered = 0  # tokens summed so far
        self._total: Vector | None = None

    @property
    def total(self) -> "Vector | None":
        """The sum, once all has come. A mean's divisor is left out: an embedding keeps only the direction."""
        return self._total if self._covered == self._length else None

    @property
    def needs_every_token(self) -> bool:
        """Whether a cached prefix is of no use: its keys and values are there, its hidden states are not."""
        return self.kind == "mean"

    @property
    def wants(self) -> str:
        """What is needed, in words for the request's story."""
        if self.needs_every_token:
            return "every token's hidden state is needed, so no cached prefix serves"
        return "only the last token's hidden state is needed"

    def first_wanted(self, start: int, end: int) -> int | None:
        """Of a chunk [start, end), the first token whose hidden state is wanted; None: none of them."""
        if self.needs_every_token:
            return start
        return end - 1 if end == self._length else None

    def add(self, first: int, end: int, total: "Vector") -> bool:
        """Take in the sum over tokens [first, end); True when all has come."""
        begins = first == 0 or not self.needs_every_token  # also again, after a preemption by recomputation
        if not begins and first != self._covered:
            raise RuntimeError(
                f"{self._covered} tokens are pooled, and {first} comes next: a bug in the scheduler"
            )
        self._total = total if begins or self._total is None else self._total + total
        self._covered = end
        return end == self._length
