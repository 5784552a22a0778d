"""few_dot: y = x·Wᵀ for one to eight rows of x on the tensor cores, as when drafts are verified. `linear` calls it
where the table of winners says so.

Must move the weights once. Rows of W are the tall side of the tensor cores' smallest product (16 × 8 × 16) and rows
of x its 8 columns, so eight rows of x cost what one costs, and nothing is unpacked: plain multiply-adds need two
instructions or more for each weight and row of x. Each thread asks for 16 bytes of a row of W at once and keeps
them: which columns of k meet in one product does not matter as long as W and x agree, so the operands' own layout
with 8 neighbours in k (`k_width`) lets weights go from memory to the tensor cores without shared memory. Warps
share k in steps of 32 columns; their sums meet in shared memory, behind the only barrier.

What becomes of a tile's sums is shared with w4_dot: bias, SwiGLU, residual, or rotation and pages. Of a tile whose
second half belongs to its first, row by row (SwiGLU, rotation), half the rows are kept. What these read is asked
for when it may be: a bias before the kernel ahead has ended, the rest right behind x, or it would be waited for.

Weights are asked for before the kernel ahead has ended (early.py), all of them. Written in Gluon, because Triton
chooses layouts itself. No interpreter plays Gluon: tests play this kernel with stand-ins.
"""

from dataclasses import dataclass, replace
from itertools import product

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.early import early
from cumulo.kernels.cuda.linear.product import PagedRotation, Product


def rotation_arguments(
    rotation: PagedRotation | None, near: Tensor, kept: int
) -> tuple[tuple[Tensor, ...], tuple[int, int], dict[str, int]]:
    """Tensors, strides and constants of a launch; `near` stands for those that are not read. `kept`: rows of a
    program; those of two heads would be paired wrongly."""
    if rotation is None:
        return (near,) * 6, (0, 0), {"DIM": 0, "HEADS": 0, "KV_HEADS": 0, "PAGE": 1}
    if rotation.dim // 2 % kept:
        raise ValueError(
            f"heads are rotated whose half is a multiple of {kept}, not heads of {rotation.dim}: use rope_cache"
        )
    constants = {
        "DIM": rotation.dim,
        "HEADS": rotation.heads,
        "KV_HEADS": rotation.kv_heads,
        "PAGE": rotation.block_size,
    }
    return rotation.tensors, rotation.strides, constants


@gluon.jit
def rows_of_tile(first, row, OUTPUTS, KEPT: gl.constexpr, SWIGLU: gl.constexpr, DIM: gl.constexpr):
    """The rows of W of a tile. Rows past the end are read again and not stored."""
    if DIM > 0:
        row = first + row % KEPT + row // KEPT * (DIM // 2)
    elif SWIGLU:
        row = gl.minimum(first + row % KEPT, OUTPUTS - 1) + row // KEPT * OUTPUTS
    else:
        row = gl.minimum(first + row, OUTPUTS - 1)
    return row


@gluon.jit
def biases(bias, safe, apart, BIAS: gl.constexpr, PAIRED: gl.constexpr):
    """Of the rows that are kept, and of those that belong to them."""
    low = (safe * 0).to(gl.float32)
    high = low
    if BIAS:
        low = gl.load(bias + safe).to(gl.float32)
        if PAIRED:
            high = gl.load(bias + apart + safe).to(gl.float32)
    return low, high


