"""PeerMemory: memory of this rank that the other ranks read in place, and theirs. Made by `ranks/peer_memory.py`.

Every rank carves the same tensors in the same order, so a tensor lies at the same offset everywhere. A kernel gets
the table of its addresses, one a rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNED = 256
MAX_CHANNELS = 64  # a power of two; programs of one kernel that may wait for their twins on other ranks
# Where ranks share a GPU, programs that wait leave most of its multiprocessors to the rank that is waited for: a
# matrix product may need whole ones, and pairs of them.
SHARED_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class PeerTensor:
    own: Tensor
    addresses: Tensor  # [ranks] int64: where each rank has its own


class PeerMemory:
    def __init__(
        self, own: Tensor, addresses: Sequence[int], rank: int, keep: object, shares_device: bool = False
    ) -> None:
        """`own`: bytes, all zero; `addresses`: where this process sees each rank's, as long as it holds `keep`.
        `shares_device`: several ranks compute on one GPU."""
        self.rank, self.ranks, self._shares_device = rank, len(addresses), shares_device
        self.channels = SHARED_CHANNELS if shares_device else MAX_CHANNELS
        self.waits = True  # False: kernels do not wait for other ranks, and compute nonsense
        self._own, self._addresses, self._used, self._keep = own, addresses, 0, keep
        # Zero: nobody waits. A waiting program's twin sets its word, and the program clears it when it goes on.
        self.flags = self.carve((MAX_CHANNELS * self.ranks,), torch.int32)

    def among(self, members: Sequence[int], size: int) -> "PeerMemory":
        """The next bytes, for this rank and some others alone, in this order. All ranks carve as many, with
        whomever they share them."""
        begin = self._take(size)
        addresses = [self._addresses[member] + begin for member in members]
        own, rank = self._own[begin : begin + size], members.index(self.rank)
        return PeerMemory(own, addresses, rank, self._keep, self._shares_device)

    def carve(self, shape: Sequence[int], dtype: torch.dtype) -> PeerTensor:
        """The next tensor; its contents are undefined."""
        size = math.prod(shape) * dtype.itemsize
        begin = self._take(size)
        table = torch.tensor([base + begin for base in self._addresses], dtype=torch.int64)
        return PeerTensor(
            self._own[begin : begin + size].view(dtype).view(tuple(shape)), table.to(self._own.device)
        )

    def _take(self, size: int) -> int:
        begin = self._used
        if begin + size > len(self._own):
            raise ValueError(
                f"{begin + size} bytes were carved from {len(self._own)} that ranks share: a bug in their sizing"
            )
        self._used += aligned(size)
        return begin


def aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def flags_bytes(ranks: int) -> int:
    return aligned(4 * MAX_CHANNELS * ranks)
