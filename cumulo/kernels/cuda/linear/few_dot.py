"""few_dot: y = x·Wᵀ for one to eight rows of x on the tensor cores, as when drafts are verified. `linear` calls it
where the table of winners says so.

Must move the weights once. Rows of W are the tall side of the tensor cores' smallest product (16 × 8 × 16) and rows
of x its 8 columns, so eight rows of x cost what one costs, and nothing is unpacked: plain multiply-adds need two
instructions or more for each weight and row of x. Each thread asks for 16 bytes of a row of W at once and keeps
them: which columns of k meet in one product does not matter as long as W and x agree, so the operands' own layout
with 8 neighbours in k (`k_width`) lets weights go from memory to the tensor cores without shared memory. Warps
share k in steps of 32 columns; their sums meet in shared memory, behind the only barrier.

Weights are asked for before the kernel ahead has ended (early.py), all of them. Written in Gluon, because Triton
chooses layouts itself. No interpreter plays Gluon: tests play this kernel with stand-ins.
"""

from dataclasses import dataclass
from itertools import product

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.early import early
from cumulo.kernels.cuda.linear.dot_ending import (
    biases,
    rotation_arguments,
    rotation_of,
    rows_of_tile,
    store,
)
from cumulo.kernels.cuda.linear.rotation import PagedRotation

MAX_ROWS = 8
STEP = 32  # columns of k that a warp takes at once: 8 for each of 4 threads
_LONGEST = 8192  # row, of which 16 warps keep all in registers


def takes(m: int, k: int) -> bool:
    return m <= MAX_ROWS and k % 8 == 0 and k <= _LONGEST


_all_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed behind Triton 3.6


@dataclass(frozen=True, slots=True)
class DotConfig:
    """`rows` of W for each program, 16 or a multiple, and how many of its warps share k; the others share the rows.
    Products of two halves (SwiGLU, rotation) take half the rows from each. `waits_first`: see early.py."""

    rows: int
    slices: int
    num_warps: int
    early: bool = True
    waits_first: bool = False


