"""small_linear: y = x·Wᵀ for one to four rows of x, as when a few sequences decode. `linear` calls it.

It must read the weights once (N·K elements; x and y are nothing beside them) and do 2·M·N·K FLOPs: memory-bound
by two orders of magnitude, so plain multiply-adds are enough and every choice is about loads in flight. A program
owns a few output rows; a row's loads are unrolled, 16 bytes a thread, so that the memory system has them all at
once. RMSNorm costs no pass of its own: Σ w·(x·g)·r = r·Σ w·(x·g), and r comes out of the same loop. SwiGLU keeps
a gate row and its up row in one program. With `early` the first tile of weights is asked for before the kernel
ahead has ended (early.py).
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from cumulo.kernels.cuda.early import early, wait_for_kernel_ahead
from cumulo.kernels.cuda.linear.product import Product

MAX_ROWS = 4


@dataclass(frozen=True, slots=True)
class SmallConfig:
    """Output rows and columns of W a program holds at once, and its warps. `early`: on a GPU it starts while the
    kernel before it ends, and loads weights meanwhile; `waits_first`: see early.py."""

    rows: int
    block_k: int
    num_warps: int
    early: bool = False
    waits_first: bool = True


# Tried by `tune`, for more than one row the first four only: the others run out of registers there.
CANDIDATES = (
    SmallConfig(2, 1024, 4),
    SmallConfig(1, 2048, 4),
    SmallConfig(2, 2048, 8),
    SmallConfig(1, 1024, 4),
    SmallConfig(4, 512, 4),
    SmallConfig(2, 512, 2),
    SmallConfig(4, 1024, 4),
    SmallConfig(8, 512, 4),
    SmallConfig(2, 2048, 4),
    SmallConfig(4, 512, 2),
)


def default_config(n: int, k: int, swiglu: bool, weight_bytes_per_element: int = 2) -> SmallConfig:
    """Small matrices: every load of every program in flight in one wave. Large ones: 4 or 8 KiB a program, or as
    much of each of SwiGLU's two halves, in tiles of k that are not mostly mask; of 8 bits as many bytes."""
    if n * k <= 4 << 20:
        rows = 1 if swiglu else 2
        block_k = 1024 if k <= 1024 or k % 2048 else 2048
    elif weight_bytes_per_element == 1:
        rows = 2 if swiglu else 4
        block_k = 2048 if k % 2048 == 0 or k > 8192 else 1024
    elif swiglu and k < 2048:
        return SmallConfig(4, min(512, triton.next_power_of_2(k)), 2)
    elif swiglu:
        block_k = 2048 if k % 2048 == 0 or k >= 4096 else 1024
        rows = 4 if block_k == 1024 and k % 1024 == 0 else 2
    else:
        block_k = 2048 if k % 2048 == 0 or 2048 < k <= 16384 else 1024
        filled = 4 * k >= 3 * block_k * -(-k // block_k)
        rows = 1 if n <= 4096 and block_k == 2048 and filled else 2
    warps = 8 if rows * block_k * (2 if swiglu else 1) * weight_bytes_per_element > 16384 else 4
    return SmallConfig(rows, min(block_k, triton.next_power_of_2(k)), warps)


@triton.jit
def _dot_rows(x, k_offsets, k_mask, stride_x, m: tl.constexpr, weights, gains, sum_squares, acc, NORM: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Add one tile's products with row m of x to `acc`; with NORM also its squares to `sum_squares`."""
    if MASKED:
        row = tl.load(x + m * stride_x + k_offsets, mask=k_mask, other=0.0).to(tl.float32)
    else:
        row = tl.load(x + m * stride_x + k_offsets).to(tl.float32)
    if NORM:
        sum_squares += row * row
        row *= gains
    acc += weights * row[None, :]
    return acc, sum_squares


@triton.jit
def _load_weights(pointers, row_mask, k_mask, MASKED_N: tl.constexpr, MASKED_K: tl.constexpr):
    if MASKED_N and MASKED_K:
        mask = row_mask[:, None] & k_mask[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    elif MASKED_N:
        tile = tl.load(pointers, mask=row_mask[:, None], other=0.0, eviction_policy="evict_first")
    elif MASKED_K:
        tile = tl.load(pointers, mask=k_mask[None, :], other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, eviction_policy="evict_first")
    return tile


@triton.jit
def _gains(norm_weight, offsets, K: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        gains = tl.load(norm_weight + offsets, mask=offsets < K, other=0.0).to(tl.float32)
    else:
        gains = tl.load(norm_weight + offsets).to(tl.float32)
    return gains


@triton.jit
def _at_rows(pointer, rows, row_mask, WANTED: tl.constexpr):
    """Numbers that the end of the work needs, asked for at its start: at the end they would be waited for."""
    if WANTED:
        values = tl.load(pointer + rows, mask=row_mask, other=0.0).to(tl.float32)
    else:
        values = rows.to(tl.float32)
    return values


@triton.jit
def _finish(acc, up, sum_squares, added, scale, up_scale, bias, up_bias, places, row_mask, eps, K: tl.constexpr,
            NORM: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
            SCALED: tl.constexpr):  # fmt: skip
    """Reduce one row of x's products and write its outputs."""
    y = tl.sum(acc, axis=1)
    if NORM:
        rstd = tl.rsqrt(tl.sum(sum_squares, axis=0) / K + eps)
        y *= rstd
    if SCALED:
        y *= scale
    if BIAS:
        y += bias
    if SWIGLU:
        z = tl.sum(up, axis=1)
        if NORM:
            z *= rstd
        if SCALED:
            z *= up_scale
        if BIAS:
            z += up_bias
        y = y * tl.sigmoid(y) * z
    if RESIDUAL:
        y += added
    tl.store(places, y.to(places.dtype.element_ty), mask=row_mask)


@triton.jit
def _small_linear_kernel(x, weight, out, norm_weight, residual, bias, scales, OUTPUTS, stride_x, stride_out,
                         stride_residual, stride_weight, eps, M: tl.constexpr, K: tl.constexpr,
                         ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, NORM: tl.constexpr,
                         SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
                         SCALED: tl.constexpr, EARLY: tl.constexpr = 0):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < OUTPUTS
    columns = tl.arange(0, BLOCK_K)
    gate_rows = weight + rows.to(tl.int64)[:, None] * stride_weight
    up_rows = weight + (rows.to(tl.int64) + OUTPUTS)[:, None] * stride_weight
    acc0 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    up0, up1, up2, up3 = acc0, acc0, acc0, acc0
    squares0 = tl.zeros([BLOCK_K], tl.float32)
    squares1, squares2, squares3 = squares0, squares0, squares0
    # One tile ahead: a tile's loads are on their way while the one before is multiplied.
    next_w = _load_weights(gate_rows + columns[None, :], row_mask, columns < K, not EVEN_N, BLOCK_K > K)
    next_u = next_w
    if SWIGLU:
        next_u = _load_weights(up_rows + columns[None, :], row_mask, columns < K, not EVEN_N, BLOCK_K > K)
    scale = _at_rows(scales, rows, row_mask, SCALED)
    up_scale = _at_rows(scales + OUTPUTS, rows, row_mask, SCALED and SWIGLU)
    gate_bias = _at_rows(bias, rows, row_mask, BIAS)
    up_bias = _at_rows(bias + OUTPUTS, rows, row_mask, BIAS and SWIGLU)
    gains = columns.to(tl.float32)
    if NORM:
        gains = _gains(norm_weight, columns, K, BLOCK_K > K)
    wait_for_kernel_ahead(EARLY)  # so far nothing that the kernels before this one compute was read
    added0 = _at_rows(residual, rows, row_mask, RESIDUAL)
    added1 = _at_rows(residual + stride_residual, rows, row_mask, RESIDUAL and M > 1)
    added2 = _at_rows(residual + 2 * stride_residual, rows, row_mask, RESIDUAL and M > 2)
    added3 = _at_rows(residual + 3 * stride_residual, rows, row_mask, RESIDUAL and M > 3)
    for k in tl.static_range(0, K, BLOCK_K):
        offsets = k + columns
        k_mask = offsets < K
        w, u = next_w, next_u
        if k + BLOCK_K < K:
            ahead = offsets + BLOCK_K
            next_w = _load_weights(
                gate_rows + ahead[None, :], row_mask, ahead < K, not EVEN_N, k + 2 * BLOCK_K > K
            )
            if SWIGLU:
                next_u = _load_weights(
                    up_rows + ahead[None, :], row_mask, ahead < K, not EVEN_N, k + 2 * BLOCK_K > K
                )
        if NORM and k > 0:
            gains = _gains(norm_weight, offsets, K, k + BLOCK_K > K)
        w = w.to(tl.float32)
        acc0, squares0 = _dot_rows(
            x, offsets, k_mask, stride_x, 0, w, gains, squares0, acc0, NORM, k + BLOCK_K > K
        )
        if M > 1:
            acc1, squares1 = _dot_rows(
                x, offsets, k_mask, stride_x, 1, w, gains, squares1, acc1, NORM, k + BLOCK_K > K
            )
        if M > 2:
            acc2, squares2 = _dot_rows(
                x, offsets, k_mask, stride_x, 2, w, gains, squares2, acc2, NORM, k + BLOCK_K > K
            )
        if M > 3:
            acc3, squares3 = _dot_rows(
                x, offsets, k_mask, stride_x, 3, w, gains, squares3, acc3, NORM, k + BLOCK_K > K
            )
        if SWIGLU:
            u = u.to(tl.float32)
            up0, _ = _dot_rows(
                x, offsets, k_mask, stride_x, 0, u, gains, squares0, up0, NORM, k + BLOCK_K > K
            )
            if M > 1:
                up1, _ = _dot_rows(
                    x, offsets, k_mask, stride_x, 1, u, gains, squares1, up1, NORM, k + BLOCK_K > K
                )
            if M > 2:
                up2, _ = _dot_rows(
                    x, offsets, k_mask, stride_x, 2, u, gains, squares2, up2, NORM, k + BLOCK_K > K
                )
            if M > 3:
                up3, _ = _dot_rows(
                    x, offsets, k_mask, stride_x, 3, u, gains, squares3, up3, NORM, k + BLOCK_K > K
                )
    _finish(acc0, up0, squares0, added0, scale, up_scale, gate_bias, up_bias, out + rows,
            row_mask, eps, K, NORM, SWIGLU, RESIDUAL, BIAS, SCALED)  # fmt: skip
    if M > 1:
        _finish(acc1, up1, squares1, added1, scale, up_scale, gate_bias, up_bias, out + stride_out + rows,
                row_mask, eps, K, NORM, SWIGLU, RESIDUAL, BIAS, SCALED)  # fmt: skip
    if M > 2:
        _finish(acc2, up2, squares2, added2, scale, up_scale, gate_bias, up_bias, out + 2 * stride_out + rows,
                row_mask, eps, K, NORM, SWIGLU, RESIDUAL, BIAS, SCALED)  # fmt: skip
    if M > 3:
        _finish(acc3, up3, squares3, added3, scale, up_scale, gate_bias, up_bias, out + 3 * stride_out + rows,
                row_mask, eps, K, NORM, SWIGLU, RESIDUAL, BIAS, SCALED)  # fmt: skip


def launch(product: Product, config: SmallConfig | None) -> None:
    """Computes at most 4 rows; weights of any float dtype, whose rows are contiguous."""
    m, n, k = product.sizes
    weight, scales = product.matrix
    if m > MAX_ROWS:
        raise ValueError(f"small_linear takes at most {MAX_ROWS} rows of x, not {m}")
    if config is None:
        config = default_config(n, k, product.swiglu, weight.element_size())
    rows, outputs = config.rows, product.outputs
    _small_linear_kernel[(-(-outputs // rows),)](
        product.x,
        weight,
        *product.tensors,
        product.x if scales is None else scales,
        outputs,
        *product.strides,
        weight.stride(0),
        product.eps,
        M=m,
        K=k,
        ROWS=rows,
        BLOCK_K=config.block_k,
        EVEN_N=outputs % rows == 0,
        SCALED=scales is not None,
        **product.flags,
        num_warps=config.num_warps,
        **early(config.early, product.x, config.waits_first),
    )
