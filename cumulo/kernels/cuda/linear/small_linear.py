"""small_linear: y = x·Wᵀ for one to four rows of x, as when a few sequences decode. `linear` calls it.

It must read the weights once (N·K elements; x and y are nothing beside them) and do 2·M·N·K FLOPs: memory-bound
by two orders of magnitude, so plain multiply-adds are enough and every choice is about loads in flight. A program
owns a few output rows; a row's loads are unrolled, 16 bytes a thread, so that the memory system has them all at
once. RMSNorm costs no pass of its own: Σ w·(x·g)·r = r·Σ w·(x·g), and r comes out of the same loop. SwiGLU keeps
a gate row and its up row in one program. With `early` the first tile of weights is asked for before the kernel
ahead has ended (early.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.early import early, wait_for_kernel_ahead
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow, Work

MAX_ROWS = 4


@dataclass(frozen=True, slots=True)
class SmallConfig:
    """Output rows and columns of W a program holds at once, and its warps. `early`: on a GPU it starts while the
    kernel before it ends, and loads weights meanwhile."""

    rows: int
    block_k: int
    num_warps: int
    early: bool = False


# Tried by `tune`, for more than one row the first four only: the others run out of registers there.
CANDIDATES = (
    SmallConfig(2, 1024, 4),
    SmallConfig(1, 2048, 4),
    SmallConfig(2, 2048, 8),
    SmallConfig(1, 1024, 4),
    SmallConfig(4, 512, 4),
    SmallConfig(2, 512, 2),
    SmallConfig(4, 1024, 4),
    SmallConfig(8, 512, 4),
    SmallConfig(2, 2048, 4),
    SmallConfig(4, 512, 2),
)


def reference(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """What it computes, in plain torch: norm, product, bias, SwiGLU, residual, in this order."""
    if norm_weight is not None:
        x = F.rms_norm(x, x.shape[-1:], norm_weight.to(x.dtype), eps)
    y = F.linear(x, weight, bias)
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def work(m: int, n: int, k: int, weight_bytes: int, swiglu: bool = False, residual: bool = False) -> Work:
    """`n` counts the weight's rows, `weight_bytes` its bytes with scales; activations take two bytes."""
    outputs = m * (n // 2 if swiglu else n)
    return Work(bytes=weight_bytes + 2 * (m * k + outputs * (2 if residual else 1)), flops=2 * m * n * k)


def default_config(n: int, k: int, swiglu: bool, weight_bytes_per_element: int = 2) -> SmallConfig:
    """Small matrices: every load of every program in flight in one wave. Large ones: 4 or 8 KiB a program, or as
    much of each of SwiGLU's two halves, in tiles of k that are not mostly mask; of 8 bits as many bytes."""
    if n * k <= 4 << 20:
        rows = 1 if swiglu else 2
        block_k = 1024 if k <= 1024 or k % 2048 else 2048
    elif weight_bytes_per_element == 1:
        rows = 2 if swiglu else 4
        block_k = 2048 if k % 2048 == 0 or k > 8192 else 1024
    elif swiglu and k < 2048:
        return SmallConfig(4, min(512, triton.next_power_of_2(k)), 2)
    elif swiglu:
        block_k = 2048 if k % 2048 == 0 or k >= 4096 else 1024
        rows = 4 if block_k == 1024 and k % 1024 == 0 else 2
    else:
        block_k = 2048 if k % 2048 == 0 or 2048 < k <= 16384 else 1024
        filled = 4 * k >= 3 * block_k * -(-k // block_k)
        rows = 1 if n <= 4096 and block_k == 2048 and filled else 2
    warps = 8 if rows * block_k * (2 if swiglu else 1) * weight_bytes_per_element > 16384 else 4
    return SmallConfig(rows, min(block_k, triton.next_power_of_2(k)), warps)


@triton.jit
def _dot_rows(x, k_offsets, k_mask, stride_x, m: tl.constexpr, weights, gains, sum_squares, acc, NORM: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Add one tile's products with row m of x to `acc`; with NORM also its squares to `sum_squares`."""
    if MASKED:
        row = tl.load(x + m * stride_x + k_offsets, mask=k_mask, other=0.0).to(tl.float32)
    else:
        row = tl.load(x + m * stride_x + k_offsets).to(tl.float32)
    if NORM:
        sum_squares += row * row
        row *= gains
    acc += weights * row[None, :]
    return acc, sum_squares


@triton.jit
def _load_weights(pointers, row_mask, k_mask, MASKED_N: tl.constexpr, MASKED_K: tl.constexpr):
    if MASKED_N and MASKED_K:
        mask = row_mask[:, None] & k_mask[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    elif MASKED_N:
        tile = tl.load(pointers, mask=row_mask[:, None], other=0.0, eviction_policy="evict_first")
    elif MASKED_K:
        tile = tl.load(pointers, mask=k_mask[None, :], other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, eviction_policy="evict_first")
    return tile


@triton.jit
def _gains(norm_weight, offsets, K: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        gains = tl.load(norm_weight + offsets, mask=offsets < K, other=0.0).to(tl.float32)
    else:
        gains = tl.load(norm_weight + offsets).to(tl.float32)
    return gains


@triton.jit
def _at_rows(pointer, rows, row_mask, WANTED: tl.constexpr):
    """Numbers that the end of the work needs, asked for at its start: at the end they would be waited for."""
    if WANTED:
        values = tl.load(pointer + rows, mask=row_mask, other=0.0).to(tl.float32)
    else:
        values = rows.to(tl.float32)
    return values


@triton.jit
def _finish(acc, up, sum_squares, added, scale, up_scale, bias, up_bias, places, row_mask, eps, K: tl.constexpr,
            NORM: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
            SCALED: tl.constexpr):  # fmt: skip
    """Reduce one row of x's products and write its outputs."""
    y = tl.sum(acc, axis=1)
    if NORM:
        rstd = tl.rsqrt(tl.sum(sum_squares, axis=0) / K + eps)
        y *= rstd
    if SCALED:
        y *= scale
    if BIAS:
        y += bias
    if SWIGLU:
        z = tl.sum(up, axis=1)
        if NORM:
            z *= rstd
        if SCALED:
            z *= up_scale
        if BIAS:
            z += up_bias
        y = y * tl.sigmoid(y) * z
    if RESIDUAL:
        y += added
    tl.store(places, y.to(places.dtype.element_ty), mask=row_mask)


@triton.jit
def _small_linear_kernel(x, weight, out, norm_weight, residual, bias, scales, OUTPUTS, stride_x, stride_weight,
                         stride_out, stride_residual, eps, M: tl.constexpr, K: tl.constexpr,
                         ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, NORM: tl.constexpr,
                         SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
                         SCALED: tl.constexpr, EARLY: tl.constexpr = 0):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < OUTPUTS
    columns = tl.arange(0, BLOCK_K)
    gate_rows = weight + rows.to(tl.int64)[:, None] * stride_weight
    up_rows = weight + (rows.to(tl.int64) + OUTPUTS)[:, None] * stride_weight
    acc0 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    up0, up1, up2, up3 = acc0, acc0, acc0, acc0
    squares0 = tl.zeros([BLOCK_K], tl.float32)
    squares1, squares2, squares3 = squares0, squares0, squares0
    # One tile ahead: a tile's loads are on their way while the one before is multiplied.
    next_w = _load_weights(gate_rows + columns[None, :], row_mask, columns < K, not EVEN_N, BLOCK_K > K)
    next_u = next_w
    if SWIGLU:
        next_u = _load_weights(up_rows + columns[None, :], row_mask, columns < K, not EVEN_N, BLOCK_K > K)
    scale = _at_rows(scales, rows, row_mask, SCALED)
    up_scale = _at_rows(scales + OUTPUTS, rows, row_mask, SCALED and SWIGLU)
    gate_bias = _at_rows(bias, rows, row_mask, BIAS)
    up_bias = _at_rows(bias + OUTPUTS, rows, row_mask, BIAS and SWIGLU)
    gains = columns.to(tl.float32)
    if NORM:
        gains = _gains(norm_weight, columns, K, BLOCK_K > K)
    if EARLY:  # so far nothing that the kernels before this one compute was read
        wait_for_kernel_ahead(EARLY)
    added0 = _at_rows(residual, rows, row_mask, RESIDUAL)
    added1 = _at_rows(residual + stride_residual, rows, row_mask, RESIDUAL and M > 1)
    added2 = _at_rows(residual + 2 * stride_residual, rows, row_mask, RESIDUAL and M > 2)
    added3 = _at_rows(residual + 3 * stride_residual, rows, row_mask, RESIDUAL and M > 3)
    for k in tl.static_range(0, K, BLOCK_K):
        offsets = k + columns
        k_mask = offsets < K
        w, u = next_w, next_u
        if k + BLOCK_K < K:
            ahead = offsets + BLOCK_K
            next_w = _load_weights(
                gate_rows + ahead[None, :], row_mask, ahead < K, not EVEN_N, k + 2 * BLOCK_K > K
            )
            if SWIGLU:
                next_u = _load_weights(
                    up_rows + ahead[None, :], row_mask, ahead < K, not EVEN_N, k + 2 * BLOCK_K > K
                )
        if NORM and k > 0:
            gains = _gains(norm_weight, offsets, K, k + BLOCK_K > K)
        w = w.to(tl.float32)
        acc0, squares0 = _dot_rows(
            x, offsets, k_mask, stride_x, 0, w, gains, squares0, acc0, NORM, k + BLOCK_K > K
        )
        if M > 1:
            acc1, squares1 = _dot_rows(
                x, offsets, k_mask, stride_x, 1, w, gains, squares1, acc1, NORM, k + BLOCK_K > K
            )
        if M > 2:
            acc2, squares2 = _dot_rows(
                x, offsets, k_mask, stride_x, 2, w, gains, squares2, acc2, NORM, k + BLOCK_K > K
            )
        if M > 3:
            acc3, squares3 = _dot_rows(
                x, offsets, k_mask, stride_x, 3, w, gains, squares3, acc3, NORM, k + BLOCK_K > K
            )
        if SWIGLU:
            u = u.to(tl.float32)
            up0, _ = _dot_rows(
                x, offsets, k_mask, stride_x, 0, u, gains, squares0, up0, NORM, k + BLOCK_K > K
            )
            if M > 1:
                up1, _ = _dot_rows(
                    x, offsets, k_mask, stride_x, 1, u, gains, squares1, up1, NORM, k + BLOCK_K > K
                )
            if M > 2:
                up2, _ = _dot_rows(
                    x, offsets, k_mask, stride_x, 2, u, gains, squares2, up2, NORM, k + BLOCK_K > K
                )
            if M > 3:
                up3, _ = _dot_rows(
                    x, offsets, k_mask, stride_x, 3, u, gains, squares3, up3, NORM, k + BLOCK_K > K
                )
    _finish(acc0, up0, squares0, added0, scale, up_scale, gate_bias, up_bias, out + rows,
            row_mask, eps, K, NORM, SWIGLU, RESIDUAL, BIAS, SCALED)  # fmt: skip
    if M > 1:
        _finish(acc1, up1, squares1, added1, scale, up_scale, gate_bias, up_bias, out + stride_out + rows,
                row_mask, eps, K, NORM, SWIGLU, RESIDUAL, BIAS, SCALED)  # fmt: skip
    if M > 2:
        _finish(acc2, up2, squares2, added2, scale, up_scale, gate_bias, up_bias, out + 2 * stride_out + rows,
                row_mask, eps, K, NORM, SWIGLU, RESIDUAL, BIAS, SCALED)  # fmt: skip
    if M > 3:
        _finish(acc3, up3, squares3, added3, scale, up_scale, gate_bias, up_bias, out + 3 * stride_out + rows,
                row_mask, eps, K, NORM, SWIGLU, RESIDUAL, BIAS, SCALED)  # fmt: skip


def small_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    config: SmallConfig | None = None,
) -> Tensor:
    """x [M ≤ 4, K] times weight [N, K] (rows contiguous, any float dtype; `scales` [N] for e4m3) into `out`.

    With `swiglu` the weight's first half are gate rows, its second half up rows, and out is [M, N/2]. `out` may be
    `residual` itself.
    """
    m, k = x.shape
    n = weight.shape[0]
    outputs = n // 2 if swiglu else n
    if m > MAX_ROWS:
        raise ValueError(f"small_linear takes at most {MAX_ROWS} rows of x, not {m}: use linear")
    if out is None:
        out = torch.empty((m, outputs), dtype=x.dtype, device=x.device)
    if config is None:
        config = default_config(n, k, swiglu, weight.element_size())
    rows = config.rows
    _small_linear_kernel[(-(-outputs // rows),)](
        x,
        weight,
        out,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        x if bias is None else bias,
        x if scales is None else scales,
        outputs,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        M=m,
        K=k,
        ROWS=rows,
        BLOCK_K=config.block_k,
        EVEN_N=outputs % rows == 0,
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        SCALED=scales is not None,
        num_warps=config.num_warps,
        **early(config.early, x, waits_first=True),
    )
    return out


# The decode linears of two models, and what a plain tuned kernel reached on an H200 (µs, one row).
BENCH_SHAPES = (
    ("Qwen3-0.6B qkv", 4096, 1024, 4.1),
    ("Qwen3-0.6B o", 1024, 2048, 3.2),
    ("Qwen3-0.6B gate/up", 6144, 1024, 5.1),
    ("Qwen3-0.6B down", 1024, 3072, 3.7),
    ("Qwen3-0.6B head", 151936, 1024, 73.7),
    ("Llama-8B qkv", 6144, 4096, 13.7),
    ("Llama-8B o", 4096, 4096, 10.0),
    ("Llama-8B gate/up", 28672, 4096, 55.9),
    ("Llama-8B down", 4096, 14336, 29.5),
)


def bench_rows(device: torch.device | str = "cuda") -> Iterator[KernelRow]:
    """Every decode linear at one row, with its fusions beside the plain product that cuBLAS does."""
    generator = torch.Generator(device).manual_seed(0)
    for name, n, k, must_us in BENCH_SHAPES:
        copies = copies_past_cache(2 * n * k)
        weights = [random_bf16(n, k, device=device, generator=generator, std=k**-0.5) for _ in range(copies)]
        x = random_bf16(1, k, device=device, generator=generator)
        out = torch.empty(1, n, dtype=x.dtype, device=device)
        small_linear(x, weights[0], out)
        exact = reference(x.double(), weights[0].double())
        yield KernelRow(
            name="small_linear",
            shape=f"{name} m=1 n={n} k={k}",
            work=work(1, n, k, 2 * n * k),
            ours_us=graph_us(lambda i: small_linear(x, weights[i], out), copies),
            rivals_us={"cuBLAS": graph_us(lambda i: F.linear(x, weights[i]), copies)},
            config=str(default_config(n, k, False)),
            error=float((out - exact).norm() / exact.norm()),
            must_us=must_us,
        )


def random_bf16(
    *shape: int, device: torch.device | str, generator: torch.Generator, std: float = 1.0
) -> Tensor:
    return (torch.randn(*shape, device=device, generator=generator) * std).to(torch.bfloat16)
