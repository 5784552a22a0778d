"""Merging the partial attentions of one row's key ranges. Used inside the decode kernels, and by `merge`.

Over disjoint key ranges i with outputs o_i and log-sum-exps s_i, the whole is Σ 2^(s_i − s) o_i with
s = log2 Σ 2^s_i (Rabe & Staats 2021, section 3; base 2 because the hardware's exponential is).
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge_splits(partial, partial_lse, first, splits, row_offsets, row_mask, column_mask, split_stride,
                 WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 AT_ONCE: tl.constexpr):  # fmt: skip
    """Partials first..first+splits of some rows, in order -> output [ROWS, COLUMNS] and log2-sum [ROWS].

    Partial p of a row r lies at partial[(p * split_stride + r) * WIDTH] and partial_lse[p * split_stride + r].
    """
    columns = tl.arange(0, COLUMNS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, splits, AT_ONCE):
        index = start + tl.arange(0, AT_ONCE)
        slot = (first + index).to(tl.int64)[:, None] * split_stride + row_offsets[None, :]
        mask = (index < splits)[:, None] & row_mask[None, :]
        # Written by other programs of this launch: past the L1 cache.
        lse = tl.load(partial_lse + slot, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + slot[:, :, None] * WIDTH + columns[None, None, :],
            mask=mask[:, :, None] & column_mask[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - safe_top)
        shares = tl.exp2(lse - safe_top[None, :])
        acc = acc * keep[:, None] + tl.sum(part * shares[:, :, None], axis=0)
        weight = weight * keep + tl.sum(shares, axis=0)
        top = new_top
    divisor = tl.where(weight > 0, weight, 1.0)
    return acc / divisor[:, None], top + tl.log2(divisor)
