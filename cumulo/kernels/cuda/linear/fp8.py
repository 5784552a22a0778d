"""fp8: weights in e4m3 with a scale for each row, and the product with many rows. `linear` calls it.

Must move: one byte a weight, half of bfloat16. Up to some rows of x the weights are widened in registers and the
activations stay as they are (no quantisation, no error from it); beyond, activations are quantised a token at a
time and both go to the 8-bit tensor cores, twice the rate of bfloat16, in the vendor library's product.

`quantise` reads the activations once (2 bytes an element) and writes 1 byte an element; a program holds a whole
row, so that nothing is read twice. Scale = largest magnitude / 448, the largest e4m3 number.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.elementwise.swiglu import swiglu as swiglu_rows

LARGEST = 448.0
SMALLEST_SCALE = 1e-12  # a row of zeros has some scale


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [N, K] in e4m3, or activations [T, K], with scales [N] or [T]."""

    data: Tensor
    scales: Tensor

    @classmethod
    def quantised(cls, weight: Tensor, largest: Callable[[Tensor], Tensor] = lambda own: own) -> "Fp8Weight":
        """The nearest e4m3 matrix, with the smallest scales that hold every weight. `largest`: of a matrix that
        other ranks have more columns of, the whole rows' largest weights, of this one's."""
        wide = weight.float()
        scales = (largest(wide.abs().amax(1)) / LARGEST).clamp_min(SMALLEST_SCALE)
        return cls((wide / scales[:, None]).to(torch.float8_e4m3fn), scales)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.data.float() * self.scales[:, None]).to(dtype)


def reference(x: Tensor, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Fp8Weight:
    """What `quantise` computes, in plain torch, in float32."""
    wide = x.float()
    if norm_weight is not None:
        wide = F.rms_norm(wide, wide.shape[-1:], norm_weight.float(), eps)
    return Fp8Weight.quantised(wide)


@triton.jit
def _quantise_kernel(x, norm_weight, data, scales, columns, stride_x, eps, WIDTH: tl.constexpr,
                     NORM: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH)
    mask = offsets < columns
    values = tl.load(x + row * stride_x + offsets, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
        values = values * rstd * tl.load(norm_weight + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / 448.0, 1e-12)
    values = values / scale
    tl.store(scales + row, scale)
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    tl.store(data + row * columns + offsets, values.to(data.dtype.element_ty), mask=mask)


def quantise(x: Tensor, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Fp8Weight:
    """x [T, K] in e4m3; normed first where a norm is given."""
    tokens, columns = x.shape
    width = max(128, triton.next_power_of_2(columns))
    # Triton's interpreter loses the carry when a mantissa rounds up to the next power of two: torch rounds there.
    data = torch.empty(
        (tokens, columns), dtype=torch.float8_e4m3fn if x.is_cuda else torch.float32, device=x.device
    )
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        _quantise_kernel[(tokens,)](
            x, x if norm_weight is None else norm_weight, data, scales, columns, x.stride(0), eps, WIDTH=width,
            NORM=norm_weight is not None, num_warps=max(1, min(16, width // 1024)),
        )  # fmt: skip
    return Fp8Weight(data.to(torch.float8_e4m3fn), scales)


def _multiplied(x: Fp8Weight, weight: Fp8Weight, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """x·Wᵀ with both in e4m3."""
    if not x.data.is_cuda:  # the library's row-wise product exists on GPUs only
        y = (x.dequantised() @ weight.dequantised().t()).to(dtype)
        return y if out is None else out.copy_(y)
    scales = (x.scales[:, None], weight.scales[None, :])
    direct = out if out is not None and out.is_contiguous() and out.dtype == dtype else None
    y = torch._scaled_mm(x.data, weight.data.t(), *scales, out_dtype=dtype, use_fast_accum=True, out=direct)
    return y if out is None or direct is not None else out.copy_(y)


def fp8_linear_wide(
    x: Tensor,
    weight: Fp8Weight,
    out: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """The product for many rows: norm and quantisation in one kernel, the product, then what comes after it."""
    onto_out = out if not swiglu and residual is None else None
    y = _multiplied(quantise(x, norm_weight, eps), weight, x.dtype, onto_out)
    if bias is not None:
        y += bias
    if swiglu:
        y = swiglu_rows(y, out if residual is None else None)
    return y if residual is None else torch.add(residual, y, out=out)
