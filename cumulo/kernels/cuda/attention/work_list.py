"""Work list of a step's attention, built on the device once per step and read by every layer. AttentionPlan
calls it.

Sequences differ in length, but a captured grid does not change. So one small program cuts the step into records
that later grids look up: an *item* is a run of key tiles of one decoding sequence, a *tile* is a run of query
tokens of one sequence's chunk. Records past the last one say "nothing to do".

Items are about equally long: a sequence of n key tiles becomes ceil(n / L) items, and L is the smallest length
with which all of them fit into the list.
"""

import triton
import triton.language as tl
from torch import Tensor

# Of an item: sequence, first key tile, key tiles, items of this sequence, its first item, row, context length and
# first page. Of a tile: sequence, first query token within the chunk, of how many, context length, chunk's row.
FIELDS = 8


# Sizes that differ from step shape to step shape must not each compile a kernel of their own.
@triton.jit(
    do_not_specialize=["sequences", "max_items", "max_tiles", "min_tiles", "window", "table_stride"],
    do_not_specialize_on_alignment=["query_starts"],
)
def _build(query_starts, context_lengths, tables, items, tiles, sequences, max_items, max_tiles, min_tiles,
           window, table_stride, PAGE: tl.constexpr, KEY_TILE: tl.constexpr, QUERY_TILE: tl.constexpr,
           SEQUENCES: tl.constexpr, HAS_WINDOW: tl.constexpr, DECODES: tl.constexpr, CHUNKS: tl.constexpr,
           CHUNK_FROM: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    sequence = tl.arange(0, SEQUENCES)
    real = sequence < sequences
    row = tl.load(query_starts + sequence, mask=real, other=0)
    tokens = tl.load(query_starts + sequence + 1, mask=real, other=0) - row
    context = tl.load(context_lengths + sequence, mask=real, other=0)
    filler = tl.arange(0, FILL)

    if DECODES:
        decodes = (tokens > 0) & (tokens < CHUNK_FROM) & (context > 0)
        first = tl.zeros_like(context)
        if HAS_WINDOW:
            first = tl.maximum(context - window, 0) // KEY_TILE
        count = tl.where(decodes, (context + KEY_TILE - 1) // KEY_TILE - first, 0)
        length = tl.maximum(min_tiles, 1)
        longest = tl.maximum(tl.max(count, axis=0), length)
        while length < longest:  # bisection; with the longest sequence's length there is one item each
            middle = (length + longest) // 2
            if tl.sum((count + middle - 1) // middle, axis=0) <= max_items:
                longest = middle
            else:
                length = middle + 1
        splits = (count + length - 1) // length
        first_item = tl.cumsum(splits, axis=0) - splits
        share = count // tl.maximum(splits, 1)
        longer = count - share * splits  # so many items have one tile more
        for split in range(tl.max(splits, axis=0)):
            record = items + (first_item + split) * 8
            mine = split < splits
            tl.store(record, sequence, mask=mine)
            first_tile = first + split * share + tl.minimum(split, longer)
            tl.store(record + 1, first_tile, mask=mine)
            tl.store(record + 2, share + tl.where(split < longer, 1, 0), mask=mine)
            tl.store(record + 3, splits, mask=mine)
            tl.store(record + 4, first_item, mask=mine)
            tl.store(record + 5, row, mask=mine)
            tl.store(record + 6, context, mask=mine)
            # Saves every program of every layer one wait for memory before its first key.
            block = tables + sequence.to(tl.int64) * table_stride + first_tile * KEY_TILE // PAGE
            tl.store(record + 7, tl.load(block, mask=mine, other=0), mask=mine)
        for surplus in range(tl.sum(splits, axis=0), max_items, FILL):
            tl.store(items + (surplus + filler) * 8 + 2, 0, mask=surplus + filler < max_items)

    if CHUNKS:
        chunked = (tokens >= CHUNK_FROM) & (context > 0)
        count = tl.where(chunked, (tokens + QUERY_TILE - 1) // QUERY_TILE, 0)
        first_of_chunk = tl.cumsum(count, axis=0) - count
        for index in range(tl.max(count, axis=0)):
            record = tiles + (first_of_chunk + index) * 8
            mine = index < count
            tl.store(record, sequence, mask=mine)
            # The last tokens see the longest context: start with them, or they end alone.
            tl.store(record + 1, (count - 1 - index) * QUERY_TILE, mask=mine)
            tl.store(record + 2, tokens, mask=mine)
            tl.store(record + 3, context, mask=mine)
            tl.store(record + 4, row, mask=mine)
        for surplus in range(tl.sum(count, axis=0), max_tiles, FILL):
            tl.store(tiles + (surplus + filler) * 8 + 2, 0, mask=surplus + filler < max_tiles)


def build_work_list(
    query_starts: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    items: Tensor | None,
    tiles: Tensor | None,
    *,
    block_size: int,
    key_tile: int,
    query_tile: int,
    min_tiles: int,
    window: int | None,
    chunk_from: int,
) -> None:
    """Fill `items` [n, 8] with sequences of fewer than `chunk_from` new tokens and `tiles` [n, 8] with the
    others.

    Only sequences of one new token may be items; sequences with context 0 are padding. `items` needs room for
    one item of each sequence, `tiles` for the most tiles there can be.
    """
    sequences = len(context_lengths)
    _build[(1,)](
        query_starts,
        context_lengths,
        block_tables,
        items,
        tiles,
        sequences,
        0 if items is None else len(items),
        0 if tiles is None else len(tiles),
        min_tiles,
        window or 0,
        block_tables.stride(0),
        PAGE=block_size,
        KEY_TILE=key_tile,
        QUERY_TILE=query_tile,
        SEQUENCES=max(256, triton.next_power_of_2(sequences)),
        HAS_WINDOW=window is not None,
        DECODES=items is not None,
        CHUNKS=tiles is not None,
        CHUNK_FROM=chunk_from,
        FILL=256,
        num_warps=4,
    )