def candidates(m: int, n: int, k: int, paired: bool = False) -> list[DotConfig]:
    """What is worth timing: 2 to 12 steps of k for each warp, whose weights are in registers all at once."""
    found = []
    for rows, slices, across in product((16, 32), (1, 2, 4, 8, 16), (1, 2)):
        steps = triton.cdiv(k, STEP * slices)
        registers = steps * 8 * (rows // 16 // across)
        if rows // 16 >= across and slices * across <= 16 and 2 <= steps <= 24 and 16 <= registers <= 128:
            found += [DotConfig(rows, slices, slices * across, True, first) for first in (False, True)]
    return found


def default_config(m: int, n: int, k: int, paired: bool = False) -> DotConfig:
    """As three models' shapes were fastest in chains of their layers. Short rows: four warps have eight steps each
    or fewer. Long ones: warps share what registers cannot hold."""
    if k <= 1024:
        return DotConfig(32, 4, 4)
    slices = 8 if k <= 4096 else 16
    return DotConfig(16, slices, slices)


def rotating_config() -> DotConfig:
    """Of queries, keys and values that are rotated: attention is behind it, which gains nothing from being let in
    sooner."""
    return DotConfig(32, 4, 4, waits_first=True)


@gluon.jit
def _columns(pointers, column, step: gl.constexpr, K: gl.constexpr, SLICES: gl.constexpr):
    """A step of all slices; behind the last column zeros."""
    column = column + step * 32 * SLICES
    if (step + 1) * 32 * SLICES > K:
        found = gl.load(pointers + column, mask=column < K, other=0.0)
    else:
        found = gl.load(pointers + column)
    return found


@gluon.jit(do_not_specialize=["M"])
def _few_dot_kernel(x, weight, out, norm_weight, residual, bias, rows_of, cos, sin, positions, slots, keys, values,
                    M, OUTPUTS, stride_x, stride_weight, stride_out, stride_residual, block_stride, head_stride,
                    eps, K: gl.constexpr, TILE: gl.constexpr, SLICES: gl.constexpr,
                    NORM: gl.constexpr, SWIGLU: gl.constexpr, RESIDUAL: gl.constexpr, BIAS: gl.constexpr,
                    PICK: gl.constexpr, DIM: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
                    PAGE: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    PAIRED: gl.constexpr = SWIGLU or DIM > 0
    KEPT: gl.constexpr = TILE // 2 if PAIRED else TILE  # rows of the output
    STEPS: gl.constexpr = (K + 32 * SLICES - 1) // (32 * SLICES)
    LINES: gl.constexpr = 8
    ACROSS: gl.constexpr = num_warps // SLICES
    DOT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, ACROSS, 1], [1, 16, 8])
    OF_W: gl.constexpr = gl.DotOperandLayout(0, DOT, 8)
    OF_X: gl.constexpr = gl.DotOperandLayout(1, DOT, 8)
    # Of the sums: every thread has all slices of its cells.
    ENDS: gl.constexpr = gl.BlockedLayout(
        [SLICES, 1, 1], [1, 8, 4], [1, (num_warps + 1) // 2, 2 if num_warps > 1 else 1], [1, 2, 0]
    )
    CELLS: gl.constexpr = gl.SliceLayout(0, ENDS)

    # Where the rows of this program are. The second half of a tile belongs to the first, row by row.
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
    w_rows = weight + row.to(gl.int64) * stride_weight
    w_column = (
        gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, OF_W)))[:, None, None] * 32
        + gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, OF_W)))[None, None, :]
    )
    x_column = (
        gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, OF_X)))[:, None, None] * 32
        + gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, OF_X)))[None, :, None]
    )
    tiles = ()
    gains = ()
    for step in gl.static_range(STEPS):
        tiles = tiles + (_columns(w_rows, w_column, step, K, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
        if NORM:
            gains = gains + (_columns(norm_weight, x_column, step, K, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
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

    x_line = gl.minimum(gl.arange(0, LINES, gl.SliceLayout(0, gl.SliceLayout(1, OF_X)))[None, None, :], M - 1)
    lines = gl.minimum(line, M - 1)
    if PICK:
        x_line = gl.load(rows_of + x_line)
        lines = gl.load(rows_of + lines)
    slot, position = lines, lines
    if DIM > 0:  # asked for first: what they lead to is asked for behind x
        slot = gl.load(slots + lines)
        position = gl.load(positions + lines)
    x_rows = x + x_line * stride_x
    mask = (safe == first + out_row) & (line < M)
    inputs = ()
    for step in gl.static_range(STEPS):
        inputs = inputs + (_columns(x_rows, x_column, step, K, SLICES),)  # type: ignore[assignment]  # noqa: RUF005
    added = gl.zeros([KEPT, LINES], gl.float32, CELLS)
    if RESIDUAL:  # asked for here, or it would be waited for at the end
        added = gl.load(residual + lines * stride_residual + safe, mask=mask, other=0.0).to(gl.float32)
    turn, turn_back = rotation_of(cos, sin, position, added, head, first, out_row, DIM, HEADS, KV_HEADS)

    acc = gl.zeros([SLICES, TILE, LINES], gl.float32, DOT)
    odd = acc  # two sums take turns: a product waits for the one before it in its own
    squares = gl.zeros([SLICES, 32, LINES], gl.float32, OF_X)
    for step in gl.static_range(STEPS):
        values_of_x = inputs[step]  # type: ignore[var-annotated]
        if NORM:
            wide = values_of_x.to(gl.float32)  # type: ignore[var-annotated]
            squares += wide * wide
            values_of_x = (wide * gains[step].to(gl.float32)).to(x.dtype.element_ty)
        if step % 2 == 0:
            acc = mma_v2(tiles[step], values_of_x, acc)
        else:
            odd = mma_v2(tiles[step], values_of_x, odd)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [SLICES, TILE, LINES], PLAIN)
    sums.store(acc + odd)
    of_squares = gl.allocate_shared_memory(
        gl.float32, [SLICES, LINES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    if NORM:
        of_squares.store(gl.sum(squares, axis=1))
    _all_threads()
    y = gl.sum(sums.slice(0, KEPT, 1).load(ENDS), axis=0)
    z = y
    if PAIRED:
        z = gl.sum(sums.slice(KEPT, KEPT, 1).load(ENDS), axis=0)
    if NORM:
        square = gl.sum(gl.expand_dims(of_squares.load(gl.SliceLayout(1, ENDS)), 1), axis=0)
        rstd = gl.rsqrt(square / K + eps)
        y = y * rstd
        z = z * rstd
    places = out + line * stride_out + safe
    store(
        y, z, low_bias, high_bias, added, turn, turn_back, places, keys, values, slot, mask, line < M, head, first,
        out_row, block_stride, head_stride, SWIGLU, DIM, HEADS, KV_HEADS, PAGE,
    )  # fmt: skip


def few_dot(
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
    rotation: PagedRotation | None = None,
    config: DotConfig | None = None,
) -> Tensor:
    """x [M ≤ 8, K] times weight [N, K], both of 16 bits, K a multiple of 8; arguments as in few_linear."""
    m, k = (x.shape[0] if rows is None else len(rows)), x.shape[1]
    n = weight.shape[0]
    outputs = n // 2 if swiglu else n
    if m > MAX_ROWS or k % 8:
        raise ValueError(
            f"few_dot takes up to {MAX_ROWS} rows of whole 16 bytes, not {m} rows of {k}: use linear"
        )
    if out is None:
        out = torch.empty((m, outputs), dtype=x.dtype, device=x.device)
    paired = swiglu or rotation is not None
    if config is None:
        config = default_config(m, n, k, paired) if rotation is None else rotating_config()
    kept = config.rows // 2 if paired else config.rows
    turned, strides, of_heads = rotation_arguments(rotation, x, kept)
    _few_dot_kernel[(triton.cdiv(outputs // 2 if rotation is not None else outputs, kept),)](
        x,
        weight,
        out,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        x if bias is None else bias,
        x if rows is None else rows,
        *turned,
        m,
        outputs,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        *strides,
        eps,
        K=k,
        TILE=config.rows,
        SLICES=config.slices,
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        PICK=rows is not None,
        **of_heads,
        num_warps=config.num_warps,
        **early(config.early, x, config.waits_first),
    )
    return out
