"""w4_dot: the product of one to eight rows with 4-bit weights, from memory through registers to the tensor cores.
`linear` calls it where the table of winners says so.

Must move half a byte a weight. As in `few_dot`, rows of W are the tall side of the tensor cores' smallest product,
and a thread keeps what it asked for: the 16 bytes that it reads of a row of a piece (w4_weight.py) are 8 words, and
the codes in one place of 8 words are 8 neighbouring columns, which is just what the operand's layout (`k_width` 8)
wants of one thread. So codes are unpacked where they lie, and no weight passes through shared memory; Marlin
(Frantar et al. 2024) lays weights out for the same end. A code in the last bits of 128 is 128 and the code, in two
instructions for two weights; what is too much of it is the sum of x, times 128, which the tensor cores add up too.

Rows of x, times the norm's gains, are in shared memory: every warp wants its part in another order than it comes.
Warps share k in steps of 128 columns; their sums meet behind the second barrier. Weights are asked for before the
kernel ahead has ended (early.py). No interpreter plays Gluon: tests play this kernel with stand-ins.
"""

from dataclasses import dataclass
from itertools import product

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.early import early
from cumulo.kernels.cuda.linear.few_dot import (
    biases,
    rotation_arguments,
    rotation_of,
    rows_of_tile,
    store,
)
from cumulo.kernels.cuda.linear.product import Product
from cumulo.kernels.cuda.linear.w4_weight import STEP, W4Weight

MAX_ROWS = 8
_MOST_SHARED = 96 << 10  # bytes of x for each program: two of them fit a multiprocessor
_all_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed behind Triton 3.6


