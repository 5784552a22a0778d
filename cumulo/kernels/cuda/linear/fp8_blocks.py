"""A matrix in 8 bits, as it lies and transposed, with a scale for every 128 numbers that are summed together.

What `fp8_pair` makes, but an outlier costs only its own block bits, so e4m3 does for gradients, too (DeepSeek-V3,
2024, section 3.3.2; there weights share a scale among 128 × 128). Must move: the matrix once and two bytes an
element out, for a tile of 128 × 128 has all that its scales depend on. Both sizes divide by 128.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.linear.fp8_pair import E4M3, SMALLEST_SCALE, Fp8Pair

BLOCK = 128


def reference(x: Tensor) -> Fp8Pair:
    return Fp8Pair(*_rounded(x), *_rounded(x.t()))


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, N] in 8 bits, and its scales [M, N / 128], which lie block by block."""
    largest = torch.finfo(E4M3).max
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1) / largest).clamp_min(SMALLEST_SCALE)
    data = (blocks / scale[..., None]).clamp(-largest, largest).flatten(1).to(E4M3)
    return data, scale.t().contiguous().t()


@triton.jit
def _cast(x, data, scale, transposed, transposed_scale, rows, columns, LARGEST: tl.constexpr,
          SMALLEST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(x + place).to(tl.float32)
    by_row = tl.maximum(tl.max(tl.abs(value), 1) / LARGEST, SMALLEST)
    tl.store(scale + tl.program_id(0).to(tl.int64) * rows + row, by_row)
    small = value * (1.0 / by_row)[:, None]
    tl.store(data + place, tl.minimum(tl.maximum(small, -LARGEST), LARGEST).to(data.dtype.element_ty))
    by_column = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, SMALLEST)
    tl.store(transposed_scale + tl.program_id(1).to(tl.int64) * columns + column, by_column)
    small = value * (1.0 / by_column)[None, :]
    small = tl.minimum(tl.maximum(small, -LARGEST), LARGEST).to(data.dtype.element_ty)
    place = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(transposed + place, tl.trans(small))


def fp8_blocks(x: Tensor) -> Fp8Pair:
    """x [M, N] contiguous, on a GPU of 16 bits (see `fp8_pair`)."""
    rows, columns = x.shape
    if x.is_cuda and x.dtype.itemsize != 2:
        raise ValueError(f"8-bit blocks are made from 16-bit matrices, not from {x.dtype}")
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"blocks of {BLOCK} do not divide a matrix of {rows} x {columns}")
    # Triton's interpreter loses the carry when a mantissa rounds up to the next power of two: torch rounds there.
    stored = E4M3 if x.is_cuda else torch.float32
    data = torch.empty((rows, columns), dtype=stored, device=x.device)
    transposed = torch.empty((columns, rows), dtype=stored, device=x.device)
    scale = torch.empty((columns // BLOCK, rows), dtype=torch.float32, device=x.device)
    transposed_scale = torch.empty((rows // BLOCK, columns), dtype=torch.float32, device=x.device)
    _cast[(columns // BLOCK, rows // BLOCK)](
        x, data, scale, transposed, transposed_scale, rows, columns, LARGEST=torch.finfo(E4M3).max,
        SMALLEST=SMALLEST_SCALE, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return Fp8Pair(data.to(E4M3), scale.t(), transposed.to(E4M3), transposed_scale.t())


def product(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """left [M, K] · rightᵀ [N, K], each block of 128 along K by its scales."""
    if not left.is_cuda:
        return (dequantised(left, left_scale) @ dequantised(right, right_scale).t()).to(dtype)
    kind = F.ScalingType.BlockWise1x128
    return F.scaled_mm(left, right.t(), left_scale, kind, right_scale, kind, output_dtype=dtype)


def dequantised(data: Tensor, scale: Tensor) -> Tensor:
    return data.float() * scale.repeat_interleave(BLOCK, 1)
