"""Drafting and verifying without the host: which drafts of a row agree with what was drawn, and what its head
proposes next, written where the next round reads them.

Must move: a few words a row, and the head's logits once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.early import early, wait_for_kernel_ahead
from cumulo.kernels.cuda.sampling.sample import COLUMNS, POSITION

PART = 32  # logits of which the largest is told


_WORDS = ["lane_slots", "lane_starts", "query_starts", "draws"]


@triton.jit
def kept_by_row(row, first, slot, place, drawn, lane_starts, draws, token_ids, next_tokens, row_starts, kept_rows,
                turns, out, out_stride, DRAFTS: tl.constexpr, PLACES: tl.constexpr, TURNS: tl.constexpr,
                COLUMNS: tl.constexpr, POSITION: tl.constexpr):  # fmt: skip
    """What a row keeps of its drafts, where `drawn` was drawn behind its lanes; they move to the next round."""
    inside = place <= DRAFTS
    drafted = tl.load(token_ids + first + place + 1, mask=place < DRAFTS, other=-2)
    agrees = (drawn == drafted) & (place < DRAFTS)
    count = tl.min(tl.where(agrees, PLACES, place), 0)
    turn = tl.load(turns + row)
    told = out + row * out_stride + turn % TURNS * (DRAFTS + 2)
    tl.store(told, count)
    tl.store(told + 1 + place, drawn, mask=inside)
    tl.store(turns + row, turn + 1)
    start = tl.load(lane_starts + first) + count + 1
    tl.store(row_starts + row, start)
    tl.store(lane_starts + first + place, start + place, mask=inside)
    tl.store(draws + (first + place) * COLUMNS + POSITION, start + 1 + place, mask=inside)
    tl.store(next_tokens + first + place, tl.maximum(drawn, 0), mask=inside)
    tl.store(kept_rows + row, first + count)
    return start


@triton.jit(do_not_specialize=["lanes"], do_not_specialize_on_alignment=_WORDS)
def _accept(lane_slots, lane_starts, query_starts, draws, picked, token_ids, next_tokens, row_slots, row_starts,
            kept_rows, one_each, turns, out, out_stride, lanes, DRAFTS: tl.constexpr, PLACES: tl.constexpr,
            TURNS: tl.constexpr, COLUMNS: tl.constexpr, POSITION: tl.constexpr,
            EARLY: tl.constexpr = 0):  # fmt: skip
    wait_for_kernel_ahead(EARLY)
    row = tl.program_id(0)
    first = row * (DRAFTS + 1)
    tl.store(one_each + row + 1, tl.minimum(row + 1, tl.load(query_starts + lanes) // (DRAFTS + 1)))
    slot = tl.load(lane_slots + first, mask=first < lanes, other=-1)
    tl.store(row_slots + row, slot)
    if slot < 0:
        tl.store(kept_rows + row, 0)
    else:
        place = tl.arange(0, PLACES)
        drawn = tl.load(picked + first + place, mask=place <= DRAFTS, other=-1)
        kept_by_row(row, first, slot, place, drawn, lane_starts, draws, token_ids, next_tokens, row_starts,
                    kept_rows, turns, out, out_stride, DRAFTS, PLACES, TURNS, COLUMNS, POSITION)  # fmt: skip


@dataclass(slots=True)
class RoundRows:
    """What a round leaves for its rows, int32, at fixed addresses."""

    slots: Tensor  # [rows]: -1 where there is none
    starts: Tensor  # [rows]: place of the last token that is kept
    kept: Tensor  # [rows]: its lane in the round
    chain_starts: Tensor  # [rows]: place behind which the next token is proposed
    one_each: Tensor  # [rows + 1]: query starts of a step with one token for each row
    turns: Tensor  # [rows]: rounds so far
    # [rows, words]: for each round how many drafts were kept, and what was drawn. Where it is full, it begins anew.
    told: Tensor

    @classmethod
    def zeros(cls, rows: int, words: int, device: torch.device) -> "RoundRows":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            zeros(rows),
            zeros(rows),
            zeros(rows),
            zeros(rows),
            zeros(rows + 1),
            zeros(rows),
            zeros(rows, words),
        )

    def told_rounds(self, drafts: int) -> int:
        """For how many rounds `told` has room."""
        return self.told.shape[1] // (drafts + 2)

    def first(self, rows: int) -> "RoundRows":
        return RoundRows(
            self.slots[:rows], self.starts[:rows], self.kept[:rows], self.chain_starts[:rows],
            self.one_each[: rows + 1], self.turns[:rows], self.told[:rows],
        )  # fmt: skip


def accept(
    lane_slots: Tensor, lane_starts: Tensor, query_starts: Tensor, draws: Tensor, picked: Tensor, token_ids: Tensor,
    next_tokens: Tensor, rows: RoundRows, drafts: int,
) -> None:  # fmt: skip
    """After a round in which each row verified `drafts` tokens behind a known one, in drafts + 1 lanes, and
    `picked` [lanes] was drawn behind `token_ids`: fills `rows` except its chain; lanes and positions of `draws`
    move to the next round's; `next_tokens`: behind every lane, what was drawn there."""
    _accept[(len(rows.slots),)](
        lane_slots, lane_starts, query_starts, draws, picked, token_ids, next_tokens, rows.slots, rows.starts,
        rows.kept, rows.one_each, rows.turns, rows.told, rows.told.stride(0), len(lane_slots), DRAFTS=drafts,
        PLACES=triton.next_power_of_2(drafts + 1), TURNS=rows.told_rounds(drafts), COLUMNS=COLUMNS,
        POSITION=POSITION, num_warps=1, **early(True, picked),
    )  # fmt: skip


