"""invariant_matmul: x·Wᵀ whose every row has the same bits whatever rows stand beside it. `linear` calls it in the
batch-invariant mode, for any number of rows.

It must do 2·M·N·K FLOPs (or read the weights, for few rows). A library picks another kernel, or another split of
k, for another M, and floating-point sums change with their order (He 2025, "Defeating Nondeterminism in LLM
Inference"). Here k runs from 0 to K in one program, in the same steps for every M; a row's place in its tile
decides only which lane computes it. For few rows the weights take the place of the rows in the instruction (out
transposed = W·xᵀ), whose least height is 64, and x that of its columns, of which 16 are enough: a program then
reads little but weights, at the library's rate and 1.7 to 2.5 times as fast as otherwise on an H200. A cell's
products are added up in the same way (a GPU test holds it to that).

Where ranks hold parts of k, bits would depend on how many ranks there are. So k may be added up in `parts`, whose
sums are added in pairs: two ranks then have the two halves of one rank's tree (Zhang et al. 2025, "Deterministic
Inference across Tensor Parallel Sizes"). Each part has programs of its own: with few rows they fill the device, and
a matrix of 4096 × 14336 times one row takes 29 µs on an H200.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.collective.one_shot import add_in_pairs
from cumulo.kernels.cuda.linear.skinny_linear import widen
from cumulo.layout.equal_sums import parts_within

GROUP = 8
_BLOCK = 1024
_ROWS_AT_ONCE = 512  # of a product in parts: their sums stay in the cache until they are added


@dataclass(frozen=True, slots=True)
class InvariantConfig:
    """Tile sizes and pipeline. Only block_k bears on the bits of a result; below all but float32's are equal.
    `swapped`: the weights are the instruction's rows, and x its columns."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool = False


MANY_ROWS = InvariantConfig(128, 256, 64, 8, 4)  # the tensor cores' favourite shape: 64×256 a warpgroup
SOME_ROWS = InvariantConfig(128, 128, 64, 4, 4, swapped=True)
FEW_ROWS = InvariantConfig(64, 64, 64, 4, 6)
LONG_COLUMN = InvariantConfig(16, 128, 64, 8, 6, swapped=True)
SHORT_COLUMN = InvariantConfig(16, 64, 64, 4, 8, swapped=True)
FLOAT32 = InvariantConfig(64, 64, 32, 8, 2)  # no wide matrix unit for exact float32


