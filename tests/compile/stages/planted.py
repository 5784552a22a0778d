"""Four kernels that each waste time in one way, and one that wastes none."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def strided(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at * 16, mask=at < n)
    tl.store(y_ptr + at, value, mask=at < n)


@gluon.jit
def conflicts(x_ptr, y_ptr, N: gl.constexpr):
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    r = gl.arange(0, N, gl.SliceLayout(1, rows))[:, None]
    c = gl.arange(0, N, gl.SliceLayout(0, rows))[None, :]
    tile = gl.allocate_shared_memory(gl.float32, [N, N], shared)
    tile.store(gl.load(x_ptr + r * N + c))
    turned = tile.load(columns)
    r2 = gl.arange(0, N, gl.SliceLayout(1, columns))[:, None]
    c2 = gl.arange(0, N, gl.SliceLayout(0, columns))[None, :]
    gl.store(y_ptr + c2 * N + r2, turned)


@triton.jit
def spills(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x_ptr + at)
    b = tl.load(x_ptr + BLOCK + at)
    c = tl.load(x_ptr + 2 * BLOCK + at)
    d = tl.sum(a * b, 0) + tl.sum(c, 0)
    tl.store(y_ptr + at, a * d + b)
    tl.store(y_ptr + BLOCK + at, c * d + a)


@triton.jit
def column_of_rows(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    """The first element of each row: a sector of each, of which one element is wanted."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + row * stride, mask=row < n)
    tl.store(y_ptr + row, value, mask=row < n)


@triton.jit
def softmax(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride + cols, e / tl.sum(e, 0), mask=mask)


@triton.jit
def wrong(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCK * 2)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + tl.load(x_ptr + other))
