"""RankRows: what a rank of data-parallel attention does besides its own sequences: it computes its experts for the
rows of all ranks, and gives the others the hidden states that tokens are drawn from. `CudaDecoder` calls it.

What a rank writes for the others stays until they have read it: between two writings of one buffer there is always
a meeting of all ranks behind the kernel that reads. From ranks of other hosts it is fetched (`bring`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.kernels.cuda.collective.one_shot import gather_owned, gather_rows, sum_rows
from cumulo.kernels.cuda.collective.peers import PeerMemory, aligned, flags_bytes
from cumulo.layout.serving import RankPart
from cumulo.models.play.cuda_slice import partial_bytes, partial_dtype
from cumulo.ranks.peer_memory import bring


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Which ranks a step's rows lie on, on the device."""

    starts: Tensor  # [data-parallel ranks + 1]: where each one's tokens begin among all
    owners: Tensor  # [R]: the data-parallel rank that computes the row that is drawn from
    tokens: int  # of all data-parallel ranks, rounded up


def rows_bytes(
    hidden: int, max_tokens: int, max_outputs: int, dtype: torch.dtype, ranks: int, invariant: bool
) -> int:
    """What a rank must let the others of its stage read."""
    rows, wanted = (aligned(count * hidden * dtype.itemsize) for count in (max_tokens, max_outputs))
    return flags_bytes(ranks) + rows + wanted + aligned(partial_bytes(hidden, max_tokens, dtype, invariant))


class RankRows:
    def __init__(
        self,
        memory: PeerMemory,
        part: RankPart,
        max_tokens: int,
        max_outputs: int,
        dtype: torch.dtype,
        invariant: bool,
    ) -> None:
        """`memory`: of the stage's ranks. `invariant`: a sum's bits do not depend on how many rows there are."""
        self.memory, self._data_rank, self._slice = memory, part.place.dp, part.place.tp
        self._data_ranks, self._hidden = part.layout.dp, part.whole.hidden
        self._dtype, self._invariant = dtype, invariant
        self.spreads_experts, self.first_expert = part.layout.ep > 1, part.experts.start
        self._rows = memory.carve((max_tokens, self._hidden), dtype)
        self._wanted = memory.carve((max_outputs, self._hidden), dtype)
        size = partial_bytes(self._hidden, max_tokens, dtype, invariant)
        self._partial = memory.carve((size,), torch.uint8)
        self._all = torch.empty((max_tokens, self._hidden), dtype=dtype, device=self._rows.own.device)
        self._shown = self._rows.own[:0]  # of this step

    def own_rows(self, rows: int) -> Tensor:
        """Where this rank's hidden states go, as its experts' neighbours read them."""
        self._shown = self._rows.own[:rows]
        return self._shown

    def all_rows(self, split: StepSplit) -> Tensor:
        """Those of all ranks, whose owners have written them."""
        bring(self.memory, self._rows, self._shown)
        return gather_rows(self.memory, self._rows, split.starts, self._slice, self._all[: split.tokens])

    def partial(self, split: StepSplit) -> Tensor:
        """Where what this rank's experts add to all rows goes; zeros."""
        return self._own_partial(split).zero_()

    def _own_partial(self, split: StepSplit) -> Tensor:
        numbers = self._partial.own.view(self._dtype_of(split))
        return numbers[: split.tokens * self._hidden].view(split.tokens, self._hidden)

    def add_partials(self, split: StepSplit, stream: Tensor) -> None:
        """What all ranks' experts add to the rows that are here."""
        bring(self.memory, self._partial, self._own_partial(split))
        sum_rows(self.memory, self._partial, self._dtype_of(split), split.starts, self._data_rank, stream)

    def own_wanted(self, outputs: int) -> Tensor:
        return self._wanted.own[:outputs]

    def all_wanted(self, split: StepSplit, out: Tensor) -> Tensor:
        """For every draw, the hidden state that its owner has written."""
        bring(self.memory, self._wanted, self._wanted.own[: len(out)])
        return gather_owned(self.memory, self._wanted, split.owners, self._data_ranks, self._slice, out)

    def _dtype_of(self, split: StepSplit) -> torch.dtype:
        return partial_dtype(split.tokens, self._dtype, self._invariant)
