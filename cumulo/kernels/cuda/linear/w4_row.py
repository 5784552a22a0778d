"""w4_row: one row of x times a 4-bit weight, as when a single sequence decodes. `linear` calls it.

Half a byte a weight leaves the multiprocessors about three instructions for each before they, not the memory, take
the time. So a code becomes a float by one masking: in bits 8 to 11 or 12 to 15 of a float's mantissa it is added to
2^15 or 2^11. What these powers add to a word's product depends on x alone and is taken off word by word, in
float32: it costs a few of 24 bits. As in small_linear, a program owns a few output rows, loads are asked for one
tile ahead, RMSNorm comes out of the same loop, and a gate row and its up row are one program's.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.linear.small_linear import _at_rows


@dataclass(frozen=True, slots=True)
class W4RowConfig:
    """Output rows and steps of 128 columns that a program holds at once, and its warps."""

    rows: int
    steps: int
    num_warps: int


# A thread holds eight words of a row and the sixteen-byte pieces of x that they meet: as many steps as threads for
# eight words each, so that both lie with the same thread.
CANDIDATES = tuple(
    W4RowConfig(rows, 8 * warps, warps)
    for warps in (2, 4, 1)
    for rows in ((4, 8, 2) if warps > 1 else (4, 8))
)


def default_config(n: int, k: int, swiglu: bool) -> W4RowConfig:
    warps = 4 if k >= 8192 else 2
    while warps > 1 and 8 * warps > k // 128:
        warps //= 2
    return W4RowConfig(2 if swiglu or n <= 8192 else 4, 8 * warps, warps)


@triton.jit
def _load_words(words, rows, steps, step, row_mask, STEPS: tl.constexpr, MASKED_N: tl.constexpr,
                MASKED_K: tl.constexpr):  # fmt: skip
    """[ROWS, STEPS, 32] of words from step `step` on."""
    inside = step + tl.arange(0, STEPS)
    places = (rows // 64).to(tl.int64) * steps * 2048 + (rows % 64) * 32
    places = places[:, None, None] + inside[None, :, None] * 2048 + tl.arange(0, 32)[None, None, :]
    mask = (row_mask[:, None, None] | (not MASKED_N)) & ((inside < steps)[None, :, None] | (not MASKED_K))
    if MASKED_N or MASKED_K:
        tile = tl.load(words + places, mask=mask, other=0, eviction_policy="evict_first")
    else:
        tile = tl.load(words + places, eviction_policy="evict_first")
    return tile


@triton.jit
def _load_scales(scales, rows, step, steps, row_mask, N, PART: tl.constexpr, PARTS: tl.constexpr,
                 STEPS: tl.constexpr):  # fmt: skip
    inside = step + tl.arange(0, STEPS)
    places = (inside * PARTS + PART)[None, :] * N + rows[:, None]
    return tl.load(scales + places, mask=row_mask[:, None] & (inside < steps)[None, :], other=0.0)[:, :, None]


@triton.jit
def _x_of_place(x, norm_weight, step, steps, j: tl.constexpr, squares, STEPS: tl.constexpr, NORM: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """[STEPS, 32]: the columns that the codes in place j meet, normed but for the row's factor."""
    inside = step + tl.arange(0, STEPS)
    columns = inside[:, None] * 128 + 32 * j + tl.arange(0, 32)[None, :]
    if MASKED:
        mask = (inside < steps)[:, None]
        values = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        values = tl.load(x + columns).to(tl.float32)
    if NORM:
        squares += values * values
        if MASKED:
            values *= tl.load(norm_weight + columns, mask=mask, other=0.0).to(tl.float32)
        else:
            values *= tl.load(norm_weight + columns).to(tl.float32)
    return values, squares


# One instruction for "and this, or that": written in two, the compiler makes two of it.
_AT_8 = tl.constexpr("lop3.b32 $0, $1, 0x0f00, 0x47000000, 0xea;")
_AT_12 = tl.constexpr("lop3.b32 $0, $1, 0xf000, 0x45000000, 0xea;")


