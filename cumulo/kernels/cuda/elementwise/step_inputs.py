"""From a plan's rows to the decoder's inputs, on the device: token ids, positions, where K and V go, block tables.

The runner keeps every sequence's tokens and blocks on the device, so a step's plan is a few numbers per row and the
tokens sampled by the step before are read where they were written: the host never sees them on the way.

Must move: the blocks of every sequence and four numbers per token; a few microseconds whatever the step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 128


def reference(
    row_slots: Tensor,
    row_starts: Tensor,
    query_starts: Tensor,
    tokens: Tensor,
    tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, positions, flat KV slots [T] and context lengths [S] of a step without padding."""
    ids, positions, slots, contexts = [], [], [], []
    for row, (slot, start) in enumerate(zip(row_slots.tolist(), row_starts.tolist(), strict=True)):
        end = start + int(query_starts[row + 1] - query_starts[row])
        contexts.append(end)
        for position in range(start, end):
            ids.append(int(tokens[slot, position]))
            positions.append(position)
            slots.append(int(tables[slot, position // block_size]) * block_size + position % block_size)
    return tuple(torch.tensor(column, dtype=torch.int32) for column in (ids, positions, slots, contexts))  # type: ignore[return-value]


# These read slices of one buffer, which begin anywhere: nothing is compiled per alignment or size.
_WORDS = ["row_slots", "row_starts", "query_starts", "new_indices", "new_blocks"]


@triton.jit(do_not_specialize=["rows", "padded_tokens"], do_not_specialize_on_alignment=_WORDS)
def _inputs(row_slots, row_starts, query_starts, new_indices, new_blocks, tokens, tables, token_ids, positions,
slots, contexts, step_tables, rows, padded_tokens, token_stride, table_stride, step_table_stride,
            BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    if row == rows:  # the last program fills up the captured shape with tokens that go nowhere
        begin = tl.load(query_starts + rows)
        for first in range(begin, padded_tokens, CHUNK):
            index = first + lane
            inside = index < padded_tokens
            tl.store(token_ids + index, tl.zeros((CHUNK,), tl.int32), mask=inside)
            tl.store(positions + index, tl.zeros((CHUNK,), tl.int32), mask=inside)
            tl.store(slots + index, tl.full((CHUNK,), -1, tl.int32), mask=inside)
    else:
        slot = tl.load(row_slots + row).to(tl.int64)
        if slot < 0:
            tl.store(contexts + row, 0)
        else:
            start = tl.load(row_starts + row)
            begin = tl.load(query_starts + row)
            count = tl.load(query_starts + row + 1) - begin
            # A block gained in this step is known here and in no table yet: it is put in on the way.
            new_index = tl.load(new_indices + row)
            new_block = tl.load(new_blocks + row)
            tl.store(contexts + row, start + count)
            blocks = (start + count + BLOCK_SIZE - 1) // BLOCK_SIZE
            own = tables + slot * table_stride
            for first in range(0, blocks, CHUNK):
                index = first + lane
                inside = index < blocks
                block = tl.load(own + index, mask=inside, other=0)
                gained = inside & (index == new_index)
                block = tl.where(gained, new_block, block)
                tl.store(step_tables + row.to(tl.int64) * step_table_stride + index, block, mask=inside)
                tl.store(own + index, block, mask=gained)
            for first in range(0, count, CHUNK):
                index = first + lane
                inside = index < count
                position = start + index
                page = position // BLOCK_SIZE
                block = tl.load(own + page, mask=inside, other=0)
                block = tl.where(page == new_index, new_block, block)
                token = tl.load(tokens + slot * token_stride + position, mask=inside, other=0)
                tl.store(token_ids + begin + index, token, mask=inside)
                tl.store(positions + begin + index, position, mask=inside)
                tl.store(slots + begin + index, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)


def step_inputs(
    row_slots: Tensor, row_starts: Tensor, query_starts: Tensor, new_indices: Tensor, new_blocks: Tensor,
    tokens: Tensor, tables: Tensor, block_size: int,
    token_ids: Tensor, positions: Tensor, slots: Tensor, contexts: Tensor, step_tables: Tensor,
) -> None:  # fmt: skip
    """All int32. Rows beyond the step's have slot -1 (and query_starts repeat their last value); tokens beyond its
    own get slot -1. `new_indices`, `new_blocks`: the one block a row gained, which is entered into `tables`
    (-1: none).
    """
    rows = row_slots.shape[0]
    _inputs[(rows + 1,)](
        row_slots, row_starts, query_starts, new_indices, new_blocks, tokens, tables, token_ids, positions, slots,
        contexts, step_tables, rows, token_ids.shape[0], tokens.stride(0), tables.stride(0), step_tables.stride(0),
        BLOCK_SIZE=block_size, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["source", "offsets", "counts", "rows"])
def _fill(source, offsets, counts, rows, target, stride, CHUNK: tl.constexpr):
    item = tl.program_id(0)
    offset = tl.load(offsets + item)
    count = tl.load(counts + item)
    row = tl.load(rows + item).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    for first in range(0, count, CHUNK):
        index = first + lane
        inside = index < count
        tl.store(
            target + row * stride + index, tl.load(source + offset + index, mask=inside, other=0), mask=inside
        )


def fill_rows(source: Tensor, offsets: Tensor, counts: Tensor, rows: Tensor, target: Tensor) -> None:
    """target[rows[i], :counts[i]] = source[offsets[i] : offsets[i] + counts[i]]; the slots that begin in a step."""
    if len(rows):
        _fill[(len(rows),)](source, offsets, counts, rows, target, target.stride(0), CHUNK=1024, num_warps=4)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "columns", "values"])
def _scatter(rows, columns, values, target, count, stride, CHUNK: tl.constexpr):
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(rows + index, mask=index < count, other=-1).to(tl.int64)
    inside = row >= 0
    column = tl.load(columns + index, mask=inside, other=0)
    tl.store(target + row * stride + column, tl.load(values + index, mask=inside, other=0), mask=inside)


def scatter(rows: Tensor, columns: Tensor, values: Tensor, target: Tensor) -> None:
    """target[rows[i], columns[i]] = values[i] where rows[i] >= 0; no pair may come twice."""
    count = rows.shape[0]
    if count:
        _scatter[(triton.cdiv(count, _CHUNK),)](
            rows, columns, values, target, count, target.stride(0), CHUNK=_CHUNK, num_warps=4
        )