@triton.jit
def _logit_parts(logits, best, place, vocabulary, stride, parts, SIZE: tl.constexpr, AT_ONCE: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = part[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    logit = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocabulary,
                    other=float("-inf")).to(tl.float32)  # fmt: skip
    peak = tl.where(part < parts, tl.max(logit, 1), 0.0)
    found = tl.min(tl.where(logit == peak[:, None], token, vocabulary - 1), 1)
    tl.store(best + row * parts + part, peak, mask=part < parts)
    tl.store(place + row * parts + part, found, mask=part < parts)


def logit_parts(logits: Tensor, best: Tensor, place: Tensor) -> None:
    """Of logits [rows, V] in parts of PART tokens: each part's largest, and whose it is."""
    rows, vocabulary = logits.shape
    parts = best.shape[1]
    _logit_parts[(rows, triton.cdiv(parts, 64))](
        logits, best, place, vocabulary, logits.stride(0), parts, SIZE=PART, AT_ONCE=64, num_warps=4
    )


@triton.jit
def no_inputs(row, positions, kv_slots, contexts, items, items_each, ITEMS: tl.constexpr):
    """The inputs of a row that only fills up a shape."""
    tl.store(positions + row, 0)
    tl.store(kv_slots + row, -1)
    tl.store(contexts + row, 0)
    item = tl.arange(0, ITEMS)
    record = items + (row * items_each + item) * 8
    tl.store(record + 2, tl.zeros((ITEMS,), tl.int32), mask=item < items_each)


@triton.jit
def one_token_inputs(row, position, table, positions, kv_slots, contexts, step_tables, items, step_table_stride,
                     min_tiles, items_each, PAGE: tl.constexpr, KEY_TILE: tl.constexpr,
                     ITEMS: tl.constexpr):  # fmt: skip
    """What a step with one token for this row reads, but for the token. `table`: its sequence's blocks."""
    item = tl.arange(0, ITEMS)
    record = items + (row * items_each + item) * 8
    context = position + 1
    tl.store(positions + row, position)
    tl.store(contexts + row, context)
    tl.store(kv_slots + row, tl.load(table + position // PAGE) * PAGE + position % PAGE)
    lane = tl.arange(0, 128)
    for first in range(0, position // PAGE + 1, 128):
        inside = first + lane <= position // PAGE
        block = tl.load(table + first + lane, mask=inside, other=0)
        tl.store(step_tables + row * step_table_stride + first + lane, block, mask=inside)
    # Its part of the work list, as work_list.py describes it: runs of key tiles, about equally long.
    tiles = (context + KEY_TILE - 1) // KEY_TILE
    length = tl.maximum(tl.maximum(min_tiles, 1), (tiles + items_each - 1) // items_each)
    splits = (tiles + length - 1) // length
    share = tiles // splits
    longer = tiles - share * splits
    mine = item < splits
    first_tile = item * share + tl.minimum(item, longer)
    tl.store(record, row + tl.zeros((ITEMS,), tl.int32), mask=mine)
    tl.store(record + 1, first_tile, mask=mine)
    tl.store(record + 2, tl.where(mine, share + tl.where(item < longer, 1, 0), 0), mask=item < items_each)
    tl.store(record + 3, splits + tl.zeros((ITEMS,), tl.int32), mask=mine)
    tl.store(record + 4, row * items_each + tl.zeros((ITEMS,), tl.int32), mask=mine)
    tl.store(record + 5, row + tl.zeros((ITEMS,), tl.int32), mask=mine)
    tl.store(record + 6, context + tl.zeros((ITEMS,), tl.int32), mask=mine)
    tl.store(record + 7, tl.load(table + first_tile * KEY_TILE // PAGE, mask=mine, other=0), mask=mine)


@triton.jit(do_not_specialize=["ahead", "min_tiles", "items_each"])
def _propose(best, place, token_of, row_slots, row_starts, chain_starts, tokens, tables, next_tokens, positions,
             kv_slots, contexts, step_tables, items, parts, token_stride, table_stride, step_table_stride, ahead,
             min_tiles, items_each, PARTS: tl.constexpr, PAGE: tl.constexpr, KEY_TILE: tl.constexpr,
             ITEMS: tl.constexpr, NEXT: tl.constexpr, EARLY: tl.constexpr = 0):  # fmt: skip
    wait_for_kernel_ahead(EARLY)
    row = tl.program_id(0)
    slot = tl.load(row_slots + row).to(tl.int64)
    if slot < 0:
        if NEXT:
            tl.store(next_tokens + row, 0)
            no_inputs(row, positions, kv_slots, contexts, items, items_each, ITEMS)
    else:
        part = tl.arange(0, PARTS)
        value = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
        where = tl.load(place + row * parts + part, mask=part < parts, other=2147483647)
        chosen = tl.min(tl.where(value == tl.max(value, 0), where, 2147483647), 0)
        token = tl.load(
            token_of + tl.where(chosen == 2147483647, 0, chosen)
        )  # where all are NaN, any will do
        start = tl.load(row_starts + row)
        tl.store(tokens + slot * token_stride + start + ahead, token)
        tl.store(chain_starts + row, start - 1 + ahead)
        if NEXT:
            # The head goes on behind its proposal: as a step of one token for this row, whose inputs these are.
            tl.store(next_tokens + row, token)
            one_token_inputs(row, start - 1 + ahead, tables + slot * table_stride, positions, kv_slots, contexts,
                             step_tables, items, step_table_stride, min_tiles, items_each, PAGE, KEY_TILE,
                             ITEMS)  # fmt: skip


@dataclass(slots=True)
class NextInputs:
    """What the head's next step of one token for each row reads, int32, at fixed addresses."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    kv_slots: Tensor  # [rows]
    contexts: Tensor  # [rows]
    step_tables: Tensor  # [rows, blocks]
    items: Tensor  # [items, 8]: attention's work list (work_list.py); rows have equal shares, the rest stays empty
    key_tile: int
    min_tiles: int


def propose(
    best: Tensor, place: Tensor, token_of: Tensor, rows: RoundRows, tokens: Tensor, tables: Tensor, block_size: int,
    ahead: int, inputs: NextInputs | None,
) -> None:  # fmt: skip
    """The likeliest token of each row, from each part's largest logit [rows, parts] and its place, by `token_of`
    [V] as the model knows it, becomes the draft at `ahead` places behind the row's start. `inputs`: of the head's
    step behind it, filled in by the same launch; None: it is the last, or others fill them in."""
    count, parts = best.shape
    given = inputs or NextInputs(best, best, best, best, best, best, 64, 1)
    each = len(given.items) // count if inputs is not None else 1
    _propose[(count,)](
        best, place, token_of, rows.slots, rows.starts, rows.chain_starts, tokens, tables, given.tokens,
        given.positions, given.kv_slots, given.contexts, given.step_tables, given.items, parts, tokens.stride(0),
        tables.stride(0), given.step_tables.stride(0), ahead, given.min_tiles, each,
        PARTS=triton.next_power_of_2(parts), PAGE=block_size, KEY_TILE=given.key_tile,
        ITEMS=triton.next_power_of_2(each), NEXT=inputs is not None, num_warps=8 if parts > 1024 else 4,
        **early(True, best),
    )  # fmt: skip


_LANE_WORDS = ["lane_slots", "lane_starts"]


@triton.jit(do_not_specialize=["min_tiles", "items_each"], do_not_specialize_on_alignment=_LANE_WORDS)
def _round_inputs(lane_slots, lane_starts, tokens, tables, embed, token_ids, positions, kv_slots, contexts,
                  step_tables, items, stream, token_stride, table_stride, step_table_stride, embed_stride,
                  stream_stride, min_tiles, items_each, all_items, lanes, PAGE: tl.constexpr,
                  KEY_TILE: tl.constexpr, ITEMS: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
                  EARLY: tl.constexpr = 0):  # fmt: skip
    wait_for_kernel_ahead(EARLY)
    lane = tl.program_id(0)
    slot = tl.load(lane_slots + lane).to(tl.int64)
    position = tl.load(lane_starts + lane)
    # The list may have more room than equal shares take: a step without rounds may have used it.
    surplus = lanes * items_each + lane
    if surplus < all_items:
        tl.store(items + surplus * 8 + 2, 0)
    token = tl.load(tokens + slot * token_stride + position, mask=slot >= 0, other=0)
    column = tl.arange(0, COLUMNS)
    row = tl.load(embed + token.to(tl.int64) * embed_stride + column, mask=column < HIDDEN, other=0.0)
    tl.store(token_ids + lane, token)
    if slot < 0:
        no_inputs(lane, positions, kv_slots, contexts, items, items_each, ITEMS)
    else:
        one_token_inputs(lane, position, tables + slot * table_stride, positions, kv_slots, contexts, step_tables,
                         items, step_table_stride, min_tiles, items_each, PAGE, KEY_TILE, ITEMS)  # fmt: skip
    tl.store(stream + lane * stream_stride + column, row, mask=column < HIDDEN)


def round_inputs(
    lane_slots: Tensor, lane_starts: Tensor, tokens: Tensor, tables: Tensor, block_size: int, embed: Tensor,
    inputs: NextInputs, stream: Tensor,
) -> None:  # fmt: skip
    """`inputs` of all lanes (slot -1: none), and their rows of `embed` in `stream` [lanes, hidden]."""
    lanes, hidden = stream.shape
    each = len(inputs.items) // lanes
    _round_inputs[(lanes,)](
        lane_slots, lane_starts, tokens, tables, embed, inputs.tokens, inputs.positions, inputs.kv_slots,
        inputs.contexts, inputs.step_tables, inputs.items, stream, tokens.stride(0), tables.stride(0),
        inputs.step_tables.stride(0), embed.stride(0), stream.stride(0), inputs.min_tiles, each, len(inputs.items),
        lanes, PAGE=block_size, KEY_TILE=inputs.key_tile, ITEMS=triton.next_power_of_2(each), HIDDEN=hidden,
        COLUMNS=triton.next_power_of_2(hidden), num_warps=4, **early(True, stream),
    )  # fmt: skip
