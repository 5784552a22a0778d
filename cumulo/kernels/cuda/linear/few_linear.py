"""few_linear: y = x·Wᵀ for one to eight rows of x and matrices of a few MiB, as when a small model decodes or
verifies drafts. `linear` calls it.

Must move the weights once, 2·N·K bytes, which for a small matrix takes less than a microsecond: what counts is how
soon every load is on its way, and how few exchanges between threads follow the last of them. So a program takes a
few rows of W over all of k, or a long part of it, at once; plain multiply-adds keep sums in each thread; all rows
of x and of W share one reduction at the end. More rows of x cost registers and arithmetic, no loads of W. (Tensor
cores, each warp with a slice of k, were slower up to 4 rows and no faster at 8.)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.linear.small_linear import reference, work

MAX_ROWS = 8
_EACH = 8  # neighbouring columns of one thread, 16 bytes

__all__ = ["FewConfig", "candidates", "default_config", "few_linear", "reference", "work"]


@dataclass(frozen=True, slots=True)
class FewConfig:
    """Rows of W and columns of k that a program takes at once, and its warps, which share the columns."""

    rows: int
    block_k: int
    num_warps: int


def candidates(m: int, n: int, k: int, swiglu: bool = False) -> list[FewConfig]:
    """What `tune` tries: all of k at once, or parts of it."""
    whole = max(256, triton.next_power_of_2(k))
    found = [default_config(m, n, k, swiglu)]
    for block_k in (whole, max(256, whole // 4)):
        for warps in (1, 2, 4, 8):
            for rows in (1, 2, 4):
                # In registers, of each column; warps have columns of their own, or they would exchange rows.
                values = rows * (2 if swiglu else 1) + triton.next_power_of_2(m)
                if 256 * warps <= block_k and values * block_k <= 160 * 32 * warps:
                    found.append(FewConfig(rows, block_k, warps))
    return list(dict.fromkeys(found))


def default_config(m: int, n: int, k: int, swiglu: bool = False) -> FewConfig:
    """Short rows of W: one warp or two, whose few registers leave room for many programs. Long ones: more warps, as
    k is what there is to share."""
    if k <= 1024 and (swiglu or n > 2048):
        return FewConfig((1 if n <= 4096 else 2) if swiglu else (2 if m <= 2 else 4), 256, 1)
    if k <= 1024:
        whole = max(256, triton.next_power_of_2(k))
        return FewConfig(1, whole, 1) if n <= 1024 else FewConfig(2, whole, min(2, whole // 256))
    if k <= 2048:
        if m > 2 and n > 2560:
            return FewConfig(4, 512, 2)
        return FewConfig(2 if n <= 768 else 4, 2048, 8 if n <= 768 or (m <= 2 and n <= 1024) else 4)
    return FewConfig(4, 1024, 4)


@triton.jit
def _columns(pointers, column, K: tl.constexpr, MASKED: tl.constexpr, STREAMED: tl.constexpr):
    if MASKED:
        if STREAMED:
            tile = tl.load(pointers + column, mask=column < K, other=0.0, eviction_policy="evict_first")
        else:
            tile = tl.load(pointers + column, mask=column < K, other=0.0)
    else:
        if STREAMED:
            tile = tl.load(pointers + column, eviction_policy="evict_first")
        else:
            tile = tl.load(pointers + column)
    return tile


@triton.jit
def _of_threads(products, A: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr):
    """Sums over the columns that one thread has side by side: no exchange."""
    return tl.sum(tl.reshape(products, (A, B, COLUMNS // EACH, EACH)), 3)


@triton.jit
def _few_linear_kernel(x, weight, out, norm_weight, residual, bias, rows_of, OUTPUTS, stride_x, stride_weight,
                       stride_out, stride_residual, eps, M: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
                       ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EACH: tl.constexpr, NORM: tl.constexpr,
                       SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
                       PICK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    row_mask = row < OUTPUTS
    safe = tl.minimum(row, OUTPUTS - 1).to(tl.int64)  # rows past the end are read again and not stored
    line = tl.arange(0, BLOCK_M)
    lines = tl.minimum(line, M - 1)
    if PICK:
        lines = tl.load(rows_of + lines)
    column = tl.arange(0, BLOCK_K)[None, None, :]
    gate_rows = weight + safe[:, None, None] * stride_weight
    up_rows = weight + (safe + OUTPUTS)[:, None, None] * stride_weight
    x_rows = x + lines[None, :, None] * stride_x
    acc = tl.zeros([ROWS, BLOCK_M, BLOCK_K // EACH], tl.float32)
    up = acc
    squares = tl.zeros([1, BLOCK_M, BLOCK_K // EACH], tl.float32)
    next_w = _columns(gate_rows, column, K, BLOCK_K > K, True)
    next_u = next_w
    if SWIGLU:
        next_u = _columns(up_rows, column, K, BLOCK_K > K, True)
    for k in tl.static_range(0, K, BLOCK_K):
        w, u = next_w, next_u
        if k + BLOCK_K < K:
            next_w = _columns(gate_rows, k + BLOCK_K + column, K, k + 2 * BLOCK_K > K, True)
            if SWIGLU:
                next_u = _columns(up_rows, k + BLOCK_K + column, K, k + 2 * BLOCK_K > K, True)
        values = _columns(x_rows, k + column, K, k + BLOCK_K > K, False).to(tl.float32)
        if NORM:
            squares += _of_threads(values * values, 1, BLOCK_M, BLOCK_K, EACH)
            values *= _columns(norm_weight, k + column, K, k + BLOCK_K > K, False).to(tl.float32)
        acc += _of_threads(w.to(tl.float32) * values, ROWS, BLOCK_M, BLOCK_K, EACH)
        if SWIGLU:
            up += _of_threads(u.to(tl.float32) * values, ROWS, BLOCK_M, BLOCK_K, EACH)
    y = tl.sum(acc, 2)
    if NORM:
        rstd = tl.rsqrt(tl.sum(squares, 2) / K + eps)
        y *= rstd
    if BIAS:
        y += tl.load(bias + safe).to(tl.float32)[:, None]
    if SWIGLU:
        z = tl.sum(up, 2)
        if NORM:
            z *= rstd
        if BIAS:
            z += tl.load(bias + OUTPUTS + safe).to(tl.float32)[:, None]
        y = y * tl.sigmoid(y) * z
    mask = row_mask[:, None] & (line < M)[None, :]
    if RESIDUAL:
        y += tl.load(residual + lines[None, :] * stride_residual + row[:, None], mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(out + line[None, :] * stride_out + row[:, None], y.to(out.dtype.element_ty), mask=mask)


def few_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    config: FewConfig | None = None,
) -> Tensor:
    """x [M ≤ 8, K] times weight [N, K], both of 16 bits, into `out`, which may be `residual`; other arguments as in
    small_linear. With `rows` [M] int32 only those rows of x and `residual` are taken, in this order."""
    m, k = x.shape
    if rows is not None:
        m = len(rows)
    n = weight.shape[0]
    outputs = n // 2 if swiglu else n
    if m > MAX_ROWS:
        raise ValueError(f"few_linear takes at most {MAX_ROWS} rows of x, not {m}: use linear")
    if out is None:
        out = torch.empty((m, outputs), dtype=x.dtype, device=x.device)
    if config is None:
        config = default_config(m, n, k, swiglu)
    _few_linear_kernel[(triton.cdiv(outputs, config.rows),)](
        x,
        weight,
        out,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        x if bias is None else bias,
        x if rows is None else rows,
        outputs,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        M=m,
        K=k,
        BLOCK_M=triton.next_power_of_2(m),
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        EACH=_EACH,
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        PICK=rows is not None,
        num_warps=config.num_warps,
    )
    return out
