"""What products on the tensor cores' smallest tiles share (`few_dot`, `w4_dot`): which rows of W a program has, and
what becomes of their sums: bias, SwiGLU, residual, or rotation and pages. In Gluon, called by the kernels.

Sums are [rows kept, lines]: of a tile whose second half belongs to its first, row by row (SwiGLU, rotation), half
the rows are kept. What these read is asked for when it may be: a bias before the kernel ahead has ended, the rest
right behind x, or it would be waited for at the end.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cumulo.kernels.cuda.linear.rotation import PagedRotation


def rotation_arguments(
    rotation: PagedRotation | None, near: Tensor, kept: int
) -> tuple[tuple[Tensor, ...], tuple[int, int], dict[str, int]]:
    """Of a launch: tensors, strides and constants; `near` stands for those that are not read. `kept`: rows of a
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
    """Of W. Rows past the end are read again and not stored."""
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
