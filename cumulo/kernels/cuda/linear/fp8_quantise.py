"""fp8_quantise: activations to e4m3, one scale a token or one a 1×128 block, on its own or as the end of RMSNorm or
SwiGLU. `fp8` calls it before a product of two 8-bit matrices.

Must move: the input once (2 bytes an element, twice as many elements for SwiGLU) and 1 byte an element out; a
program holds a whole row, so that nothing is read twice. Scale = largest magnitude / 448, the largest e4m3 number.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0
SMALLEST_SCALE = 1e-12  # a row of zeros has some scale
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations in e4m3: data [T, K], scales [T] or, in blocks of 128 columns, [T, K/128]."""

    data: Tensor
    scales: Tensor

    @property
    def in_blocks(self) -> bool:
        return self.scales.dim() == 2

    def dequantised(self) -> Tensor:
        scales = self.scales.repeat_interleave(BLOCK, dim=1) if self.in_blocks else self.scales[:, None]
        return self.data.float() * scales[:, : self.data.shape[1]]


def reference(
    x: Tensor,
    in_blocks: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    swiglu: bool = False,
) -> Fp8Rows:
    """What it computes, in plain torch, in float32."""
    wide = x.float()
    if norm_weight is not None:
        wide = F.rms_norm(wide, wide.shape[-1:], norm_weight.float(), eps)
    if swiglu:
        gate, up = wide.chunk(2, dim=-1)
        wide = F.silu(gate) * up
    tokens, columns = wide.shape
    if in_blocks:
        padded = F.pad(wide, (0, -columns % BLOCK)).view(tokens, -1, BLOCK)
        scales = (padded.abs().amax(-1) / LARGEST).clamp_min(SMALLEST_SCALE)
        data = (padded / scales[..., None]).view(tokens, -1)[:, :columns]
    else:
        scales = (wide.abs().amax(-1) / LARGEST).clamp_min(SMALLEST_SCALE)
        data = wide / scales[:, None]
    return Fp8Rows(data.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)


@triton.jit
def _quantise_kernel(x, norm_weight, data, scales, columns, stride_x, stride_scales, eps, WIDTH: tl.constexpr,
                     NORM: tl.constexpr, SWIGLU: tl.constexpr, IN_BLOCKS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH)
    mask = offsets < columns
    values = tl.load(x + row * stride_x + offsets, mask=mask, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(x + row * stride_x + columns + offsets, mask=mask, other=0.0).to(tl.float32)
        values = values * tl.sigmoid(values) * up
    if NORM:
        rstd = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
        values = values * rstd * tl.load(norm_weight + offsets, mask=mask, other=0.0).to(tl.float32)
    if IN_BLOCKS:
        blocks = tl.reshape(values, (WIDTH // 128, 128))
        scale = tl.maximum(tl.max(tl.abs(blocks), axis=1) / 448.0, 1e-12)
        values = tl.reshape(blocks / scale[:, None], (WIDTH,))
        block_offsets = tl.arange(0, WIDTH // 128)
        tl.store(scales + row * stride_scales + block_offsets, scale, mask=block_offsets * 128 < columns)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), axis=0) / 448.0, 1e-12)
        values = values / scale
        tl.store(scales + row, scale)
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    tl.store(data + row * columns + offsets, values.to(data.dtype.element_ty), mask=mask)


def quantise(
    x: Tensor,
    out: Fp8Rows | None = None,
    *,
    in_blocks: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    swiglu: bool = False,
) -> Fp8Rows:
    """x [T, K], or gate and up side by side [T, 2K] with `swiglu`, in e4m3; normed first where a norm is given."""
    tokens, columns = x.shape[0], x.shape[1] // (2 if swiglu else 1)
    if out is None:
        shape = (tokens, triton.cdiv(columns, BLOCK)) if in_blocks else (tokens,)
        out = Fp8Rows(
            torch.empty((tokens, columns), dtype=torch.float8_e4m3fn, device=x.device),
            torch.empty(shape, dtype=torch.float32, device=x.device),
        )
    width = max(BLOCK, triton.next_power_of_2(columns))
    # Triton's interpreter loses the carry when a mantissa rounds up to the next power of two: torch rounds there.
    data = out.data if x.is_cuda else torch.empty_like(out.data, dtype=torch.float32)
    if tokens:
        _quantise_kernel[(tokens,)](
            x,
            x if norm_weight is None else norm_weight,
            data,
            out.scales,
            columns,
            x.stride(0),
            out.scales.stride(0),
            eps,
            WIDTH=width,
            NORM=norm_weight is not None,
            SWIGLU=swiglu,
            IN_BLOCKS=in_blocks,
            num_warps=max(1, min(16, width // 1024)),
        )
    if data is not out.data:
        out.data.copy_(data)
    return out
