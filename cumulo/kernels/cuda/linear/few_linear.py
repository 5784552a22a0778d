"""few_linear: y = x·Wᵀ for one to eight rows of x and matrices of a few MiB, as when a small model decodes or
verifies drafts. `linear` calls it.

Must move the weights once, 2·N·K bytes, which for a small matrix takes less than a microsecond: what counts is how
soon every load is on its way, and how few exchanges between threads follow the last of them. So a program takes a
few rows of W over all of k, or a long part of it, at once; plain multiply-adds keep sums in each thread; all rows
of x and of W share one reduction at the end. More rows of x cost registers and arithmetic, so two programs or more
share them, and read the same part of W, the second time from the L2 cache. few_dot has none of that to share and is
faster from two rows on; this one is for one row, for draft heads, and where no GPU plays that. Weights are asked
for before the kernel ahead has ended (early.py).
"""

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.early import early, wait_for_kernel_ahead
from cumulo.kernels.cuda.linear.small_linear import reference, work

MAX_ROWS = 8
SMALL_MATRIX = 8 << 20  # weights: up to here, reading them takes no longer than starting a kernel
_EACH = 8  # neighbouring columns of one thread, 16 bytes

__all__ = ["FewConfig", "candidates", "default_config", "few_linear", "reference", "work"]


@dataclass(frozen=True, slots=True)
class FewConfig:
    """Rows of W and columns of k that a program takes at once, and its warps, which share the columns. `lines`: of
    x, for each program; 0: all of them. With fewer, others read the same part of W, from the L2 cache. `early`: on
    a GPU it starts while the kernel before it ends, and loads weights meanwhile; `waits_first`: see early.py."""

    rows: int
    block_k: int
    num_warps: int
    lines: int = 0
    early: bool = False
    waits_first: bool = False


def candidates(m: int, n: int, k: int, swiglu: bool = False) -> list[FewConfig]:
    """What `tune` tries: all of k at once, or parts of it, for one, two or four rows of x."""
    whole = max(256, triton.next_power_of_2(k))
    found = [default_config(m, n, k, swiglu)]
    for block_k, warps, rows, lines in product((whole, 512, 256), (1, 2, 4, 8), (2, 4), (1, 2, 4)):
        # In registers, of each column; warps have columns of their own, or they would exchange rows. A thread has
        # 8 or 16 columns: with more, too few are on their way.
        values = rows * (2 if swiglu else 1) + lines
        if block_k <= whole and lines == min(m, 2 if m <= 4 else 4) and block_k in (256 * warps, 512 * warps):
            if values * block_k <= 160 * 32 * warps:
                found.append(FewConfig(rows, block_k, warps, lines, early=True, waits_first=m == 1))
    return list(dict.fromkeys(found))


def default_config(m: int, n: int, k: int, swiglu: bool = False) -> FewConfig:
    """Two rows of x for each program, so that many share the arithmetic. Short rows of W: few warps, whose few
    registers leave room for many programs. Long ones: more warps, as k is what there is to share."""
    if m == 1:
        return _one_row(n, k)
    lines = 2 if m <= 4 or not swiglu else 4
    whole = max(256, triton.next_power_of_2(k))
    if k <= 1024 and (swiglu or n > 2048):
        return (
            FewConfig(4, min(512, whole), 1, lines, early=True)
            if m <= 4
            else FewConfig(2, 256, 1, lines, True)
        )
    if k <= 1024:
        rows, columns = (2, 256) if n <= 768 else (4, 512)  # of W, and of each warp
        return FewConfig(rows, whole, max(1, whole // columns), lines, early=True)
    if k <= 2048:
        if m > 2 and n > 2560:
            return FewConfig(4, 512, 2, early=True)
        return FewConfig(2 if n <= 768 else 4, 2048, 4, lines if n <= 768 else 0, early=True)
    return FewConfig(4, 1024, 4, early=True)


def _one_row(n: int, k: int) -> FewConfig:
    """By the times of whole steps of eight models, each product among the others of its step; larger matrices are
    asked for with long rows only."""
    whole = max(256, triton.next_power_of_2(k))
    if k <= 1024:
        rows, block_k, warps = 4, whole, max(1, whole // 512)
    elif n * k <= SMALL_MATRIX:
        rows, block_k, warps = (2 if n <= 768 else 4, 2048, 4) if n <= 2048 else (4, 1024, 2)
    else:
        rows, block_k, warps = 2, 2048, 4
    return FewConfig(rows, block_k, warps, 1, early=True, waits_first=True)


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
                       SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, PICK: tl.constexpr,
                       EARLY: tl.constexpr = 0):  # fmt: skip
    first = tl.program_id(1) * ROWS
    row = first + tl.arange(0, ROWS)
    row_mask = row < OUTPUTS
    safe = tl.minimum(row, OUTPUTS - 1).to(tl.int64)  # rows past the end are read again and not stored
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    lines = tl.minimum(line, M - 1)
    column = tl.arange(0, BLOCK_K)[None, None, :]
    gate_rows = weight + safe[:, None, None] * stride_weight
    up_rows = weight + (safe + OUTPUTS)[:, None, None] * stride_weight
    acc = tl.zeros([ROWS, BLOCK_M, BLOCK_K // EACH], tl.float32)
    up = acc
    squares = tl.zeros([1, BLOCK_M, BLOCK_K // EACH], tl.float32)
    next_w = _columns(gate_rows, column, K, BLOCK_K > K, True)
    next_u = next_w
    if SWIGLU:
        next_u = _columns(up_rows, column, K, BLOCK_K > K, True)
    gains = column
    if NORM:
        gains = _columns(norm_weight, column, K, BLOCK_K > K, False)
    if EARLY:  # so far nothing that the kernels before this one compute was read
        wait_for_kernel_ahead(EARLY)
    if PICK:
        lines = tl.load(rows_of + lines)
    x_rows = x + lines[None, :, None] * stride_x
    mask = row_mask[:, None] & (line < M)[None, :]
    added = tl.zeros([ROWS, BLOCK_M], tl.float32)
    if RESIDUAL:  # asked for here, or it would be waited for at the end
        added = tl.load(residual + lines[None, :] * stride_residual + row[:, None], mask=mask, other=0.0)
    for k in tl.static_range(0, K, BLOCK_K):
        w, u = next_w, next_u
        if k + BLOCK_K < K:
            next_w = _columns(gate_rows, k + BLOCK_K + column, K, k + 2 * BLOCK_K > K, True)
            if SWIGLU:
                next_u = _columns(up_rows, k + BLOCK_K + column, K, k + 2 * BLOCK_K > K, True)
        values = _columns(x_rows, k + column, K, k + BLOCK_K > K, False).to(tl.float32)
        if NORM:
            squares += _of_threads(values * values, 1, BLOCK_M, BLOCK_K, EACH)
            if k:
                gains = _columns(norm_weight, k + column, K, k + BLOCK_K > K, False)
            values *= gains.to(tl.float32)
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
    if RESIDUAL:
        y += added.to(tl.float32)
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
    block_m = min(config.lines or MAX_ROWS, triton.next_power_of_2(m))
    _few_linear_kernel[(triton.cdiv(m, block_m), triton.cdiv(outputs, config.rows))](
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
        BLOCK_M=block_m,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        EACH=_EACH,
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        PICK=rows is not None,
        num_warps=config.num_warps,
        **early(config.early, x, config.waits_first),
    )
    return out
