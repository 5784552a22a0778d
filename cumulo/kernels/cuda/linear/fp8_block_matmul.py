"""fp8_block_matmul: x·Wᵀ of e4m3 matrices scaled in blocks (x 1×128, W 128×128), for many rows. `fp8` calls it.

It must do 2·M·N·K FLOPs on the 8-bit tensor cores. A step of k is one scale block: its product is scaled and added
to the sum in float32, which also keeps the tensor cores' shorter accumulator from mattering (DeepSeek-V3, 2024,
section 3.3.2: it is promoted every 128 products).
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.linear.fp8_quantise import quantise
from cumulo.kernels.cuda.linear.small_linear import random_bf16
from cumulo.kernels.cuda.timing import graph_us
from cumulo.kernels.cuda.work import KernelRow, Work

BLOCK = 128


def reference(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
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


@torch.library.custom_op("cumulo::fp8_block_matmul", mutates_args=())
def block_matmul_op(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    return block_matmul(x, x_scales, weight, weight_scales)


@block_matmul_op.register_fake
def _(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)


def work(m: int, n: int, k: int) -> Work:
    return Work(bytes=m * k + n * k + 2 * m * n, flops=2 * m * n * k)


def bench_rows(device: torch.device | str = "cuda") -> Iterator[KernelRow]:
    """Against the vendor library's product with one scale a row, which has less to do."""
    generator = torch.Generator(device).manual_seed(0)
    for m, n, k in ((4096, 4096, 4096), (8192, 28672, 4096)):
        x = quantise(random_bf16(m, k, device=device, generator=generator), in_blocks=True)
        w_rows = quantise(random_bf16(n, k, device=device, generator=generator))
        scales = (
            torch.rand(triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK), device=device, generator=generator) + 0.5
        )
        out = block_matmul(x.data, x.scales, w_rows.data, scales)
        exact = reference(x.data[:256], x.scales[:256], w_rows.data, scales)
        rowwise = (torch.ones(m, 1, device=device), torch.ones(1, n, device=device))
        yield KernelRow(
            name="fp8_block_matmul",
            shape=f"m={m} n={n} k={k}",
            work=work(m, n, k),
            ours_us=graph_us(lambda i: block_matmul(x.data, x.scales, w_rows.data, scales, out), repeats=5),
            rivals_us={
                "cuBLAS/CUTLASS, scaled by row": graph_us(
                    lambda i: torch._scaled_mm(
                        x.data, w_rows.data.t(), *rowwise, out_dtype=torch.bfloat16, use_fast_accum=True
                    ),
                    repeats=5,
                )
            },
            dtype="float8_e4m3fn",
            error=float((out[:256].float() - exact).norm() / exact.norm()),
        )
