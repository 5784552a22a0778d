"""fp8: weights in e4m3 with a scale a row or a 128×128 block, and the product with them. `linear` calls `fp8_linear`.

Must move: one byte a weight, half of bfloat16. Up to some rows of x the weights are widened in registers and the
activations stay as they are (no quantisation, no error from it); beyond, activations are quantised a token at a
time and both go to the 8-bit tensor cores, twice the rate of bfloat16. Scaling by row is the vendor library's,
scaling by block (DeepSeek-V3, 2024, section 3.3) ours, in `fp8_block_matmul`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.kernels.cuda.fp8_block_matmul import block_matmul
from cumulo.kernels.cuda.fp8_quantise import BLOCK, LARGEST, SMALLEST_SCALE, Fp8Rows, quantise
from cumulo.kernels.cuda.swiglu import swiglu as swiglu_rows


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [N, K] in e4m3: scales [N], or [⌈N/128⌉, ⌈K/128⌉] where it is scaled in blocks."""

    data: Tensor
    scales: Tensor

    @classmethod
    def quantised(cls, weight: Tensor, in_blocks: bool = False) -> "Fp8Weight":
        """The nearest e4m3 matrix, with the smallest scales that hold every weight."""
        wide = weight.float()
        n, k = wide.shape
        if not in_blocks:
            scales = (wide.abs().amax(1) / LARGEST).clamp_min(SMALLEST_SCALE)
            return cls((wide / scales[:, None]).to(torch.float8_e4m3fn), scales)
        padded = torch.nn.functional.pad(wide, (0, -k % BLOCK, 0, -n % BLOCK))
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
    if out is not None and out.is_contiguous():
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
