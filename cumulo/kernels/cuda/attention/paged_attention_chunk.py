"""Paged attention of sequences with several new tokens: prompts, chunks of them, and speculation. AttentionPlan
launches it; in chunking-invariant mode it takes sequences with one new token too.

Must compute 4 * heads * D FLOPs for every pair of a query and a position it sees; the bytes are few beside
that, so the design is about keeping the matrix units busy. A program takes one tile of the work list for one kv
head: its rows are (token, query head of the group) pairs, so that every key tile loaded serves the whole group.
Positions all rows see are folded in without a mask; only the diagonal, the end of the context and the edge of a
window are masked. The online softmax is that of FlashAttention-2 (Dao 2023, algorithm 1), in base 2 with the
scale folded into one multiply-add.

A row's arithmetic does not depend on which tile it is in: key tiles it does not see leave its numbers as they
are, and the others are folded in order of position. So a token's bits depend on its sequence only, not on the
chunk or batch.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.attention.paged_attention_overlap import fits, launch_overlapped
from cumulo.kernels.cuda.attention.split_merge import LOG2_E


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """Tile sizes of the chunk kernel; `tune` finds the best."""

    rows: int = 128  # (token, head) pairs a program owns
    key_tile: int = 128
    num_warps: int = 8
    num_stages: int = 2
    # Where it can, `paged_attention_overlap` with bundles of so many tiles and `num_stages` slots.
    overlap: int = 0

    def query_tile(self, group: int) -> int:
        """Tokens a program owns."""
        return self.rows // group


@triton.jit
def _fold(q, acc, weight, top, keys, values, table, begin, end, own_position, context, scale, window,
          key_block_stride, key_stride, value_block_stride, value_stride, DIM: tl.constexpr,
          COLUMNS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    """Fold key tiles begin..end into the running softmax of every row."""
    column = tl.arange(0, COLUMNS)
    position_in_tile = tl.arange(0, TILE)
    scale_log2 = scale * LOG2_E
    last_page = (context - 1) // PAGE  # stands in for what lies past the context: that will be masked
    if TILE <= PAGE:
        page = tl.load(table + tl.minimum(begin * TILE // PAGE, last_page))
    for tile in tl.range(begin, end):
        position = tile * TILE + position_in_tile
        if TILE <= PAGE:
            row = tile * TILE % PAGE + position_in_tile
            key_offset = page.to(tl.int64) * key_block_stride + row * key_stride
            value_offset = page.to(tl.int64) * value_block_stride + row * value_stride
            # A tile early: addresses wait for it.
            page = tl.load(table + tl.minimum((tile + 1) * TILE // PAGE, last_page))
        else:
            pages = tl.load(table + tl.minimum(position // PAGE, last_page)).to(tl.int64)
            key_offset = pages * key_block_stride + position % PAGE * key_stride
            value_offset = pages * value_block_stride + position % PAGE * value_stride
        key_pointers = keys + key_offset[:, None] + column[None, :]
        value_pointers = values + value_offset[:, None] + column[None, :]
        if MASKED or COLUMNS != DIM:
            inside = (position < context)[:, None] & (column < DIM)[None, :]
            k = tl.load(key_pointers, mask=inside, other=0.0)
            v = tl.load(value_pointers, mask=inside, other=0.0)
        else:
            k = tl.load(key_pointers)
            v = tl.load(value_pointers)
        scores = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        if MASKED:
            visible = (position[None, :] <= own_position[:, None]) & (position < context)[None, :]
            if HAS_WINDOW:
                visible = visible & (position[None, :] > own_position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
        safe_top = new_top
        if MASKED and HAS_WINDOW:  # a row may have seen nothing yet
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - safe_top)
        p = tl.exp2(scores * scale_log2 - safe_top[:, None])
        weight = weight * keep + tl.sum(p, axis=1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * keep[:, None], input_precision="ieee")
        top = new_top
    return acc, weight, top


@triton.jit(do_not_specialize=["window", "table_stride"])
def _chunk(query, keys, values, out, tiles, tables, scale, window, query_token_stride, query_head_stride,
           out_token_stride, out_head_stride, key_block_stride, key_head_stride, key_stride, value_block_stride,
           value_head_stride, value_stride, table_stride,
           GROUP: tl.constexpr, ROWS: tl.constexpr, QUERY_TILE: tl.constexpr,
           DIM: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
           HAS_WINDOW: tl.constexpr):  # fmt: skip
    record = tiles + tl.program_id(0) * 8
    kv_head = tl.program_id(1)
    tokens = tl.load(record + 2)
    if tokens == 0:
        return
    sequence = tl.load(record)
    first_token = tl.load(record + 1)
    context = tl.load(record + 3)
    chunk_row = tl.load(record + 4)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    mask = ((row < QUERY_TILE * GROUP) & (token < tokens))[:, None] & (column < DIM)[None, :]
    token_row = (chunk_row + token).to(tl.int64)
    q = tl.load(
        query + (token_row * query_token_stride + head * query_head_stride)[:, None] + column[None, :],
        mask=mask,
        other=0.0,
    )
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head.to(tl.int64) * key_head_stride
    values += kv_head.to(tl.int64) * value_head_stride

    own_position = context - tokens + token
    first_position = context - tokens + first_token
    last_position = tl.minimum(context, first_position + QUERY_TILE) - 1
    seen_by_all = (first_position + 1) // TILE
    end = last_position // TILE + 1
    inner = 0
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE
        inner = tl.minimum((tl.maximum(last_position - window + 1, 0) + TILE - 1) // TILE, seen_by_all)
        acc, weight, top = _fold(
            q, acc, weight, top, keys, values, table, begin, inner, own_position, context, scale,
            window, key_block_stride, key_stride, value_block_stride, value_stride, DIM,
            COLUMNS, PAGE, TILE, HAS_WINDOW, True,
        )  # fmt: skip
    acc, weight, top = _fold(
        q, acc, weight, top, keys, values, table, inner, seen_by_all, own_position, context, scale,
        window, key_block_stride, key_stride, value_block_stride, value_stride, DIM, COLUMNS,
        PAGE, TILE, HAS_WINDOW, False,
    )  # fmt: skip
    acc, weight, top = _fold(
        q, acc, weight, top, keys, values, table, seen_by_all, end, own_position, context, scale,
        window, key_block_stride, key_stride, value_block_stride, value_stride, DIM, COLUMNS,
        PAGE, TILE, HAS_WINDOW, True,
    )  # fmt: skip

    result = acc * (1.0 / weight)[:, None]
    tl.store(
        out + (token_row * out_token_stride + head * out_head_stride)[:, None] + column[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )


def launch_chunks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    tiles: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None,
    config: ChunkConfig,
) -> None:
    """One launch over all tiles."""
    if config.overlap and window is None and fits(query, keys, values, config.key_tile):
        launch_overlapped(
            query, keys, values, out, tiles, tables, scale, config.rows, config.key_tile,
            config.num_warps, config.num_stages, config.overlap,
        )  # fmt: skip
        return
    heads, dim = query.shape[1], query.shape[2]
    kv_heads, page = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    _chunk[(len(tiles), kv_heads)](
        query,
        keys,
        values,
        out,
        tiles,
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
        GROUP=group,
        ROWS=config.rows,
        QUERY_TILE=config.query_tile(group),
        DIM=dim,
        COLUMNS=max(16, triton.next_power_of_2(dim)),
        PAGE=page,
        TILE=config.key_tile,
        HAS_WINDOW=window is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
