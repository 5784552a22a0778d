"""skinny_linear: y = x·Wᵀ for up to 128 rows of x on the tensor cores, bound by reading W. `linear` calls it.

It must read the weights once (N·K elements) and do 2·M·N·K FLOPs; below some 200 rows the reading takes longer.
The product is turned around, yᵀ = W·xᵀ: a tile of W is the tall operand (64 or 128 rows, what `wgmma` wants) and
the few rows of x the narrow one, so nothing is padded beyond the next power of two, and weights of 8 bits are
widened in registers on their way to the tensor cores. Loads run several tiles ahead through shared memory.

A matrix with few rows does not fill the GPU: then K is cut into `splits`, each program leaves a partial sum, and
the one that arrives last adds them *in order of k*, whoever it is: the result does not depend on timing.
RMSNorm is folded in as in small_linear.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.linear.product import SMALL_MATRIX, Product

MAX_ROWS = 128
PARTIAL_FLOATS = 8 << 20  # 32 MiB of partial sums a device
MAX_TILES = 1 << 16
SHARED_BYTES = 220 << 10


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Rows of W and columns of k in a tile, programs that share one tile's k, the pipeline, and how many rows of x
    a tile has at least, 8 or 16."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    least_rows: int = 16


# The splits of a candidate are chosen by the shape; see `candidates`.
# Matrices of a few MiB do not fill the device with large tiles: what counts is how soon all of it is on its way.
SMALL_TILES = (
    (16, 256, 1, 3),
    (16, 256, 2, 3),
    (16, 128, 1, 5),
    (16, 512, 2, 3),
    (32, 256, 2, 3),
    (32, 128, 2, 5),
)
TILES = (
    (64, 128, 4, 4),
    (64, 128, 4, 6),
    (64, 256, 4, 3),
    (64, 256, 4, 5),
    (32, 256, 4, 5),
    (128, 64, 4, 6),
    (128, 128, 4, 4),
    (128, 128, 8, 4),
)


def ends_in_a_short_wave(n: int, swiglu: bool, multiprocessors: int = 132) -> bool:
    """Whether, with one program for 64 outputs on every multiprocessor at a time, a quarter of their turns or more
    are spent waiting for a few at the end."""
    tiles = -(-(n // 2 if swiglu else n) // 64)
    turns = -(-tiles // multiprocessors) * multiprocessors
    return tiles > multiprocessors and 4 * (turns - tiles) >= turns


def default_config(
    m: int, n: int, k: int, swiglu: bool = False, multiprocessors: int = 132, norm: bool = False,
    element_bytes: int = 2,
) -> SkinnyConfig:  # fmt: skip
    """About one program on every multiprocessor with 100 KiB of W on its way; two with 64 KiB where k is long or a
    few programs would come last. Small matrices: tiles so small that each multiprocessor has one. Of many rows of x
    two programs, with less."""
    # Up to 8 rows need no more in a tile; but norming on the way, and long tiles of k, were slower with 8.
    least_rows = 16 if norm else 8
    if m <= 16 and n * k <= SMALL_MATRIX // 4:
        if k <= 1024:
            return SkinnyConfig(16, 256, 1, 2, 3, least_rows)
        tiles, steps, splits = -(-(n // 2 if swiglu else n) // 32), -(-k // 128), 1
        while 2 * tiles * splits <= multiprocessors and steps >= 8 * splits:
            splits *= 2
        return SkinnyConfig(32, 128, splits, 2, 5, least_rows)
    if m <= 16:
        outputs = n // 2 if swiglu else n
        tiles, steps, splits = -(-outputs // 64), -(-k // 256), 1
        if element_bytes == 2:
            if k >= 8192 and tiles <= multiprocessors and not swiglu:
                while tiles * splits <= multiprocessors and steps >= 4 * splits:
                    splits *= 2
                return SkinnyConfig(64, 128, splits, 4, 4, 8 if m <= 8 else 16)
            if m <= 8 and swiglu and ends_in_a_short_wave(n, swiglu, multiprocessors):
                return SkinnyConfig(64, 128, 1, 4, 4, 8)
            least_rows = 16
        while (2 * tiles * splits <= multiprocessors and steps >= 4 * splits) or steps > 20 * splits:
            splits *= 2
        return SkinnyConfig(64, 256, splits, 4, 3 if swiglu else 4, least_rows)
    block_n, block_k, stages = (64, 128, 5) if m <= 32 and not swiglu else (64, 64, 5 if m <= 32 else 4)
    splits = splits_for(m, n, k, block_n, block_k, swiglu, multiprocessors)
    return SkinnyConfig(block_n, block_k, splits, 4, stages)


def splits_for(
    m: int, n: int, k: int, block_n: int, block_k: int, swiglu: bool, multiprocessors: int = 132
) -> int:
    """Enough programs for two on every multiprocessor, while each still has four tiles of k to pipeline."""
    outputs = n // 2 if swiglu else n
    tiles = -(-outputs // block_n)
    splits = 1
    while tiles * splits < 2 * multiprocessors and -(-k // block_k) // (2 * splits) >= 4 and splits < 16:
        splits *= 2
    while splits > 1 and not _workspace_suffices(m, tiles, splits, block_n, swiglu):
        splits //= 2
    return splits


def candidates(m: int, n: int, k: int, swiglu: bool = False, element_bytes: int = 2) -> list[SkinnyConfig]:
    """What `tune` tries at a shape: the default, and each tile that fits with the splits that fill the device."""
    found = [
        default_config(m, n, k, swiglu, norm=norm, element_bytes=element_bytes) for norm in (False, True)
    ]
    least_rows = 8 if m <= 8 else 16
    for block_n, block_k, warps, stages in (*(SMALL_TILES if n * k <= SMALL_MATRIX else ()), *TILES):
        if block_k >= 2 * k:
            continue  # mostly mask
        tile_bytes = block_k * (block_n * element_bytes * (2 if swiglu else 1) + 2 * max(16, m))
        if stages * tile_bytes > SHARED_BYTES or block_n * m > 8192 * warps // 4:
            continue  # shared memory, registers
        splits = splits_for(m, n, k, block_n, block_k, swiglu)
        found += [
            SkinnyConfig(block_n, block_k, each, warps, stages, least_rows)
            for each in {splits, max(1, splits // 2)}
        ]
    return list(dict.fromkeys(found))[:24]


@triton.jit
def widen(tile, dtype: tl.constexpr):
    """8-bit weights in the dtype of the activations. By way of float32, because the direct conversion from e4m3 to
    bfloat16 uses an instruction of a quarter of the rate and would be slower than the memory."""
    if tile.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        tile = tile.to(tl.float16).to(tl.float32)
    return tile.to(dtype)


@triton.jit
def add_splits(acc, up, squares, partials, counters, tile, split, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               SPLITS: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr):  # fmt: skip
    """Leave the sums of one split of a tile's k; the program that arrives last has those of all, added in order,
    and the last value says that it is the one."""
    # One tile's partial sums lie together: [split][gate, up][BLOCK_N, BLOCK_M], then [split][BLOCK_M] squares.
    PARTS: tl.constexpr = 2 if SWIGLU else 1
    CELLS: tl.constexpr = BLOCK_N * BLOCK_M
    m_cells = tl.arange(0, BLOCK_M)
    cells = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m_cells[None, :]
    base = partials + tile.to(tl.int64) * (SPLITS * (PARTS * CELLS + BLOCK_M))
    base_squares = base + SPLITS * PARTS * CELLS + m_cells
    tl.store(base + split * PARTS * CELLS + cells, acc, cache_modifier=".cg")
    if SWIGLU:
        tl.store(base + (split * PARTS + 1) * CELLS + cells, up, cache_modifier=".cg")
    if NORM:
        tl.store(base_squares + split * BLOCK_M, squares, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's part is written before one thread says so
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        for other in range(SPLITS):
            acc += tl.load(base + other * PARTS * CELLS + cells, cache_modifier=".cg")
            if SWIGLU:
                up += tl.load(base + (other * PARTS + 1) * CELLS + cells, cache_modifier=".cg")
            if NORM:
                squares += tl.load(base_squares + other * BLOCK_M, cache_modifier=".cg")
        tl.atomic_xchg(counters + tile, 0, sem="relaxed")  # ready for the next launch
    return acc, up, squares, is_last


@triton.jit
def finish(y, z, squares, out, residual, bias, scales, n_offsets, n_safe, m_offsets, OUTPUTS, M, K, stride_out,
           stride_residual, eps, NORM: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr,
           BIAS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """What becomes of a tile's sums y, and z of the up rows that belong to them."""
    if NORM:
        rstd = tl.rsqrt(squares / K + eps)[None, :]
        y *= rstd
    if SCALED:
        y *= tl.load(scales + n_safe)[:, None]
    if BIAS:
        y += tl.load(bias + n_safe).to(tl.float32)[:, None]
    if SWIGLU:
        if NORM:
            z *= rstd
        if SCALED:
            z *= tl.load(scales + OUTPUTS + n_safe)[:, None]
        if BIAS:
            z += tl.load(bias + OUTPUTS + n_safe).to(tl.float32)[:, None]
        y = y * tl.sigmoid(y) * z
    mask = (n_offsets < OUTPUTS)[:, None] & (m_offsets < M)[None, :]
    lines = m_offsets.to(tl.int64)[None, :]
    if RESIDUAL:
        added = tl.load(residual + lines * stride_residual + n_offsets[:, None], mask=mask, other=0.0)
        y += added.to(tl.float32)
    tl.store(out + lines * stride_out + n_offsets[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _skinny_linear_kernel(x, weight, out, norm_weight, residual, bias, scales, partials, counters, M, OUTPUTS, K,
                          K_PER_SPLIT, stride_x, stride_out, stride_residual, stride_weight, eps,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                          SPLITS: tl.constexpr, EVEN_K: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr,
                          RESIDUAL: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    n_offsets = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last row again: no mask on the stream of weights, and they are never stored.
    n_safe = tl.minimum(n_offsets, OUTPUTS - 1)
    m_offsets = tl.arange(0, BLOCK_M)
    m_mask = m_offsets < M
    k_columns = tl.arange(0, BLOCK_K)
    x_rows = x + m_offsets[:, None] * stride_x
    w_rows = weight + n_safe.to(tl.int64)[:, None] * stride_weight
    u_rows = weight + (n_safe.to(tl.int64) + OUTPUTS)[:, None] * stride_weight
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = acc
    squared = tl.zeros(
        [BLOCK_M, BLOCK_K], tl.float32
    )  # summed over k at the end: no exchange between threads here
    first = split * K_PER_SPLIT
    for k in tl.range(first, tl.minimum(first + K_PER_SPLIT, K), BLOCK_K):
        offsets = k + k_columns
        if EVEN_K:
            w = tl.load(w_rows + offsets[None, :], eviction_policy="evict_first")
            rows = tl.load(x_rows + offsets[None, :], mask=m_mask[:, None], other=0.0)
        else:
            k_mask = offsets < K
            w = tl.load(
                w_rows + offsets[None, :], mask=k_mask[None, :], other=0.0, eviction_policy="evict_first"
            )
            rows = tl.load(x_rows + offsets[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        if NORM:
            wide = rows.to(tl.float32)
            squared += wide * wide
            gains = tl.load(norm_weight + offsets[None, :], mask=(offsets < K)[None, :], other=0.0)
            rows = (wide * gains.to(tl.float32)).to(rows.dtype)
        if SWIGLU:
            if EVEN_K:
                u = tl.load(u_rows + offsets[None, :], eviction_policy="evict_first")
            else:
                u = tl.load(
                    u_rows + offsets[None, :],
                    mask=(offsets < K)[None, :],
                    other=0.0,
                    eviction_policy="evict_first",
                )
        acc = tl.dot(widen(w, rows.dtype), tl.trans(rows), acc, input_precision="ieee")
        if SWIGLU:
            up = tl.dot(widen(u, rows.dtype), tl.trans(rows), up, input_precision="ieee")

    squares = tl.sum(squared, axis=1) if NORM else tl.zeros([BLOCK_M], tl.float32)
    is_last = True
    if SPLITS > 1:
        acc, up, squares, is_last = add_splits(
            acc, up, squares, partials, counters, tile, split, BLOCK_M, BLOCK_N, SPLITS, NORM, SWIGLU
        )
    if is_last:
        finish(
            acc, up, squares, out, residual, bias, scales, n_offsets, n_safe, m_offsets, OUTPUTS, M, K, stride_out,
            stride_residual, eps, NORM, SWIGLU, RESIDUAL, BIAS, SCALED,
        )  # fmt: skip


_workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}


def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and arrival counters of one device; never moves, so captured graphs may keep its address.

    Work on one device runs on one stream at a time; the first call must not be inside a graph capture.
    """
    if device not in _workspaces:
        _workspaces[device] = (
            torch.empty(PARTIAL_FLOATS, dtype=torch.float32, device=device),
            torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
        )
    return _workspaces[device]


def _workspace_suffices(m: int, tiles: int, splits: int, block_n: int, swiglu: bool) -> bool:
    block_m = max(16, triton.next_power_of_2(m))
    return (
        tiles * splits * ((2 if swiglu else 1) * block_n + 1) * block_m <= PARTIAL_FLOATS
        and tiles <= MAX_TILES
    )


def launch(product: Product, config: SkinnyConfig | None) -> None:
    """Computes at most 128 rows."""
    m, n, k = product.sizes
    x, swiglu, outputs = product.x, product.swiglu, product.outputs
    weight, scales = product.matrix
    if m > MAX_ROWS:
        raise ValueError(f"skinny_linear takes at most {MAX_ROWS} rows of x, not {m}")
    if config is None:
        normed = product.norm_weight is not None
        config = default_config(m, n, k, swiglu, norm=normed, element_bytes=weight.element_size())
    block_n, block_k = config.block_n, config.block_k
    tiles = -(-outputs // block_n)
    splits = min(config.splits, -(-k // block_k))
    if splits > 1 and not _workspace_suffices(m, tiles, splits, block_n, swiglu):
        splits = 1
    partials, counters = workspace(x.device) if splits > 1 else (x, x)
    _skinny_linear_kernel[(tiles, splits)](
        x,
        weight,
        *product.tensors,
        x if scales is None else scales,
        partials,
        counters,
        m,
        outputs,
        k,
        triton.cdiv(triton.cdiv(k, block_k), splits) * block_k,
        *product.strides,
        weight.stride(0),
        product.eps,
        BLOCK_M=max(config.least_rows, triton.next_power_of_2(m)),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLITS=splits,
        EVEN_K=k % block_k == 0,
        SCALED=scales is not None,
        **product.flags,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
