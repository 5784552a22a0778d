"""Paged attention of sequences with one new token each. AttentionPlan launches it.

Must move: the keys and values of every sequence once, 2 * kv_heads * D numbers per position; the 4 * heads * D
FLOPs per position are far below that, so the design is about bytes in flight. A program takes one item of the
work list (some key tiles of one sequence) for one kv head, whose query heads are the rows of one small matrix
product. Loads of the next tiles are under way while one is computed, and several programs share a
multiprocessor, so that the memory system always has enough to do. kv heads are the fastest grid axis: their
parts of a page are neighbours in memory.

A sequence of several items leaves partial results; the program that arrives last (an atomic counter says so)
reads them all and merges them in order of position. Who is last changes from run to run, the result does not.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.attention.split_merge import LOG2_E, merge_splits
from cumulo.kernels.cuda.early import EARLY_ROWS, early, wait_for_kernel_ahead


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the decode kernel cuts its work; `tune` finds the best."""

    key_tile: int = 64  # positions a program takes at once
    num_warps: int = 4
    num_stages: int = 3  # key tiles in flight, one less
    items_per_sm: int = 16  # programs wanted for each multiprocessor, over the whole launch
    min_tiles: int = 6  # shortest item worth a program of its own
    merge_registers: int = 32  # of a thread, for partial results that are read at once


@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode(query, keys, values, out, partial, partial_lse, arrivals, items, tables, scale, window,
            query_token_stride, query_head_stride, out_token_stride, out_head_stride, key_block_stride,
            key_head_stride, key_stride, value_block_stride, value_head_stride, value_stride, table_stride,
            KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
            COLUMNS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
            MERGE_ROWS: tl.constexpr, MERGE_AT_ONCE: tl.constexpr, EARLY: tl.constexpr = 0):  # fmt: skip
    wait_for_kernel_ahead(EARLY)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * 8
    count = tl.load(record + 2)
    if count == 0:
        return
    sequence = tl.load(record)
    first = tl.load(record + 1)
    splits = tl.load(record + 3)
    first_item = tl.load(record + 4)
    token = tl.load(record + 5).to(tl.int64)
    context = tl.load(record + 6)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    position_in_tile = tl.arange(0, TILE)
    row_mask = row < GROUP
    column_mask = column < DIM
    q = tl.load(
        query
        + token * query_token_stride
        + (kv_head * GROUP + row)[:, None] * query_head_stride
        + column[None, :],
        mask=row_mask[:, None] & column_mask[None, :],
        other=0.0,
    )
    table = tables + sequence.to(tl.int64) * table_stride
    key_base = keys + kv_head.to(tl.int64) * key_head_stride
    value_base = values + kv_head.to(tl.int64) * value_head_stride
    scale_log2 = scale * LOG2_E

    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS, TILE], tl.float32)  # summed over columns at the end: no reduction per tile
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
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
            key_offset = page.to(tl.int64) * key_block_stride + within * key_stride
            value_offset = page.to(tl.int64) * value_block_stride + within * value_stride
            page = tl.load(
                table + tl.minimum(tile + 1, last) * TILE // PAGE
            )  # a tile early: addresses wait for it
        else:
            pages = tl.load(table + position // PAGE, mask=position < context, other=0).to(tl.int64)
            key_offset = pages * key_block_stride + position % PAGE * key_stride
            value_offset = pages * value_block_stride + position % PAGE * value_stride
        if COLUMNS == DIM:
            k = tl.load(key_base + key_offset[None, :] + column[:, None], mask=visible[None, :], other=0.0)
            v = tl.load(
                value_base + value_offset[:, None] + column[None, :], mask=visible[:, None], other=0.0
            )
        else:
            k = tl.load(
                key_base + key_offset[None, :] + column[:, None],
                mask=visible[None, :] & column_mask[:, None],
                other=0.0,
            )
            v = tl.load(
                value_base + value_offset[:, None] + column[None, :],
                mask=visible[:, None] & column_mask[None, :],
                other=0.0,
            )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        # An item's every tile has a visible position, so the maximum is finite after the first.
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        weight = weight * keep[:, None] + p
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * keep[:, None], input_precision="ieee")
        top = new_top

    total = tl.sum(weight, axis=1)
    result = acc / total[:, None]
    log_sum = top + tl.log2(total)
    head = kv_head * GROUP + row
    if splits == 1:
        tl.store(
            out + token * out_token_stride + head[:, None] * out_head_stride + column[None, :],
            result.to(out.dtype.element_ty),
            mask=row_mask[:, None] & column_mask[None, :],
        )
    else:
        slot = item.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(
            partial + slot[:, None] * DIM + column[None, :],
            result,
            mask=row_mask[:, None] & column_mask[None, :],
        )
        tl.store(partial_lse + slot, log_sum, mask=row_mask)
        tl.debug_barrier()  # every thread's partial is written before one of them says so
        arrival = arrivals + sequence * KV_HEADS + kv_head
        arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            tl.debug_barrier()
            merge_row = tl.arange(0, MERGE_ROWS)
            merge_head = kv_head * GROUP + merge_row
            merge_mask = merge_row < GROUP
            merged, _ = merge_splits(
                partial, partial_lse, first_item, splits, merge_head, merge_mask, column_mask, KV_HEADS * GROUP,
                DIM, MERGE_ROWS, COLUMNS, MERGE_AT_ONCE,
            )  # fmt: skip
            tl.store(
                out + token * out_token_stride + merge_head[:, None] * out_head_stride + column[None, :],
                merged.to(out.dtype.element_ty),
                mask=merge_mask[:, None] & column_mask[None, :],
            )
            tl.store(arrival, 0)  # ready for the next layer


def launch_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    arrivals: Tensor,
    items: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None,
    config: DecodeConfig,
) -> None:
    """One launch over all items."""
    heads, dim = query.shape[1], query.shape[2]
    kv_heads, page = keys.shape[1], keys.shape[2]
    group, columns = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    merge_rows = triton.next_power_of_2(group)
    _decode[(kv_heads, len(items))](
        query,
        keys,
        values,
        out,
        partial,
        partial_lse,
        arrivals,
        items,
        tables,
        scale,
        window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, merge_rows),
        DIM=dim,
        COLUMNS=columns,
        PAGE=page,
        TILE=config.key_tile,
        HAS_WINDOW=window is not None,
        MERGE_ROWS=merge_rows,
        MERGE_AT_ONCE=max(
            1, min(16, config.merge_registers * 32 * config.num_warps // (merge_rows * columns))
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **early(len(query) <= EARLY_ROWS, query),
    )
