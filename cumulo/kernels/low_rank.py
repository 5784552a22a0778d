"""The grouped low-rank product: rows of one batch, each with its own adapter, y += B (A x) by groups of equal
adapters (Punica, Chen et al. 2023; S-LoRA, Sheng et al. 2023). Its data, and the reference in torch's operators.

Rows are grouped once per step, not per matrix. The weights of all adapters of a matrix lie in two tensors, padded
to the greatest rank, so that one kernel finds every adapter by its slot; a kernel for a GPU takes the same tensors.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_ROWS = 32  # of a group: a longer run of one adapter's rows is several groups, which threads share


@dataclass(frozen=True, slots=True)
class AdapterGroups:
    """Rows of a product by adapter. Group g are the rows `rows[starts[g] : starts[g + 1]]`, of slot `slots[g]`."""

    of_row: Tensor  # [T] int32: the slot of every row's adapter, -1 for none
    rows: Tensor  # [N] int32: the rows that have one, sorted by slot
    starts: Tensor  # [G + 1] int32
    slots: Tensor  # [G] int32
    bounds: tuple[tuple[int, int, int], ...]  # the same groups for the host, unsplit: start, end, slot


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of one step: its tokens, and its rows whose hidden states are wanted."""

    tokens: AdapterGroups
    outputs: AdapterGroups


@dataclass(frozen=True, slots=True)
class LowRankStack:
    """What all adapters add to one matrix [outputs, inputs] whose rows have P sections (q, k and v; gate and
    up)."""

    a: Tensor  # [slots, P * rank_max, inputs]: section p's are rows [p * rank_max, p * rank_max + its rank)
    b: Tensor  # [slots, outputs, rank_max], scaled; on a CPU a transposed view of [slots, rank_max, outputs]
    ranks: Tensor  # [slots, P] int32 in host memory: 0 where an adapter leaves a section as it is
    bounds: tuple[int, ...]  # P + 1: where sections of the outputs begin and end
    device_ranks: Tensor  # `ranks` where a and b are, for a device's kernel

    @property
    def rank_max(self) -> int:
        return self.b.shape[2]


def group_rows(of_row: NDArray[np.int32], device: torch.device | str = "cpu") -> AdapterGroups:
    """Groups of a step's rows, from the slot of each."""
    order = np.argsort(of_row, kind="stable")
    order = order[np.searchsorted(of_row[order], 0) :]
    own = of_row[order]
    ends = np.flatnonzero(np.diff(own)) + 1
    begins = np.concatenate(([0], ends)).astype(np.int64)
    lengths = np.diff(np.concatenate((begins, [len(own)])))
    pieces = -(-lengths // MOST_ROWS)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(begins, pieces) + within * MOST_ROWS
    bounds = zip(
        begins.tolist(), (begins + lengths).tolist(), own[begins].tolist() if len(own) else (), strict=False
    )

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)

    return AdapterGroups(
        tensor(of_row),
        tensor(order),
        tensor(np.append(starts, len(own))),
        tensor(own[starts] if len(own) else own),
        tuple(bounds),
    )


def add_low_rank(x: Tensor, y: Tensor, stack: LowRankStack, groups: AdapterGroups) -> Tensor:
    """y [T, outputs] plus what each row's adapter makes of x [T, inputs]; in place."""
    ranks, rank_max = stack.ranks.tolist(), stack.rank_max
    for start, end, slot in groups.bounds:
        if not any(ranks[slot]):
            continue
        rows = groups.rows[start:end]
        own = x.index_select(0, rows)
        for section, rank in enumerate(ranks[slot]):
            if rank:
                first, last = stack.bounds[section : section + 2]
                a = stack.a[slot, section * rank_max : section * rank_max + rank]
                added = own @ a.T @ stack.b[slot, first:last, :rank].T
                y[:, first:last].index_add_(0, rows, added)
    return y
