"""A matrix transposed in two ways, to see what a GPU does with each:

cumulo compile stages examples/compile/transpose.py:one_by_one --set BLOCK=1024 --set columns=4096
cumulo compile stages examples/compile/transpose.py:by_tiles --set TILE=64
"""

import triton
import triton.language as tl


@triton.jit
def one_by_one(x_ptr, y_ptr, rows, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // columns, at % columns
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + column * rows + row, x)


@triton.jit
def by_tiles(x_ptr, y_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :])
    tl.store(y_ptr + column[:, None] * rows + row[None, :], tl.trans(x))