@gluon.jit
def rotation_of(cos, sin, position, nothing, head, first, out_row, DIM: gl.constexpr, HEADS: gl.constexpr,
                KV_HEADS: gl.constexpr):  # fmt: skip
    """Cosines and sines of a head's rows; values are not turned."""
    turn, turn_back = nothing, nothing
    if DIM > 0:
        if head < HEADS + KV_HEADS:
            angle = position.to(gl.int64) * (DIM // 2) + (first % DIM + out_row)
            turn = gl.load(cos + angle).to(gl.float32)
            turn_back = gl.load(sin + angle).to(gl.float32)
    return turn, turn_back


@gluon.jit
def store(y, z, low_bias, high_bias, added, turn, turn_back, out, keys, values, slot, mask, real, head, first,
          out_row, block_stride, head_stride, SWIGLU: gl.constexpr, DIM: gl.constexpr, HEADS: gl.constexpr,
          KV_HEADS: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """What becomes of the sums y of the rows that are kept, and z of those that belong to them. `mask`: which cells
    are of the output, `real`: which lines are tokens."""
    if DIM > 0:
        _store_rotated(
            y, z, low_bias, high_bias, turn, turn_back, out, keys, values, slot, real, head, first, out_row,
            block_stride, head_stride, DIM, HEADS, KV_HEADS, PAGE,
        )  # fmt: skip
    else:
        _store_activated(y, z, low_bias, high_bias, added, out, mask, SWIGLU)


@gluon.jit
def _store_activated(y, z, low_bias, high_bias, added, out, mask, SWIGLU: gl.constexpr):
    """residual + f(y + bias)."""
    y += low_bias
    if SWIGLU:
        z += high_bias
        y = y / (1.0 + gl.exp(-y)) * z
    y += added
    gl.store(out, y.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _store_rotated(y, z, low_bias, high_bias, turn, turn_back, out, keys, values, slot, real, head, first, out_row,
                   block_stride, head_stride, DIM: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
                   PAGE: gl.constexpr):  # fmt: skip
    """Rotated queries to `out`, rotated keys and values to their pages."""
    apart: gl.constexpr = DIM // 2
    # Rounded where a product of its own would round.
    y = (y + low_bias).to(out.dtype.element_ty).to(gl.float32)
    z = (z + high_bias).to(out.dtype.element_ty).to(gl.float32)
    page = (slot // PAGE).to(gl.int64) * block_stride + slot % PAGE * DIM + first % DIM + out_row
    kept = real & (slot >= 0)  # a token that only fills up a captured shape has no slot
    if head < HEADS:
        gl.store(out, (y * turn - z * turn_back).to(out.dtype.element_ty), mask=real)
        gl.store(out + apart, (z * turn + y * turn_back).to(out.dtype.element_ty), mask=real)
    elif head < HEADS + KV_HEADS:
        places = keys + (head - HEADS) * head_stride + page
        gl.store(places, (y * turn - z * turn_back).to(keys.dtype.element_ty), mask=kept)
        gl.store(places + apart, (z * turn + y * turn_back).to(keys.dtype.element_ty), mask=kept)
    else:
        places = values + (head - HEADS - KV_HEADS) * head_stride + page
        gl.store(places, y.to(values.dtype.element_ty), mask=kept)
        gl.store(places + apart, z.to(values.dtype.element_ty), mask=kept)


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
    """Three models' shapes were fastest with it, in chains of their layers. Short rows: four warps have eight steps
    each or fewer. Long ones: warps share what registers cannot hold."""
    if k <= 1024:
        return DotConfig(32, 4, 4)
    slices = 8 if k <= 4096 else 16
    return DotConfig(16, slices, slices)


def rotating_config(k: int) -> DotConfig:
    """Of queries, keys and values that are rotated: attention is behind it, which gains nothing from being let in
    sooner."""
    return replace(default_config(2, 0, k, paired=True), waits_first=True)


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
def _few_dot_kernel(x, weight, out, norm_weight, residual, bias, cos, sin, positions, slots, keys, values,
                    M, OUTPUTS, stride_x, stride_out, stride_residual, stride_weight, block_stride, head_stride,
                    eps, K: gl.constexpr, TILE: gl.constexpr, SLICES: gl.constexpr,
                    NORM: gl.constexpr, SWIGLU: gl.constexpr, RESIDUAL: gl.constexpr, BIAS: gl.constexpr,
                    DIM: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
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


def launch(product: Product, config: DotConfig | None) -> None:
    """Computes up to 8 rows; x and weight of 16 bits, K a multiple of 8."""
    m, n, k = product.sizes
    x, weight, rotation = product.x, product.weight, product.rotation
    assert isinstance(weight, Tensor)
    if not takes(m, k):
        raise ValueError(f"few_dot takes up to {MAX_ROWS} rows of whole 16 bytes, not {m} rows of {k}")
    paired = product.swiglu or rotation is not None
    if config is None:
        config = default_config(m, n, k, paired) if rotation is None else rotating_config(k)
    kept = config.rows // 2 if paired else config.rows
    turned, strides, of_heads = rotation_arguments(rotation, x, kept)
    _few_dot_kernel[(triton.cdiv(n // 2 if paired else n, kept),)](
        x,
        weight,
        *product.tensors,
        *turned,
        m,
        product.outputs,
        *product.strides,
        weight.stride(0),
        *strides,
        product.eps,
        K=k,
        TILE=config.rows,
        SLICES=config.slices,
        **product.flags,
        **of_heads,
        num_warps=config.num_warps,
        **early(config.early, x, config.waits_first),
    )
