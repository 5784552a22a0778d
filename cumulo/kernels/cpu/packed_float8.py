"""PackedFloat8: a matrix in 8-bit floating point (e4m3) with scales, and y = x Wᵀ with it. Used by decoders.

Must move: one byte a weight and four a scale, once per call; and compute rows * columns multiply-adds per token, in
float32: activations are not rounded, whatever the file says about them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_ROWS_AT_ONCE = 1 << 22  # weights that the torch form expands at once


class PackedFloat8:
    """[rows, columns]; a row has a scale for every `block` columns."""

    def __init__(self, codes: Tensor, scale: Tensor, block: int) -> None:
        self.codes, self.scale, self.block = codes, scale, block
        self.shape = (codes.shape[0], codes.shape[1])

    @classmethod
    def stacked(cls, parts: Sequence[tuple[Tensor, Tensor, int]]) -> "PackedFloat8":
        """From codes, scales [rows, columns / block] and the block's columns of each part."""
        columns = parts[0][0].shape[1]
        block = min(block for _, _, block in parts)
        scales = [
            scale if own == block else scale.expand(-1, -(-columns // block)) for _, scale, own in parts
        ]
        return cls(torch.cat([codes for codes, _, _ in parts]), torch.cat(scales).contiguous(), block)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        """x [tokens, columns] -> [tokens, rows], in x's dtype."""
        out = x.new_empty((len(x), self.shape[0]))
        step = max(1, _ROWS_AT_ONCE // self.shape[1])
        for first in range(0, self.shape[0], step):
            chosen = slice(first, first + step)
            out[:, chosen] = x @ self._expanded(chosen).to(x.dtype).T
        return out

    def rows(self, indices: Tensor) -> Tensor:
        return self._expanded(indices)

    def _expanded(self, rows: Tensor | slice) -> Tensor:
        scale = self.scale[rows].repeat_interleave(self.block, 1)[:, : self.shape[1]]
        return self.codes[rows].float() * scale
