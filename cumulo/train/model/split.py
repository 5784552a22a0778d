"""Split: what a model does where it is cut over ranks. `TrainingDecoder` asks it at its borders and knows no more.

A split has three independent sides: matrices cut over tensor-parallel ranks, sequences over context-parallel ranks,
experts over expert-parallel ranks. `WHOLE` is the split into one part and costs nothing; `split_for` makes the one
of a layout.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from cumulo.layout.layout import Layout
from cumulo.models.linear import Linear
from cumulo.ranks.groups import Groups
from cumulo.ranks.tensor_parallel import TensorParallel, VocabularySlice
from cumulo.train.data.packing import DeviceBatch
from cumulo.train.model.document_mask import DocumentMask, OwnTokens
from cumulo.train.parallel.context_parallel import ContextParallel
from cumulo.train.parallel.expert_parallel import ApplyExperts, ByExpert, ExpertParallel


class TensorSplit(Protocol):
    """From `enter` to `leave` is a region with a slice of each matrix and all tokens; outside, they may be cut."""

    @property
    def size(self) -> int: ...

    def enter(self, x: Tensor) -> Tensor:
        """Into a region: what every rank's slice needs. Gradients of the slices are summed."""
        ...

    def partial(self, linear: Linear, x: Tensor) -> Tensor:
        """The product of a matrix of which the columns are sliced: to be summed by `leave`."""
        ...

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Out of a region: the sum of all ranks' partial products, and the bias once. `y` is given up to it."""
        ...

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor: ...

    def vocabulary(self, rows: int) -> VocabularySlice | None:
        """Which part of the vocabulary this rank has, of as many rows on every rank; None: all of it."""
        ...

    def all_tokens(self, values: Tensor) -> Tensor:
        """Per-token values without gradients, of the tokens this rank has outside a region -> of all tokens."""
        ...

    def sum_by_row(self, values: Tensor, rows: int) -> Tensor:
        """Per-token values [own tokens, N] -> [rows, N]: of this rank's tokens, summed over each row."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks that have other tokens outside a region; a gradient passes to each as it is."""
        ...


class ContextSplit(Protocol):
    def own_tokens(self, batch: DeviceBatch) -> OwnTokens:
        """This rank's places of every row."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks that have other places of the same rows, without gradients."""
        ...


class ExpertSplit(Protocol):
    @property
    def size(self) -> int: ...

    def apply(self, experts: ApplyExperts, x: Tensor, chosen: Tensor, total: int) -> Tensor:
        """Each token's experts, of `total`, wherever they are: x [T, H], chosen [T, k] -> results [T, k, H]."""
        ...


@dataclass(frozen=True, slots=True)
class Split:
    tensor: TensorSplit
    context: ContextSplit
    experts: ExpertSplit


class _WholeMatrices:
    size = 1

    def enter(self, x: Tensor) -> Tensor:
        return x

    def partial(self, linear: Linear, x: Tensor) -> Tensor:
        return linear(x)  # with its bias, in one operation

    def leave(self, y: Tensor, bias: Tensor | None) -> Tensor:
        return y

    def embed(self, weight: Tensor, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, weight)

    def vocabulary(self, rows: int) -> VocabularySlice | None:
        return None

    def all_tokens(self, values: Tensor) -> Tensor:
        return values

    def sum_by_row(self, values: Tensor, rows: int) -> Tensor:
        return values.view(rows, -1, values.shape[-1]).sum(1)

    def total(self, values: Tensor) -> Tensor:
        return values


class _WholeSequences:
    def own_tokens(self, batch: DeviceBatch) -> OwnTokens:
        return OwnTokens(
            batch.tokens.flatten(),
            batch.targets.flatten(),
            batch.positions.flatten(),
            DocumentMask.from_batch(batch),
        )

    def total(self, values: Tensor) -> Tensor:
        return values


class _AllExperts:
    size = 1

    def apply(self, experts: ApplyExperts, x: Tensor, chosen: Tensor, total: int) -> Tensor:
        order = ByExpert.sort(chosen, total)
        return order.in_order_of_tokens(experts(order.inputs(x), order.counts))


WHOLE = Split(_WholeMatrices(), _WholeSequences(), _AllExperts())


def split_for(layout: Layout, groups: Groups) -> Split:
    """The split of a layout as this rank sees it."""
    tensor, context, experts = WHOLE.tensor, WHOLE.context, WHOLE.experts
    if layout.tp > 1:
        tensor = TensorParallel(groups.group("tp"), layout.sequence_parallel)
    if layout.cp > 1:
        ring = groups.group("ring") if layout.cp > layout.ulysses else None
        context = ContextParallel(
            groups.group("cp"), ring, groups.group("ulysses") if layout.ulysses > 1 else None
        )
    if layout.ep > 1:
        experts = ExpertParallel(groups.group("ep"))
    return Split(tensor, context, experts)
