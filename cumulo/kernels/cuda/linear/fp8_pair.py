"""A matrix in 8 bits, as it lies and transposed, with one scale for all of it: what training's products take.

Hopper's 8-bit products want both sides with the summed dimension last, and training sums over each of a matrix's
two dimensions once: over its columns in one product, over its rows in another. Must move: the matrix twice (once
for its largest magnitude, which no element can be scaled without) and two bytes an element out.

Weights and activations are e4m3, gradients e5m2, which gives up a bit for range (Micikevicius et al. 2022).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_SCALE = 1e-12  # a matrix of zeros has some scale
_MAX_BLOCK, _MAX_PROGRAMS = 4096, 2048
_ROWS, _COLUMNS = 128, 64


class Fp8Pair(NamedTuple):
    """A matrix [M, N] in 8 bits twice, with what each is to be multiplied by (float32)."""

    data: Tensor
    scale: Tensor
    transposed: Tensor  # [N, M], in memory of its own
    transposed_scale: Tensor


def reference(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8Pair:
    largest = torch.finfo(dtype).max
    scale = (x.abs().max().float() / largest).clamp_min(SMALLEST_SCALE)
    data = (x.float() / scale).clamp(-largest, largest).to(dtype)
    return Fp8Pair(data, scale, data.t().contiguous(), scale)


@triton.jit
def _largest(x, top, size, BLOCK: tl.constexpr):
    found = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(x + index, mask=index < size, other=0.0).to(tl.float32)
        found = tl.maximum(found, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    # Floats of one sign are ordered as their bits are, and a maximum does not depend on who comes first.
    tl.atomic_max(top, tl.max(found, 0).to(tl.int32, bitcast=True))


@triton.jit
def _cast(x, top, data, transposed, scale, rows, columns, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    factor = tl.maximum(tl.load(top).to(tl.float32, bitcast=True) / LARGEST, SMALLEST)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * (1.0 / factor)
    small = tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(data.dtype.element_ty)
    tl.store(data + place, small, mask=inside)
    place = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(transposed + place, tl.trans(small), mask=tl.trans(inside))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, factor)


def fp8_pair(x: Tensor, dtype: torch.dtype = E4M3) -> Fp8Pair:
    """x [M, N] contiguous, on a GPU of 16 bits: from wider ones Triton 3.6 stores a wrong transpose."""
    rows, columns = x.shape
    if x.is_cuda and x.dtype.itemsize != 2:
        raise ValueError(f"8-bit pairs are made from 16-bit matrices, not from {x.dtype}")
    top = torch.zeros((), dtype=torch.int32, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    # Triton's interpreter loses the carry when a mantissa rounds up to the next power of two: torch rounds there.
    stored = dtype if x.is_cuda else torch.float32
    data = torch.empty((rows, columns), dtype=stored, device=x.device)
    transposed = torch.empty((columns, rows), dtype=stored, device=x.device)
    _largest[(min(_MAX_PROGRAMS, triton.cdiv(x.numel(), _MAX_BLOCK)),)](
        x, top, x.numel(), BLOCK=_MAX_BLOCK, num_warps=8
    )
    _cast[(triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS))](
        x, top, data, transposed, scale, rows, columns, LARGEST=torch.finfo(dtype).max, SMALLEST=SMALLEST_SCALE,
        BLOCK_M=_ROWS, BLOCK_N=_COLUMNS, num_warps=8,
    )  # fmt: skip
    return Fp8Pair(data.to(dtype), scale, transposed.to(dtype), scale)


def product(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """left [M, K] · rightᵀ [N, K]. `fast`: sums keep fewer bits on the way, which forward can bear."""
    return torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=dtype, use_fast_accum=fast)
