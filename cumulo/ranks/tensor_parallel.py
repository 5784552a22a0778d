"""Tensor parallelism: matrices cut over ranks (Shoeybi et al. 2019, Megatron-LM), with sequence parallelism also
the tokens between them (Korthikanti et al. 2022). The matrix side of training's `Split`.

Two matrices make a region: the first cut by rows of its weight (its outputs), the second by columns (its inputs),
so that only entering and leaving talk. Without sequence parallelism a region's input is the same on all ranks: its
gradient is summed on the way back, and the result on the way out. With it, ranks hold different tokens outside the
region: entering gathers them, leaving sums and cuts in one go, and each is the other's gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.ranks.differentiable import gathered, sum_gradients, summed, summed_and_cut
from cumulo.ranks.groups import Group


class LinearProduct(Protocol):
    """A matrix that rows are multiplied by, such as `cumulo.models.linear.Linear`."""

    @property
    def bias(self) -> Tensor | None: ...
    def __call__(self, x: Tensor) -> Tensor: ...
    def without_bias(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class VocabularySlice:
    """This rank has of the vocabulary only the rows from `first` on."""

    first: int
    # Log-sums and wanted logits: of slices -> of all.
    merge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class WholeMatrices:
    """Every matrix is whole on this rank. From `enter` to `leave` is a region with a slice of each matrix and all
    tokens; outside, they may be cut."""

    size = 1

    def enter(self, x: Tensor) -> Tensor:
        """Into a region: what every rank's slice needs. Gradients of the slices are summed."""
        return x

    def partial(self, linear: LinearProduct, x: Tensor) -> Tensor:
        """The product of a matrix of which the columns are sliced: to be summed by `leave`."""
        return linear(x)  # with its bias, in one operation

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Out of a region: the sum of all ranks' partial products, and the bias once. `y` is given up to it."""
        return y

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, weight)

    def vocabulary(self, rows: int) -> VocabularySlice | None:
        """Which part of the vocabulary this rank has, of as many rows on every rank; None: all of it."""
        return None

    def all_tokens(self, values: Tensor) -> Tensor:
        """Per-token values without gradients, of the tokens this rank has outside a region -> of all tokens."""
        return values

    def sum_by_row(self, values: Tensor, rows: int) -> Tensor:
        """Per-token values [own tokens, N] -> [rows, N]: of this rank's tokens, summed over each row."""
        return values.view(rows, -1, values.shape[-1]).sum(1)

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks that have other tokens outside a region; a gradient passes to each as it is."""
        return values


class TensorParallel(WholeMatrices):
    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        self.group, self.size, self.index = group, group.size(), group.rank()
        self.sequence_parallel = sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        return gathered(x, self.group) if self.sequence_parallel else sum_gradients(x, self.group)

    def partial(self, linear: LinearProduct, x: Tensor) -> Tensor:
        return linear(x) if linear.bias is None else linear.without_bias(x)

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        left = summed_and_cut(y, self.group) if self.sequence_parallel else summed(y, self.group)
        return left if bias is None else left + bias

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        """Each rank looks up the tokens of its part of the vocabulary and gives zeros for the others."""
        own = tokens - self.index * len(weight)
        elsewhere = (own < 0) | (own >= len(weight))
        found = F.embedding(own.masked_fill(elsewhere, 0), weight)
        return self.leave(found.masked_fill(elsewhere[:, None], 0.0), None)

    def vocabulary(self, rows: int) -> VocabularySlice:
        return VocabularySlice(self.index * rows, self._merge)

    def _merge(self, log_sum: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """Merges figures of slices of the logits into those of all: one small exchange for both."""
        parts = gathered(torch.stack((log_sum, found)), self.group).view(self.size, 2, -1)
        return parts[:, 0].logsumexp(0), parts[:, 1].sum(0)

    def all_tokens(self, values: Tensor) -> Tensor:
        return gathered(values, self.group) if self.sequence_parallel else values

    def sum_by_row(self, values: Tensor, rows: int) -> Tensor:
        if not self.sequence_parallel:
            return super().sum_by_row(values, rows)
        # A rank's run of tokens begins and ends anywhere in a row.
        first, length = self.index * len(values), len(values) * self.size // rows
        row = torch.arange(first, first + len(values), device=values.device) // length
        return F.one_hot(row, rows).to(values.dtype).T @ values

    def total(self, values: Tensor) -> Tensor:
        return summed(values, self.group) if self.sequence_parallel else values
