"""w4: the product of a few rows of 16-bit activations with 4-bit weights (W4A16). `linear` calls it.

Must move: half a byte a weight and four bytes a group of 128, about a quarter of bfloat16, so up to four
times the speed where reading weights is all the time. Then unpacking counts: a code put into the last bits of a
power of two is that power plus the code, for two weights an instruction, and the scale multiplies a group's
product, not every weight. And beginning and ending count: a product of one row takes a few microseconds, so the
norm before it, SwiGLU and the residual behind it are part of it, as in `skinny_linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cumulo.kernels.cuda.early import early, wait_for_kernel_ahead
from cumulo.kernels.cuda.linear.product import Product
from cumulo.kernels.cuda.linear.skinny_linear import PARTIAL_FLOATS, add_splits, finish, workspace
from cumulo.kernels.cuda.linear.w4_weight import STEP, W4Weight

LEAST_ROWS, MOST_ROWS = 8, 64  # of activations in a tile: at least what the tensor cores take
EARLY_WEIGHTS = 32 << 20
AHEAD = 2  # steps whose weights a program that begins early fetches into the cache
# Rows of weights, warps and stages that `tune` tries, of a few rows of activations and of more.
_TILES_OF_FEW = ((64, 2, 3), (64, 2, 5), (32, 1, 3), (32, 1, 5), (128, 4, 3))
_TILES = ((128, 4, 3), (64, 2, 3), (128, 4, 5), (128, 8, 3), (64, 4, 3))


@dataclass(frozen=True, slots=True)
class W4Config:
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    early: bool = False  # begins while the kernel before it ends (programmatic dependent launch)


def default_config(m: int, n: int, k: int, swiglu: bool = False, multiprocessors: int = 132) -> W4Config:
    """Makes as many programs as all multiprocessors hold at once: a step is short, so others must run while one
    waits. With more rows a program has enough to do, and adding splits up costs more. One row of a matrix of up
    to 16 MiB starts before the kernel ahead has ended."""
    block_n, warps = (64, 2) if m <= 4 else (128, 4)
    tiles = triton.cdiv(n // 2 if swiglu else n, block_n) * triton.cdiv(m, MOST_ROWS)
    enough = (3 if m <= 16 else 4 / 3) * multiprocessors
    splits = 1
    while tiles * splits < enough and k // STEP // (2 * splits) >= 4:
        splits *= 2
    return W4Config(block_n, splits, warps, 3, early=m == 1 and not swiglu and n * k <= EARLY_WEIGHTS)


def candidates(m: int, n: int, k: int, swiglu: bool = False) -> list[W4Config]:
    """What `tune` tries."""
    default = default_config(m, n, k, swiglu)
    found = [default]
    for block_n, warps, stages in _TILES_OF_FEW if m <= 4 else _TILES:
        splits = max(1, default.splits * default.block_n // block_n)
        found += [
            W4Config(block_n, each, warps, stages, early)
            for each in (splits, 2 * splits, max(1, splits // 2))
            if k // STEP // each >= 2
            for early in ((False, True) if m <= 4 else (False,))
        ]
    return list(dict.fromkeys(found))


# Two words become four pairs of bfloat16, place by place: codes on 128, less 136.
_PLACES = tl.constexpr("""{
.reg .b32 rest, less;
mov.b32 less, 0x43084308;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 4;
lop3.b32 $1, rest, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 8;
lop3.b32 $2, rest, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 12;
lop3.b32 $3, rest, 0x000f000f, 0x43004300, 0xea;
sub.bf16x2 $0, $0, less;
sub.bf16x2 $1, $1, less;
sub.bf16x2 $2, $2, less;
sub.bf16x2 $3, $3, less;
}""")


@triton.jit
def _numbers(words, PAIRED: tl.constexpr, dtype: tl.constexpr):
    """The codes in the four places of a tile of words, less 8. `PAIRED`: by Hopper's instructions for two bfloat16
    at a time."""
    if PAIRED:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _PLACES,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        p0, p1 = ((words & 15) - 8).to(dtype), (((words >> 4) & 15) - 8).to(dtype)
        p2, p3 = (((words >> 8) & 15) - 8).to(dtype), (((words >> 12) & 15) - 8).to(dtype)
    return p0, p1, p2, p3


@triton.jit
def _activations(x, gains, m_mask, squared, NORM: tl.constexpr):
    """A place's activations; to be normed: times the norm's gains, with their squares summed on the way."""
    values = tl.load(x, mask=m_mask[:, None], other=0.0)
    if NORM:
        wide = values.to(tl.float32)
        squared += wide * wide
        values = (wide * tl.load(gains)[None, :].to(tl.float32)).to(values.dtype)
    return values, squared


@triton.jit
def _w4_kernel(x, words, scales, out, norm_weight, residual, bias, partials, counters, M, OUTPUTS, N, K,
               STEPS_PER_SPLIT, stride_x, stride_out, stride_residual, eps, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PAIRED: tl.constexpr,
               NORM: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
               EARLY: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_offsets = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_safe = tl.minimum(n_offsets, OUTPUTS - 1)  # rows past the end are read again and not stored
    m_offsets = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = m_offsets < M
    columns = tl.arange(0, 32)
    steps = K // 128
    x_tile = x + m_offsets.to(tl.int64)[:, None] * stride_x + columns[None, :]
    gains = norm_weight + columns
    w_rows = (n_safe // 64).to(tl.int64) * steps * 2048 + (n_safe % 64) * 32
    w_tile = words + w_rows[:, None] + columns[None, :]
    u_safe = n_safe + OUTPUTS
    u_rows = (u_safe // 64).to(tl.int64) * steps * 2048 + (u_safe % 64) * 32
    u_tile = words + u_rows[:, None] + columns[None, :]
    acc, up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    product, product_u = acc, up
    squared = tl.zeros(
        [BLOCK_M, 32], tl.float32
    )  # summed at the end: no exchange between threads in the loop
    first = split * STEPS_PER_SPLIT
    last = tl.minimum(first + STEPS_PER_SPLIT, steps)
    if EARLY:
        # Weights depend on nobody: they are on their way to the cache while the kernel before this one ends.
        for ahead in tl.static_range(AHEAD):
            _prefetch(words + w_rows + tl.minimum(first + ahead, last - 1) * 2048)
            if SWIGLU:
                _prefetch(words + u_rows + tl.minimum(first + ahead, last - 1) * 2048)
        wait_for_kernel_ahead(EARLY)
    # Saying num_stages here, not at the launch alone, makes the scales travel ahead with the codes.
    for step in tl.range(first, last, num_stages=STAGES):
        w = tl.load(w_tile + step * 2048, eviction_policy="evict_first")
        p = _numbers(w, PAIRED, x.dtype.element_ty)
        if SWIGLU:
            u = tl.load(u_tile + step * 2048, eviction_policy="evict_first")
            q = _numbers(u, PAIRED, x.dtype.element_ty)
        for j in tl.static_range(4):
            values, squared = _activations(
                x_tile + step * 128 + 32 * j, gains + step * 128 + 32 * j, m_mask, squared, NORM
            )
            turned = tl.trans(values)
            product = tl.dot(p[j], turned, product, input_precision="ieee")
            if SWIGLU:
                product_u = tl.dot(q[j], turned, product_u, input_precision="ieee")
        acc += product * tl.load(scales + (step * N + n_safe))[:, None]
        product = tl.zeros_like(product)
        if SWIGLU:
            up += product_u * tl.load(scales + (step * N + u_safe))[:, None]
            product_u = tl.zeros_like(product_u)

    squares = tl.sum(squared, axis=1)
    is_last = True
    if SPLITS > 1:
        where = m_tile * tl.num_programs(0) + tile
        acc, up, squares, is_last = add_splits(
            acc, up, squares, partials, counters, where, split, BLOCK_M, BLOCK_N, SPLITS, NORM, SWIGLU
        )
    if is_last:
        finish(
            acc, up, squares, out, residual, bias, scales, n_offsets, n_safe, m_offsets, OUTPUTS, M, K, stride_out,
            stride_residual, eps, NORM, SWIGLU, RESIDUAL, BIAS, False,
        )  # fmt: skip


@triton.jit
def _prefetch(places):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


def launch(product: Product, config: W4Config | None) -> None:
    """Made for up to 256 rows or so."""
    m, n, k = product.sizes
    x, weight, swiglu = product.x, product.weight, product.swiglu
    assert isinstance(weight, W4Weight)
    if config is None:
        config = default_config(m, n, k, swiglu)
    block_m = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(m)))
    tiles, m_tiles = triton.cdiv(product.outputs, config.block_n), triton.cdiv(m, block_m)
    splits = min(config.splits, k // STEP)
    cells = ((2 if swiglu else 1) * config.block_n + 1) * block_m
    while splits > 1 and tiles * m_tiles * splits * cells > PARTIAL_FLOATS:
        splits //= 2
    partials, counters = workspace(x.device) if splits > 1 else (x, x)
    _w4_kernel[(tiles, splits, m_tiles)](
        x,
        weight.words,
        weight.scales,
        *product.tensors,
        partials,
        counters,
        m,
        product.outputs,
        n,
        k,
        triton.cdiv(k // STEP, splits),
        *product.strides,
        product.eps,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        STAGES=config.num_stages,
        PAIRED=x.is_cuda and x.dtype == torch.bfloat16,
        **product.flags,
        AHEAD=AHEAD,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **early(config.early, x, waits_first=True),
    )
