"""PackedFloat8: a matrix in 8-bit floating point (e4m3) with scales, and y = x Wᵀ with it. Used by decoders.

Must move: one byte a weight and four a scale, once per call; and compute rows * columns multiply-adds per token, in
float32: activations are not rounded, whatever the file says about them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cpu.library import (
    FLOAT8_LINEAR,
    FLOAT_LINEAR,
    NativeLibrary,
    OpStruct,
    StepStruct,
    native,
)


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, columns] and weight [rows, columns], float32 -> [tokens, rows]."""
    library = native()
    rows, columns = weight.shape
    tensors = [x, weight] if bias is None else [x, weight, bias]
    suits = library is not None and columns % library.lanes == 0
    if not suits or any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
        return F.linear(x, weight, bias)
    assert library is not None
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty((len(x), rows), dtype=torch.float32)
    if len(x) == 0:
        return out
    op = OpStruct(
        kind=FLOAT_LINEAR,
        columns=columns,
        out_columns=rows,
        x=x.data_ptr(),
        out=out.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
    )
    threads = 1 if len(x) * rows * columns < SMALL_WORK else None
    library.play([op], StepStruct(tokens=len(x)), threads)
    return out


RUN = 16  # columns that the kernel expands together
SMALL_WORK = 50_000  # multiply-adds below which a second thread costs more than it brings
_WEIGHTS_AT_ONCE = 1 << 22  # that the torch form expands


class PackedFloat8:
    """[rows, columns]; a row has a scale for every `block` columns."""

    def __init__(
        self, codes: Tensor, scale: Tensor, block: int, library: NativeLibrary | str | None = "auto"
    ) -> None:
        """`library=None`: the torch reference, which is also what a machine without compiler gets."""
        self.codes, self.scale, self.block = codes.contiguous(), scale.contiguous(), block
        self.shape = (codes.shape[0], codes.shape[1])
        chosen = native() if library == "auto" else library
        assert not isinstance(chosen, str)
        if self.shape[1] % RUN or block % RUN:
            chosen = None
        self.library = chosen

    @classmethod
    def stacked(cls, parts: Sequence[tuple[Tensor, Tensor, int]]) -> "PackedFloat8":
        """From codes, scales [rows, columns / block] and the block's columns of each part."""
        columns = parts[0][0].shape[1]
        block = min(block for _, _, block in parts)
        scales = [
            scale if own == block else scale.expand(-1, -(-columns // block)) for _, scale, own in parts
        ]
        return cls(torch.cat([codes for codes, _, _ in parts]), torch.cat(scales), block)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        """x [tokens, columns] -> [tokens, rows], in x's dtype. A token's result does not depend on the others."""
        if self.library is None or x.dtype != torch.float32:
            return self._matmul_reference(x)
        x = x.contiguous()
        out = torch.empty((len(x), self.shape[0]), dtype=torch.float32)
        if len(x) == 0:
            return out
        op = OpStruct(
            kind=FLOAT8_LINEAR,
            columns=self.shape[1],
            out_columns=self.shape[0],
            x=x.data_ptr(),
            out=out.data_ptr(),
            weight=self.codes.data_ptr(),
            scales=self.scale.data_ptr(),
            scale_columns=self.block,
        )
        small = len(x) * self.shape[0] * self.shape[1] < SMALL_WORK
        self.library.play([op], StepStruct(tokens=len(x)), 1 if small else None)
        return out

    def _matmul_reference(self, x: Tensor) -> Tensor:
        out = x.new_empty((len(x), self.shape[0]))
        step = max(1, _WEIGHTS_AT_ONCE // self.shape[1])
        for first in range(0, self.shape[0], step):
            chosen = slice(first, first + step)
            out[:, chosen] = x @ self._expanded(chosen).to(x.dtype).T
        return out

    def rows(self, indices: Tensor) -> Tensor:
        return self._expanded(indices)

    def _expanded(self, rows: Tensor | slice) -> Tensor:
        scale = self.scale[rows].repeat_interleave(self.block, 1)[:, : self.shape[1]]
        return self.codes[rows].float() * scale
