"""Latent attention (MLA) of sequences with one new token each, in the absorbed form. AttentionPlan launches it.

All heads share one key per position, [latent, rotated part], whose latent part is also the value (DeepSeek-V2
2024, section 2.1; absorbed as in cumulo/models/attention.py). Must move rank + rope numbers per position once
and compute 2 * heads * (2 * rank + rope) FLOPs for it: with 16 heads bound by memory, with 128 about as much by
the matrix units. So a key tile is loaded once and serves both products, and heads beyond a program's rows find
it in the L2 cache.

A program takes one item of the work list (some key tiles of one sequence) for up to 64 heads. A partial result
is rank numbers wide for each head, so a second launch merges them, spread over the device.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.attention.split_merge import LOG2_E, merge_splits


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """How the kernel cuts its work."""

    rows: int  # heads of a program, padded
    key_tile: int
    num_warps: int
    num_stages: int
    items_per_sm: int = 4
    min_tiles: int = 2


def default_config(heads: int) -> MlaConfig:
    """Few heads: several programs on a multiprocessor stream. Many: one, with the matrix units' own tiles."""
    if heads <= 32:
        return MlaConfig(rows=max(16, triton.next_power_of_2(heads)), key_tile=32, num_warps=4, num_stages=3)
    return MlaConfig(rows=64, key_tile=32, num_warps=8, num_stages=3, items_per_sm=2)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _mla(query, keys, out, partial, partial_lse, items, tables, scale, window, query_token_stride,
         query_head_stride, out_token_stride, out_head_stride, key_block_stride, key_stride, table_stride,
         HEADS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
         TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):  # fmt: skip
    item = tl.program_id(1)
    record = items + item * 8
    count = tl.load(record + 2)
    if count == 0:
        return
    sequence = tl.load(record)
    first = tl.load(record + 1)
    splits = tl.load(record + 3)
    token = tl.load(record + 5).to(tl.int64)
    context = tl.load(record + 6)

    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head_mask = head < HEADS
    latent = tl.arange(0, RANK)
    rope = tl.arange(0, ROPE)
    position_in_tile = tl.arange(0, TILE)
    query_rows = query + token * query_token_stride + head[:, None] * query_head_stride
    q_latent = tl.load(query_rows + latent[None, :], mask=head_mask[:, None], other=0.0)
    q_rope = tl.load(query_rows + RANK + rope[None, :], mask=head_mask[:, None], other=0.0)
    table = tables + sequence.to(tl.int64) * table_stride
    scale_log2 = scale * LOG2_E

    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK], tl.float32)
    last = first + count - 1
    if TILE <= PAGE:
        page = tl.load(record + 7)
    for tile in tl.range(first, last + 1):
        position = tile * TILE + position_in_tile
        visible = position < context
        if HAS_WINDOW:
            visible = visible & (position >= context - window)
        if TILE <= PAGE:
            within = tile * TILE % PAGE + position_in_tile
            offset = page.to(tl.int64) * key_block_stride + within * key_stride
            page = tl.load(
                table + tl.minimum(tile + 1, last) * TILE // PAGE
            )  # a tile early: addresses wait for it
        else:
            pages = tl.load(table + position // PAGE, mask=position < context, other=0).to(tl.int64)
            offset = pages * key_block_stride + position % PAGE * key_stride
        key_rows = keys + offset[:, None]
        k_latent = tl.load(key_rows + latent[None, :], mask=visible[:, None], other=0.0).to(q_latent.dtype)
        k_rope = tl.load(key_rows + RANK + rope[None, :], mask=visible[:, None], other=0.0).to(q_rope.dtype)
        scores = tl.dot(q_rope, k_rope.T, input_precision="ieee")
        scores = tl.dot(q_latent, k_latent.T, scores, input_precision="ieee")
        scores = tl.where(visible[None, :], scores * scale_log2, float("-inf"))
        # An item's every tile has a visible position, so the maximum is finite after the first.
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        weight = weight * keep + tl.sum(p, axis=1)
        acc = tl.dot(p.to(q_latent.dtype), k_latent, acc * keep[:, None], input_precision="ieee")
        top = new_top

    result = acc * (1.0 / weight)[:, None]
    if splits == 1:
        tl.store(
            out + token * out_token_stride + head[:, None] * out_head_stride + latent[None, :],
            result.to(out.dtype.element_ty),
            mask=head_mask[:, None],
        )
    else:
        slot = item.to(tl.int64) * HEADS + head
        tl.store(partial + slot[:, None] * RANK + latent[None, :], result, mask=head_mask[:, None])
        tl.store(partial_lse + slot, top + tl.log2(weight), mask=head_mask)


@triton.jit
def _merge(out, partial, partial_lse, items, out_token_stride, out_head_stride, HEADS: tl.constexpr,
           ROWS: tl.constexpr, RANK: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """Merge the items of the sequence that begins with this one."""
    item = tl.program_id(1)
    record = items + item * 8
    count = tl.load(record + 2)
    splits = tl.load(record + 3)
    first_item = tl.load(record + 4)
    token = tl.load(record + 5).to(tl.int64)
    if (count == 0) | (splits < 2) | (first_item != item):
        return
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head_mask = head < HEADS
    latent = tl.arange(0, RANK)
    merged, _ = merge_splits(
        partial, partial_lse, item, splits, head, head_mask, latent < RANK, HEADS, RANK, ROWS, RANK, AT_ONCE
    )
    tl.store(
        out + token * out_token_stride + head[:, None] * out_head_stride + latent[None, :],
        merged.to(out.dtype.element_ty),
        mask=head_mask[:, None],
    )


def launch_mla_decodes(
    query: Tensor,
    keys: Tensor,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    items: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None,
    config: MlaConfig,
) -> None:
    """One layer: query [T, H, rank + rope] over keys [blocks, 1, block_size, rank + rope] into out [T, H, rank]."""
    heads, rank = out.shape[1], out.shape[2]
    _mla[(-(-heads // config.rows), len(items))](
        query, keys, out, partial, partial_lse, items, tables, scale, window or 0, query.stride(0),
        query.stride(1), out.stride(0), out.stride(1), keys.stride(0), keys.stride(2), tables.stride(0),
        HEADS=heads, ROWS=config.rows, RANK=rank, ROPE=query.shape[2] - rank, PAGE=keys.shape[2],
        TILE=config.key_tile, HAS_WINDOW=window is not None, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    _merge[(heads, len(items))](
        out, partial, partial_lse, items, out.stride(0), out.stride(1), HEADS=heads, ROWS=1, RANK=rank, AT_ONCE=16,
        num_warps=4,
    )  # fmt: skip