def takes(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """One row is kept once in shared memory, several as eight."""
    return m <= MAX_ROWS and 2 * k * (1 if m == 1 else MAX_ROWS) <= _MOST_SHARED and dtype == torch.bfloat16


@dataclass(frozen=True, slots=True)
class W4DotConfig:
    """`rows` of W for each program, 16 or a multiple; products of two halves (SwiGLU, rotation) take half the rows
    from each. How many warps share k, a slice each, and how many steps of 128 columns ahead a slice's weights are
    asked for. `waits_first`: see early.py."""

    rows: int
    slices: int
    ahead: int
    early: bool = True
    waits_first: bool = False


def candidates(k: int) -> list[W4DotConfig]:
    """What is worth timing: weights of up to 128 registers on their way."""
    found = []
    for rows, slices in product((16, 32, 64), (4, 8, 16)):
        steps = triton.cdiv(k // STEP, slices)
        for ahead in sorted({min(steps, each) for each in (2, 256 // rows)}):
            if rows // 2 * ahead <= 128 and STEP * slices < 2 * k:
                found.append(W4DotConfig(rows, slices, ahead))
    return found


def wins(m: int, k: int, swiglu: bool = False) -> bool:
    """Against `w4`, in chains of the layers of five models of 0.6 to 70 billion weights on an H200. Several rows in
    shared memory leave room for few programs, and gate and up have many; long rows give a program enough to do for
    `w4`'s copies through shared memory to be hidden."""
    if not takes(m, k):
        return False
    return (k <= 4096 if swiglu else k < 16384) if m == 1 else not swiglu


def default_config(m: int, n: int, k: int, swiglu: bool = False, rotated_dim: int = 0) -> W4DotConfig:
    """As those models were fastest, within 2% but for gate and up of 3072 columns (8%). `rotated_dim`: of the heads
    that are rotated, or 0."""
    if m > 1:
        return W4DotConfig(32, 4, 2) if rotated_dim or n > k else W4DotConfig(32, 16, 2)
    if swiglu:
        return W4DotConfig(32, 8, 2)
    if k >= 8192:
        return W4DotConfig(32, 16, 2)
    if rotated_dim and rotated_dim % 64 == 0:
        return W4DotConfig(64, 8, 4)
    return W4DotConfig(32, 4, 2) if rotated_dim or k <= 1024 else W4DotConfig(16, 8, 4)


# Two words become four pairs of bfloat16, place by place.
_PLACES = gl.constexpr("""{
.reg .b32 rest;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 4;
lop3.b32 $1, rest, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 8;
lop3.b32 $2, rest, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 12;
lop3.b32 $3, rest, 0x000f000f, 0x43004300, 0xea;
}""")


@gluon.jit
def _places(words):
    """The codes in the four places of a tile of words, plus 128."""
    return gl.inline_asm_elementwise(
        _PLACES,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _step(pointers, piece, stride, step: gl.constexpr, SIZE: gl.constexpr, SLICES: gl.constexpr):
    """A step of all slices; zeros behind the last column."""
    piece = piece + step * SLICES
    if (step + 1) * SLICES > SIZE:
        found = gl.load(pointers + piece * stride, mask=piece < SIZE, other=0)
    else:
        found = gl.load(pointers + piece * stride)
    return found


@gluon.jit(do_not_specialize=["M"])
def _w4_dot_kernel(x, words, scales, out, norm_weight, residual, bias, cos, sin, positions, slots, keys, values, M,
                   OUTPUTS, N, stride_x, stride_out, stride_residual, block_stride, head_stride, eps,
                   K: gl.constexpr, LINES: gl.constexpr, TILE: gl.constexpr, SLICES: gl.constexpr,
                   AHEAD: gl.constexpr, NORM: gl.constexpr, SWIGLU: gl.constexpr, RESIDUAL: gl.constexpr,
                   BIAS: gl.constexpr, DIM: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
                   PAGE: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    PAIRED: gl.constexpr = SWIGLU or DIM > 0
    KEPT: gl.constexpr = TILE // 2 if PAIRED else TILE  # rows of the output
    SIZE: gl.constexpr = K // 128
    STEPS: gl.constexpr = (SIZE + SLICES - 1) // SLICES
    EXCESS: gl.constexpr = 136.0  # of what a code becomes over what it stands for
    DOT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 1, 1], [1, 16, 8])
    OF_W: gl.constexpr = gl.DotOperandLayout(0, DOT, 8)
    OF_X: gl.constexpr = gl.DotOperandLayout(1, DOT, 8)
    COMING: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, SLICES, 1], [2, 1, 0])  # x from memory
    # Of the sums: every thread has all slices of its cells.
    ENDS: gl.constexpr = gl.BlockedLayout(
        [SLICES, 1, 1], [1, 8, 4], [1, (num_warps + 1) // 2, 2 if num_warps > 1 else 1], [1, 2, 0]
    )
    CELLS: gl.constexpr = gl.SliceLayout(0, ENDS)

    tile = gl.program_id(0)
    first = tile * KEPT
    head = 0
    apart = OUTPUTS
    if DIM > 0:
        head = first // (DIM // 2)
        first = head * DIM + first % (DIM // 2)
        apart = DIM // 2
    row = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, OF_W)))[None, :, None]
    row = rows_of_tile(first, row, OUTPUTS, KEPT, SWIGLU, DIM)
    scaled = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, DOT)))[None, :, None]
    scaled = rows_of_tile(first, scaled, OUTPUTS, KEPT, SWIGLU, DIM)
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, OF_W)))[None, None, :]
    w_rows = words + ((row // 64).to(gl.int64) * (SIZE * 2048) + (row % 64) * 32 + word)
    w_piece = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, OF_W)))[:, None, None]
    s_piece = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, DOT)))[:, None, None]
    tiles = ()
    scale = ()
    for step in gl.static_range(AHEAD):
        tiles = tiles + (_step(w_rows, w_piece, 2048, step, SIZE, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
    for step in gl.static_range(AHEAD):
        scale = scale + (_step(scales + scaled, s_piece, N, step, SIZE, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
    x_line = gl.arange(0, LINES, gl.SliceLayout(1, gl.SliceLayout(2, COMING)))[:, None, None]
    x_piece = gl.arange(0, SLICES, gl.SliceLayout(0, gl.SliceLayout(2, COMING)))[None, :, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, COMING)))[None, None, :]
    gains = ()
    if NORM:
        for step in gl.static_range(STEPS):
            gains = gains + (_step(norm_weight + column, x_piece, 128, step, SIZE, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
    out_row = gl.arange(0, KEPT, gl.SliceLayout(1, CELLS))[:, None]
    line = gl.arange(0, LINES, gl.SliceLayout(0, CELLS))[None, :]
    safe = first + out_row
    if DIM == 0:
        safe = gl.minimum(safe, OUTPUTS - 1)
    low_bias, high_bias = biases(bias, safe, apart, BIAS, PAIRED)
    # So far nothing that the kernels before this one compute was read.
    if EARLY == 1:
        gdc_launch_dependents()
    if EARLY > 0:
        gdc_wait()
    if EARLY == 2:
        gdc_launch_dependents()

    lines = gl.minimum(line, M - 1)
    slot, position = lines, lines
    if DIM > 0:  # asked for first: what they lead to is asked for behind x
        slot = gl.load(slots + lines)
        position = gl.load(positions + lines)
    x_rows = x + gl.minimum(x_line, M - 1) * stride_x + column
    inputs = ()
    for step in gl.static_range(STEPS):
        inputs = inputs + (_step(x_rows, x_piece, 128, step, SIZE, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
    mask = (safe == first + out_row) & (line < M)
    added = gl.zeros([KEPT, LINES], gl.float32, CELLS)
    if RESIDUAL:
        added = gl.load(residual + lines * stride_residual + safe, mask=mask, other=0.0).to(gl.float32)
    turn, turn_back = rotation_of(cos, sin, position, added, head, first, out_row, DIM, HEADS, KV_HEADS)

    squares = gl.zeros([LINES, SLICES, 128], gl.float32, COMING)
    held = ()
    for step in gl.static_range(STEPS):
        numbers_of_x = inputs[step]  # type: ignore[var-annotated]
        if NORM:
            wide = numbers_of_x.to(gl.float32)  # type: ignore[var-annotated]
            squares += wide * wide
            numbers_of_x = (wide * gains[step].to(gl.float32)).to(x.dtype.element_ty)
        # A piece of shared memory for each step: stores to one piece would wait for each other.
        shared = gl.allocate_shared_memory(  # type: ignore[var-annotated]
            x.dtype.element_ty, [LINES, SLICES, 128], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
        shared.store(numbers_of_x)
        held = held + (shared,)  # type: ignore[assignment]  # noqa: RUF005
    of_squares = gl.allocate_shared_memory(
        gl.float32, [LINES, SLICES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    sums = gl.allocate_shared_memory(
        gl.float32, [SLICES, TILE, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    if NORM:
        of_squares.store(gl.sum(squares, axis=2))
    _all_threads()

    nothing = gl.zeros([SLICES, TILE, 8], gl.float32, DOT)
    ones = gl.full([SLICES, TILE, 32], 1.0, x.dtype.element_ty, OF_W)
    acc = nothing
    for step in gl.static_range(STEPS):
        if step + AHEAD < STEPS:
            tiles = tiles + (_step(w_rows, w_piece, 2048, step + AHEAD, SIZE, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
            scale = scale + (_step(scales + scaled, s_piece, N, step + AHEAD, SIZE, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
        codes = _places(tiles[step])  # type: ignore[var-annotated]
        of_group, of_ones = nothing, nothing
        for place in gl.static_range(4):
            mine = held[step].slice(32 * place, 32, 2).permute([1, 2, 0]).load(OF_X)  # type: ignore[var-annotated]
            if LINES == 1:
                mine = mine.broadcast_to([SLICES, 32, 8])
            of_group = mma_v2(codes[place], mine, of_group)
            of_ones = mma_v2(ones, mine, of_ones)
        acc = acc + (of_group - EXCESS * of_ones) * scale[step]
    sums.store(acc)
    _all_threads()
    kept = sums.slice(0, LINES, 2)  # type: ignore[var-annotated]
    y = gl.sum(kept.slice(0, KEPT, 1).load(ENDS), axis=0)
    z = y
    if PAIRED:
        z = gl.sum(kept.slice(KEPT, KEPT, 1).load(ENDS), axis=0)
    if NORM:
        square = gl.sum(gl.expand_dims(of_squares.permute([1, 0]).load(gl.SliceLayout(1, ENDS)), 1), axis=0)
        rstd = gl.rsqrt(square / K + eps)
        y = y * rstd
        z = z * rstd
    places = out + line * stride_out + safe
    store(
        y, z, low_bias, high_bias, added, turn, turn_back, places, keys, values, slot, mask, line < M, head, first,
        out_row, block_stride, head_stride, SWIGLU, DIM, HEADS, KV_HEADS, PAGE,
    )  # fmt: skip


def launch(product: Product, config: W4DotConfig | None) -> None:
    """Computes up to 8 rows of bfloat16."""
    m, n, k = product.sizes
    x, weight, rotation, swiglu = product.x, product.weight, product.rotation, product.swiglu
    assert isinstance(weight, W4Weight)
    if not takes(m, k, x.dtype):
        raise ValueError(
            f"w4_dot takes up to {MAX_ROWS} rows of bfloat16 that shared memory can hold, not {m} rows of {k} in "
            f"{x.dtype}"
        )
    if config is None:
        config = default_config(m, n, k, swiglu, 0 if rotation is None else rotation.dim)
    paired = swiglu or rotation is not None
    kept = config.rows // 2 if paired else config.rows
    turned, strides, of_heads = rotation_arguments(rotation, x, kept)
    _w4_dot_kernel[(triton.cdiv(n // 2 if paired else n, kept),)](
        x,
        weight.words,
        weight.scales,
        *product.tensors,
        *turned,
        m,
        product.outputs,
        n,
        *product.strides,
        *strides,
        product.eps,
        K=k,
        LINES=1 if m == 1 else MAX_ROWS,
        TILE=config.rows,
        SLICES=config.slices,
        AHEAD=min(config.ahead, triton.cdiv(k // STEP, config.slices)),
        **product.flags,
        **of_heads,
        num_warps=config.slices,
        **early(config.early, x, config.waits_first),
    )