@triton.jit
def _at_8(bits, NATIVE: tl.constexpr):
    """The code in bits 8 to 11, plus 2^15."""
    if NATIVE:
        found = tl.inline_asm_elementwise(_AT_8, "=r,r", [bits], dtype=tl.float32, is_pure=True, pack=1)
    else:
        found = (bits & 0x0F00 | 0x47000000).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _at_12(bits, NATIVE: tl.constexpr):
    """The code in bits 12 to 15, plus 2^11."""
    if NATIVE:
        found = tl.inline_asm_elementwise(_AT_12, "=r,r", [bits], dtype=tl.float32, is_pure=True, pack=1)
    else:
        found = (bits & 0xF000 | 0x45000000).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _add_words(acc, words, x0, x1, x2, x3, scales, minimums, rows, step, steps, row_mask, N, GROUP: tl.constexpr,
               STEPS: tl.constexpr, AFFINE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """acc [ROWS, STEPS, 32] plus the products of a tile of words, scaled."""
    PARTS: tl.constexpr = 128 // GROUP
    P15: tl.constexpr = 32768.0 if AFFINE else 32776.0
    P11: tl.constexpr = 2048.0 if AFFINE else 2056.0
    bits = words.to(tl.int32)
    lower = bits << 8
    # A product begins with what the powers will add to it, so that all the rest is multiply-adds.
    less0, less1, less2, less3 = -P15 * x0, -P11 * x1, -P15 * x2, -P11 * x3
    if PARTS == 1:
        p = ((less0 + less1) + (less2 + less3))[None, :, :] + _at_8(lower, NATIVE) * x0[None, :, :]
    elif PARTS == 2:
        p = (less0 + less1)[None, :, :] + _at_8(lower, NATIVE) * x0[None, :, :]
    else:
        p = less0[None, :, :] + _at_8(lower, NATIVE) * x0[None, :, :]
        acc += p * _load_scales(scales, rows, step, steps, row_mask, N, 0, PARTS, STEPS)
        p = tl.zeros_like(p) + less1[None, :, :]
    p += _at_12(lower, NATIVE) * x1[None, :, :]
    if PARTS >= 2:
        acc += p * _load_scales(scales, rows, step, steps, row_mask, N, PARTS // 2 - 1, PARTS, STEPS)
        p = tl.zeros_like(p) + ((less2 + less3) if PARTS == 2 else less2)[None, :, :]
    p += _at_8(bits, NATIVE) * x2[None, :, :]
    if PARTS == 4:
        acc += p * _load_scales(scales, rows, step, steps, row_mask, N, 2, PARTS, STEPS)
        p = tl.zeros_like(p) + less3[None, :, :]
    p += _at_12(bits, NATIVE) * x3[None, :, :]
    acc += p * _load_scales(scales, rows, step, steps, row_mask, N, PARTS - 1, PARTS, STEPS)
    if AFFINE:
        if PARTS == 1:
            total = (x0 + x1) + (x2 + x3)
            acc += _load_scales(minimums, rows, step, steps, row_mask, N, 0, 1, STEPS) * total[None, :, :]
        elif PARTS == 2:
            acc += _load_scales(minimums, rows, step, steps, row_mask, N, 0, 2, STEPS) * (x0 + x1)[None, :, :]
            acc += _load_scales(minimums, rows, step, steps, row_mask, N, 1, 2, STEPS) * (x2 + x3)[None, :, :]
        else:
            acc += _load_scales(minimums, rows, step, steps, row_mask, N, 0, 4, STEPS) * x0[None, :, :]
            acc += _load_scales(minimums, rows, step, steps, row_mask, N, 1, 4, STEPS) * x1[None, :, :]
            acc += _load_scales(minimums, rows, step, steps, row_mask, N, 2, 4, STEPS) * x2[None, :, :]
            acc += _load_scales(minimums, rows, step, steps, row_mask, N, 3, 4, STEPS) * x3[None, :, :]
    return acc


@triton.jit
def _w4_row_kernel(x, words, scales, minimums, out, norm_weight, residual, bias, OUTPUTS, N, eps, K: tl.constexpr,
                   GROUP: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, EVEN_N: tl.constexpr,
                   NORM: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
                   AFFINE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    steps: tl.constexpr = K // 128
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    up_rows = rows + OUTPUTS
    row_mask = rows < OUTPUTS
    acc = tl.zeros([ROWS, STEPS, 32], tl.float32)
    up = acc
    squares = tl.zeros([STEPS, 32], tl.float32)
    # One tile ahead: a tile's loads are on their way while the one before is multiplied.
    next_w = _load_words(words, rows, steps, 0, row_mask, STEPS, not EVEN_N, steps < STEPS)
    next_u = next_w
    if SWIGLU:
        next_u = _load_words(words, up_rows, steps, 0, row_mask, STEPS, not EVEN_N, steps < STEPS)
    gate_bias = _at_rows(bias, rows, row_mask, BIAS)
    up_bias = _at_rows(bias, up_rows, row_mask, BIAS and SWIGLU)
    added = _at_rows(residual, rows, row_mask, RESIDUAL)
    for step in tl.static_range(0, steps, STEPS):
        w, u = next_w, next_u
        if step + STEPS < steps:
            next_w = _load_words(
                words, rows, steps, step + STEPS, row_mask, STEPS, not EVEN_N, step + 2 * STEPS > steps
            )
            if SWIGLU:
                next_u = _load_words(
                    words, up_rows, steps, step + STEPS, row_mask, STEPS, not EVEN_N, step + 2 * STEPS > steps
                )
        x0, squares = _x_of_place(x, norm_weight, step, steps, 0, squares, STEPS, NORM, step + STEPS > steps)
        x1, squares = _x_of_place(x, norm_weight, step, steps, 1, squares, STEPS, NORM, step + STEPS > steps)
        x2, squares = _x_of_place(x, norm_weight, step, steps, 2, squares, STEPS, NORM, step + STEPS > steps)
        x3, squares = _x_of_place(x, norm_weight, step, steps, 3, squares, STEPS, NORM, step + STEPS > steps)
        acc = _add_words(acc, w, x0, x1, x2, x3, scales, minimums, rows, step, steps, row_mask, N, GROUP,
                         STEPS, AFFINE, NATIVE)  # fmt: skip
        if SWIGLU:
            up = _add_words(up, u, x0, x1, x2, x3, scales, minimums, up_rows, step, steps, row_mask, N,
                            GROUP, STEPS, AFFINE, NATIVE)  # fmt: skip
    y = tl.sum(tl.reshape(acc, [ROWS, STEPS * 32]), axis=1)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.reshape(squares, [STEPS * 32]), axis=0) / K + eps)
        y *= factor
    if BIAS:
        y += gate_bias
    if SWIGLU:
        z = tl.sum(tl.reshape(up, [ROWS, STEPS * 32]), axis=1)
        if NORM:
            z *= factor
        if BIAS:
            z += up_bias
        y = y * tl.sigmoid(y) * z
    if RESIDUAL:
        y += added
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=row_mask)


def w4_row(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    group: int,
    out: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
    config: W4RowConfig | None = None,
) -> Tensor:
    """x [1, K] times the weight that a `W4Weight` holds into `out`, which may be `residual`."""
    k, n = x.shape[1], scales.shape[1]
    outputs = n // 2 if swiglu else n
    if config is None:
        config = default_config(n, k, swiglu)
    _w4_row_kernel[(triton.cdiv(outputs, config.rows),)](
        x,
        words,
        scales,
        scales if minimums is None else minimums,
        out,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        x if bias is None else bias,
        outputs,
        n,
        eps,
        K=k,
        GROUP=group,
        ROWS=config.rows,
        STEPS=config.steps,
        EVEN_N=outputs % config.rows == 0,
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        AFFINE=minimums is not None,
        NATIVE=x.is_cuda,
        num_warps=config.num_warps,
    )
    return out