def config_for(m: int, n: int, dtype: torch.dtype, parts: int = 1) -> InvariantConfig:
    """Chosen by measurement on an H200: the largest tiles of which there are enough to occupy it."""
    if dtype == torch.float32:
        return FLOAT32

    def tiles(config: InvariantConfig) -> int:
        return int(triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * parts)

    if m <= 32:
        column = LONG_COLUMN if triton.cdiv(n, LONG_COLUMN.block_n) * parts >= 40 else SHORT_COLUMN
        return column if m <= 16 else replace(column, block_m=32)
    if m > 64 and tiles(MANY_ROWS) >= 128:
        return MANY_ROWS
    return SOME_ROWS if m > 64 and tiles(SOME_ROWS) >= 90 else FEW_ROWS


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@triton.jit(do_not_specialize=["M"])
def _invariant_matmul_kernel(x, weight, out, bias, scales, residual, M, N, K, stride_xm, stride_xk, stride_wn,
                             stride_wk, stride_out, stride_residual, stride_part, BIAS: tl.constexpr,
                             SCALED: tl.constexpr, RESIDUAL: tl.constexpr, EVEN_K: tl.constexpr,
                             PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                             BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr):  # fmt: skip
    # Programs that run together share rows of x and W: they go down GROUP row tiles before the next column tile.
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_group = GROUP * tiles_n
    first_m = tl.program_id(0) // per_group * GROUP
    height = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + (tl.program_id(0) % per_group) % height
    tile_n = (tl.program_id(0) % per_group) // height
    m_offsets = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n_offsets = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end compute others again and are not stored: no masks in the loop. Not all of them the same one:
    # loads of one address wait for each other.
    m_safe = (m_offsets % M).to(tl.int64)
    n_safe = tl.minimum(n_offsets, N - 1).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    x_tile = x + m_safe[:, None] * stride_xm + columns[None, :] * stride_xk
    w_tile = weight + n_safe[:, None] * stride_wn + columns[None, :] * stride_wk
    part = tl.program_id(1)
    first = tl.multiple_of(part * (K // PARTS), BLOCK_K)
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(first, first + K // PARTS, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_tile + k * stride_xk)
            b = tl.load(w_tile + k * stride_wk)
        else:
            inside = (k + columns < K)[None, :]
            a = tl.load(x_tile + k * stride_xk, mask=inside, other=0.0)
            b = tl.load(w_tile + k * stride_wk, mask=inside, other=0.0)
        if SWAPPED:
            acc = tl.dot(widen(b, a.dtype), tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(widen(b, a.dtype)), acc, input_precision="ieee")
    if SWAPPED:
        acc = tl.trans(acc)
    if SCALED:
        acc *= tl.load(scales + n_safe)[None, :]
    if BIAS:
        if part == 0:
            acc += tl.load(bias + n_safe).to(tl.float32)[None, :]
    out += part.to(tl.int64) * stride_part
    mask = (m_offsets < M)[:, None] & (n_offsets < N)[None, :]
    if RESIDUAL:
        places = residual + m_offsets.to(tl.int64)[:, None] * stride_residual + n_offsets[None, :]
        acc = acc.to(x.dtype.element_ty).to(tl.float32) + tl.load(places, mask=mask, other=0.0).to(tl.float32)
    places = out + m_offsets.to(tl.int64)[:, None] * stride_out + n_offsets[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_parts(sums, out, residual, x, N, elements, stride_part, stride_out, stride_residual,
               RESIDUAL: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.zeros((BLOCK,), tl.float32)
    one, two, four = total, total, total
    for part in tl.static_range(PARTS):
        total = tl.load(sums + part * stride_part + at, mask=inside, other=0.0)
        total, one, two, four = add_in_pairs(total, part, one, two, four, PARTS)
    row, column = (at // N).to(tl.int64), at % N
    if RESIDUAL:
        added = tl.load(residual + row * stride_residual + column, mask=inside, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty).to(tl.float32) + added
    tl.store(out + row * stride_out + column, total.to(out.dtype.element_ty), mask=inside)


def invariant_matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    residual: Tensor | None = None,
    parts: int = 1,
    config: InvariantConfig | None = None,
) -> Tensor:
    """x [M, K] times weight [N, K] transposed, both of any strides; `scales` [N] for weights in e4m3. `residual`,
    which may be `out`, is added to the rounded product. `parts`: of k, added in pairs (`layout/equal_sums.py`);
    half as many where they would not be whole steps of the loop."""
    (m, k), n = x.shape, weight.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    block_k = (config or config_for(m, n, x.dtype)).block_k
    parts = parts_within(k, parts, block_k)
    if parts == 1:
        if m:
            _multiply(x, weight, out, bias, scales, residual, 1, config)
        return out
    sums = torch.empty((parts, min(m, _ROWS_AT_ONCE), n), dtype=torch.float32, device=x.device)
    for first in range(0, m, _ROWS_AT_ONCE):
        rows = slice(first, min(m, first + _ROWS_AT_ONCE))
        _multiply(x[rows], weight, sums[0], bias, scales, None, parts, config)
        onto = None if residual is None else residual[rows]
        _add_parts[(triton.cdiv(sums[0].numel(), _BLOCK),)](
            sums, out[rows], out if onto is None else onto, x, n, n * (rows.stop - first), sums.stride(0),
            out.stride(0), 0 if onto is None else onto.stride(0), RESIDUAL=onto is not None, PARTS=parts,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def _multiply(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, scales: Tensor | None, residual: Tensor | None,
    parts: int, config: InvariantConfig | None,
) -> None:  # fmt: skip
    """Each part's sum in an `out` of its own, one behind the other."""
    (m, k), n = x.shape, weight.shape[0]
    if config is None:
        config = config_for(m, n, x.dtype, parts)
    _invariant_matmul_kernel[(triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n), parts)](
        x,
        weight,
        out,
        x if bias is None else bias,
        x if scales is None else scales,
        x if residual is None else residual,
        m,
        n,
        k,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        out.numel(),
        BIAS=bias is not None,
        SCALED=scales is not None,
        RESIDUAL=residual is not None,
        EVEN_K=k % config.block_k == 0,
        PARTS=parts,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=GROUP,
        SWAPPED=config.swapped,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
