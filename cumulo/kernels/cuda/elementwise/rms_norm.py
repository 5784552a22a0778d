"""RMSNorm, alone or with the residual added first: one kernel per decoder half-layer at larger batches, and in
training.

Must move: x in and out once; with a residual also that, read and written. Forward and backward sum in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.early import EARLY_ROWS, early, wait_for_kernel_ahead

_BACKWARD_PROGRAMS = 1024  # about: each sums the weight's gradient over its rows, in a fixed order


def reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The norm of x, or of x + residual."""
    if residual is not None:
        x = x + residual
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


@triton.jit
def _forward(x, weight, out, residual, rows_of, x_stride, size, eps, ADD: tl.constexpr, PICK: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    source = row.to(tl.int64)
    if PICK:  # only some rows are wanted, in the order given
        source = tl.load(rows_of + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    h = tl.load(x + source * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(residual + source * size + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(residual.dtype.element_ty)
        if not PICK:
            tl.store(residual + source * size + columns, rounded, mask=inside)
        h = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 0) / size + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * size + columns, (h * scale * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Norm of x [T, H] (rows may be strided); a contiguous `residual` is added first and keeps the sum. With
    `rows` only those rows are normed, gathered, and the residual is left as it is."""
    size = x.shape[-1]
    count = x.shape[0] if rows is None else rows.shape[0]
    if out is None:
        out = torch.empty((count, size), dtype=x.dtype, device=x.device)
    if count == 0:
        return out
    block = triton.next_power_of_2(size)
    _forward[(count,)](
        x, weight, out, x if residual is None else residual, x if rows is None else rows, x.stride(0), size, eps,
        ADD=residual is not None, PICK=rows is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


# -- for training ---------------------------------------------------------------------------------------------
@triton.jit
def _backward(x, weight, grad_out, grad_x, grad_weight, added, normed, rows, size, eps, ADD: tl.constexpr,
              NORMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(ROWS):
        row = (program * ROWS + index).to(tl.int64)
        live = inside & (columns * 0 + row < rows)  # the row's test as wide as the columns'
        h = tl.load(x + row * size + columns, mask=live, other=0.0).to(tl.float32)
        g = tl.load(grad_out + row * size + columns, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(h * h, 0) / size + eps)
        unit = h * scale
        weighted = g * w
        # d/dx of x/rms(x): what is parallel to x is removed (Zhang & Sennrich 2019, section 3).
        dx = scale * (weighted - unit * (tl.sum(weighted * unit, 0) / size))
        if ADD:
            dx += tl.load(added + row * size + columns, mask=live, other=0.0).to(tl.float32)
        tl.store(grad_x + row * size + columns, dx.to(grad_x.dtype.element_ty), mask=live)
        if NORMED:
            tl.store(normed + row * size + columns, (unit * w).to(normed.dtype.element_ty), mask=live)
        total += g * unit
    tl.store(grad_weight + program * size + columns, total, mask=inside)


def backward(
    x: Tensor,
    weight: Tensor,
    grad_out: Tensor,
    eps: float,
    added: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; the weight's is summed in a fixed order, so runs are bit-equal.

    `added` joins the gradient of x (what came past the norm, over a residual); `normed` is filled with forward's
    result, for those who did not keep it."""
    x, grad_out = x.contiguous(), grad_out.contiguous()
    rows, size = x.shape
    each = min(64, max(4, triton.next_power_of_2(triton.cdiv(rows, _BACKWARD_PROGRAMS)))) if rows else 0
    programs = max(1, triton.cdiv(rows, each)) if rows else 1
    grad_x = torch.empty_like(x)
    partial = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _backward[(programs,)](
        x, weight, grad_out, grad_x, partial, x if added is None else added.contiguous(),
        x if normed is None else normed, rows, size, eps, ADD=added is not None, NORMED=normed is not None,
        ROWS=each, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype)


@triton.jit
def _norm_pair(embed, ids, stream, token_gains, stream_gains, out, stride_embed, stride_stream, size, eps,
               BLOCK: tl.constexpr, EARLY: tl.constexpr = 0):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < size
    of_token = tl.load(token_gains + column, mask=inside, other=0.0).to(tl.float32)
    of_stream = tl.load(stream_gains + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_kernel_ahead(EARLY)
    x = tl.load(stream + row * stride_stream + column, mask=inside, other=0.0).to(tl.float32)
    token = tl.load(ids + row).to(tl.int64)
    e = tl.load(embed + token * stride_embed + column, mask=inside, other=0.0).to(tl.float32)
    e = e * tl.rsqrt(tl.sum(e * e, 0) / size + eps) * of_token
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * of_stream
    target = out + row * 2 * size + column
    tl.store(target, e.to(out.dtype.element_ty), mask=inside)
    tl.store(target + size, x.to(out.dtype.element_ty), mask=inside)


def norm_pair(
    embed: Tensor,
    ids: Tensor,
    stream: Tensor,
    token_norm: Tensor,
    stream_norm: Tensor,
    eps: float,
    out: Tensor,
) -> Tensor:
    """Into out [T, 2 H]: tokens' embeddings and the stream [T, H] side by side, each normed by itself, as a draft
    head reads them."""
    rows, size = stream.shape
    block = triton.next_power_of_2(size)
    _norm_pair[(rows,)](
        embed, ids, stream, token_norm, stream_norm, out, embed.stride(0), stream.stride(0), size, eps, BLOCK=block,
        num_warps=_warps(block), **early(rows <= EARLY_ROWS, stream),
    )  # fmt: skip
    return out
