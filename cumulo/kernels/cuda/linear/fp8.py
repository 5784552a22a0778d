"""fp8: weights in e4m3 with a scale a row or a 128×128 block, and the product with many rows. `linear` calls it.

Must move: one byte a weight, half of bfloat16. Up to some rows of x the weights are widened in registers and the
activations stay as they are (no quantisation, no error from it); beyond, activations are quantised a token at a
time and both go to the 8-bit tensor cores, twice the rate of bfloat16. Scaling by row is the vendor library's,
scaling by block (DeepSeek-V3, 2024, section 3.3) ours, in `block_matmul`: a step of k is one scale block, whose
product is scaled and added to the sum in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.elementwise.swiglu import swiglu as swiglu_rows
from cumulo.kernels.cuda.linear.fp8_quantise import BLOCK, LARGEST, SMALLEST_SCALE, Fp8Rows, quantise


def block_reference(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """In float32: scale everything, then multiply."""
    k, n = x.shape[1], weight.shape[0]
    wide_x = x.float() * x_scales.repeat_interleave(BLOCK, 1)[:, :k]
    scales = weight_scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :k]
    return wide_x @ (weight.float() * scales).t()


@triton.jit
def _block_matmul_kernel(x, x_scales, weight, weight_scales, out, M, N, K, stride_x, stride_x_scales, stride_w,
                         stride_w_scales, stride_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         GROUP: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    # Programs that run together share rows of x and W: they go down GROUP row tiles before the next column tile.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    per_group = GROUP * tiles_n
    group = tl.program_id(0) // per_group
    first_m = group * GROUP
    height = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + (tl.program_id(0) % per_group) % height
    tile_n = (tl.program_id(0) % per_group) // height
    m_offsets = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n_offsets = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_safe, n_safe = tl.minimum(m_offsets, M - 1), tl.minimum(n_offsets, N - 1)
    columns = tl.arange(0, 128)
    x_rows = x + m_safe.to(tl.int64)[:, None] * stride_x + columns[None, :]
    w_rows = weight + n_safe.to(tl.int64)[:, None] * stride_w + columns[None, :]
    x_scale_rows = x_scales + m_safe * stride_x_scales
    w_scale_row = weight_scales + (tile_n * BLOCK_N // 128) * stride_w_scales
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Saying num_stages here, not at the launch alone, makes the scales travel ahead with the tiles.
    for block in tl.range(0, tl.cdiv(K, 128), num_stages=STAGES):
        if EVEN_K:
            a = tl.load(x_rows + block * 128)
            b = tl.load(w_rows + block * 128)
        else:
            inside = (block * 128 + columns < K)[None, :]
            a = tl.load(x_rows + block * 128, mask=inside, other=0.0)
            b = tl.load(w_rows + block * 128, mask=inside, other=0.0)
        scale = tl.load(x_scale_rows + block) * tl.load(w_scale_row + block)
        acc += tl.dot(a, tl.trans(b)) * scale[:, None]
    places = out + m_offsets.to(tl.int64)[:, None] * stride_out + n_offsets[None, :]
    mask = (m_offsets < M)[:, None] & (n_offsets < N)[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=mask)


def block_matmul(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_m: int = 0,
) -> Tensor:
    """x [M, K] with scales [M, ⌈K/128⌉] times weight [N, K] with scales [⌈N/128⌉, ⌈K/128⌉], transposed."""
    m, k = x.shape
    n = weight.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=dtype, device=x.device)
    block_m = block_m or (64 if m <= 64 else 128)
    if m:
        _block_matmul_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, BLOCK),)](
            x,
            x_scales,
            weight,
            weight_scales,
            out,
            m,
            n,
            k,
            x.stride(0),
            x_scales.stride(0),
            weight.stride(0),
            weight_scales.stride(0),
            out.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=BLOCK,
            GROUP=8,
            STAGES=4,
            EVEN_K=k % BLOCK == 0,
            num_warps=4 if block_m == 64 else 8,
            num_stages=4,
        )
    return out


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [N, K] in e4m3: scales [N], or [⌈N/128⌉, ⌈K/128⌉] where it is scaled in blocks."""

    data: Tensor
    scales: Tensor

    @classmethod
    def quantised(
        cls, weight: Tensor, in_blocks: bool = False, largest: Callable[[Tensor], Tensor] = lambda own: own
    ) -> "Fp8Weight":
        """The nearest e4m3 matrix, with the smallest scales that hold every weight. `largest`: of a matrix that
        other ranks have more columns of, the whole rows' largest weights, of this one's."""
        wide = weight.float()
        n, k = wide.shape
        if not in_blocks:
            scales = (largest(wide.abs().amax(1)) / LARGEST).clamp_min(SMALLEST_SCALE)
            return cls((wide / scales[:, None]).to(torch.float8_e4m3fn), scales)
        padded = F.pad(wide, (0, -k % BLOCK, 0, -n % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        scales = (blocks.abs().amax((1, 3)) / LARGEST).clamp_min(SMALLEST_SCALE)
        data = (blocks / scales[:, None, :, None]).view(padded.shape)[:n, :k]
        return cls(data.to(torch.float8_e4m3fn).contiguous(), scales)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def in_blocks(self) -> bool:
        return self.scales.dim() == 2

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        n, k = self.data.shape
        scales = self.scales[:, None]
        if self.in_blocks:
            scales = self.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :k]
        return (self.data.float() * scales).to(dtype)


def wide_matmul(x: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x·Wᵀ with both in e4m3, for many rows."""
    if weight.in_blocks:
        return block_matmul(x.data, x.scales, weight.data, weight.scales, out=out, dtype=dtype)
    if not x.data.is_cuda:  # the library's row-wise product exists on GPUs only
        y = (x.dequantised() @ weight.dequantised().t()).to(dtype)
        return y if out is None else out.copy_(y)
    scales = (x.scales[:, None], weight.scales[None, :])
    if out is not None and out.is_contiguous() and out.dtype == dtype:
        torch._scaled_mm(x.data, weight.data.t(), *scales, out_dtype=dtype, use_fast_accum=True, out=out)
        return out
    y = torch._scaled_mm(x.data, weight.data.t(), *scales, out_dtype=dtype, use_fast_accum=True)
    return y if out is None else out.copy_(y)


def fp8_linear_wide(
    x: Tensor | Fp8Rows,
    weight: Fp8Weight,
    out: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product for many rows: norm and quantisation in one kernel, the product, then what comes after it.

    x may come quantised already (by `quantise`, say with SwiGLU); `dtype` is then the result's.
    """
    if isinstance(x, Tensor):
        dtype = x.dtype
        x = quantise(x, in_blocks=weight.in_blocks, norm_weight=norm_weight, eps=eps)
    elif norm_weight is not None:
        raise ValueError("rows that are quantised already cannot be normed any more")
    onto_out = out if not swiglu and residual is None else None
    y = wide_matmul(x, weight, dtype, onto_out)
    if bias is not None:
        y += bias
    if swiglu:
        y = swiglu_rows(y, out if residual is None else None)
    if residual is None:
        return y
    return torch.add(residual, y, out=out)
