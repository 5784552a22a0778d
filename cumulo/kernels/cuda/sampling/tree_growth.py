"""How a tree of drafts grows without the host: level by level, behind the nodes that a head thinks likeliest, until
the likeliest of everything it proposed become the tree (EAGLE-2, Li et al. 2024). trees.py verifies it.

Must move: the largest logits of each part of the head's vocabulary once a level, and a few words a node.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.sampling.rounds import NextInputs, RoundRows
from cumulo.kernels.cuda.sampling.trees import MOST_PLACES

WIDTH = 2  # nodes of a level behind which the head proposes; with 3 no more tokens were kept
EACH = 4  # tokens that it proposes behind each of them
MOST_LEVELS = 4
PART = 32  # logits that are one part


@dataclass(slots=True)
class Growth:
    """A tree while it grows, by row, at fixed addresses: every token proposed so far."""

    chances: Tensor  # [rows, candidates] float32: log of the chance that all tokens up to it are right
    tokens: Tensor  # [rows, candidates] int32
    parents: Tensor  # [rows, candidates] int32: the candidate that it is behind, -1: the root
    followed: Tensor  # [rows, WIDTH] int32: the candidates behind which the head proposes now
    words: Tensor  # [levels, rows * WIDTH] int32: what they see of each other in the head's cache
    streams: Tensor  # [rows * WIDTH, hidden]: the head's stream behind which each of them stands

    @classmethod
    def empty(cls, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> "Growth":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        size, levels = candidates_of(MOST_LEVELS), MOST_LEVELS
        return cls(
            torch.zeros((rows, size), dtype=torch.float32, device=device), zeros(rows, size), zeros(rows, size),
            zeros(rows, WIDTH), zeros(levels, rows * WIDTH), torch.zeros((rows * WIDTH, hidden), dtype=dtype,
                                                                        device=device),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        own = (self.chances, self.tokens, self.parents, self.followed, self.words, self.streams)
        return sum(one.nbytes for one in own)


def candidates_of(levels: int) -> int:
    """Room for the tokens that are proposed on so many levels."""
    size: int = triton.next_power_of_2(EACH + (levels - 1) * WIDTH * EACH)
    return size


@triton.jit
def _in_order(chance, candidate):
    """How many candidates come before each: likelier ones, and of equals those proposed first."""
    mine, other = chance[:, None], chance[None, :]
    before = (other > mine) | ((other == mine) & (candidate[None, :] < candidate[:, None]))
    return tl.sum(before.to(tl.int32), 1)


@triton.jit(do_not_specialize=["min_tiles", "items_each"])
def _grow(best, place, mass, token_of, row_slots, row_starts, stream, tokens, tables, trees, chances, names,
          parents, followed, words_before, words, streams, next_tokens, positions, kv_slots, contexts, step_tables,
          items, parts, stride_stream, token_stride, table_stride, step_table_stride, candidate_stride, min_tiles,
          items_each,
          LEVEL: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr,
          WIDTH: tl.constexpr, EACH: tl.constexpr, CANDIDATES: tl.constexpr, FIRST: tl.constexpr,
          DRAFTS: tl.constexpr, MOST: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr,
          KEY_TILE: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(row_slots + row).to(tl.int64)
    item = tl.arange(0, ITEMS)
    if slot < 0:
        if not LAST:
            for nobody in tl.static_range(WIDTH):
                lane_of_nobody = row * WIDTH + nobody
                tl.store(next_tokens + lane_of_nobody, 0)
                tl.store(positions + lane_of_nobody, 0)
                tl.store(kv_slots + lane_of_nobody, -1)
                tl.store(contexts + lane_of_nobody, 0)
                tl.store(words + lane_of_nobody, 1)
                void = items + (lane_of_nobody * items_each + item) * 8
                tl.store(void + 2, tl.zeros((ITEMS,), tl.int32), mask=item < items_each)
    else:
        start = tl.load(row_starts + row)
        line = tl.arange(0, LINES)
        part = tl.arange(0, PARTS)
        here = line < ROWS
        inside = here[:, None] & (part < parts)[None, :]
        part_at = (row * ROWS + line)[:, None] * parts + part[None, :]
        value = tl.load(best + part_at, mask=inside, other=float("-inf"))
        which = tl.load(place + part_at, mask=inside, other=2147483647)
        share = tl.load(mass + part_at, mask=inside, other=0.0)
        peak = tl.where(here, tl.max(value, 1), 0.0)
        total = tl.sum(tl.exp(value - peak[:, None]) * share, 1)
        scale = peak + tl.log(tl.where(here, total, 1.0))
        own = row * candidate_stride
        if LEVEL == 1:
            parent = tl.full((LINES,), -1, tl.int32)
            so_far = tl.zeros((LINES,), tl.float32)
        else:
            parent = tl.load(followed + row * WIDTH + line, mask=here, other=0)
            so_far = tl.load(chances + own + parent, mask=here, other=0.0)
        # Value and place as one number: the largest, and of equals the first, is found by one exchange.
        bits = value.to(tl.int32, bitcast=True)
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32 | (2147483647 - which).to(tl.int64)
        for proposal in tl.static_range(EACH):
            top = tl.max(key, 1)
            key = tl.where(key == top[:, None], -0x8000000000000000, key)
            upper = (top >> 32).to(tl.int32)
            logit = (upper ^ ((upper >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            chosen = 2147483647 - (top & 0x7FFFFFFF).to(tl.int32)
            log_chance = logit - scale
            # Never likelier than its parent; NaN, or more tokens than there are parts: never.
            log_chance = tl.where(log_chance <= 0.0, log_chance, tl.where(log_chance > 0.0, 0.0, -1e30))
            entry = own + FIRST + line * EACH + proposal
            token = tl.load(token_of + tl.where(chosen == 2147483647, 0, chosen), mask=here, other=0)
            tl.store(chances + entry, tl.maximum(so_far + log_chance, -3.0e38), mask=here)
            tl.store(names + entry, token, mask=here)
            tl.store(parents + entry, parent, mask=here)
        tl.debug_barrier()  # what all threads have proposed is looked at together
        candidate = tl.arange(0, CANDIDATES)
        seen = candidate < FIRST + ROWS * EACH
        if not LAST:
            seen = seen & (candidate >= FIRST)
        chance = tl.load(chances + own + candidate, mask=seen, other=float("-inf"))
        name = tl.load(names + own + candidate, mask=seen, other=0)
        rank = _in_order(chance, candidate)
        if LAST:
            picked = seen & (rank < DRAFTS)
            above = tl.load(parents + own + candidate, mask=seen, other=-1)
            self_bit = tl.where(picked, 1 << tl.minimum(rank + 1, 15), 0) | 1
            way = self_bit
            for _ in tl.static_range(LEVEL - 1):
                up = tl.where(above[:, None] == candidate[None, :], way[None, :], 0)
                way = self_bit | tl.sum(up, 1)
            tl.store(tokens + slot * token_stride + start + 1 + rank, name, mask=picked)
            tl.store(trees + slot * MOST + 1 + rank, way | ((rank + 1) << 16), mask=picked)
        else:
            picked = seen & (rank < WIDTH)
            source = (candidate - FIRST) // EACH
            tl.store(next_tokens + row * WIDTH + rank, name, mask=picked)
            tl.store(followed + row * WIDTH + rank, candidate, mask=picked)
            own_place = (LEVEL - 1) * WIDTH + rank + 1
            way = tl.where(picked, 1 << tl.minimum(own_place, 15), 0) | 1
            if LEVEL > 1:
                way = way | (tl.load(words_before + row * WIDTH + source, mask=picked, other=0) & 0xFFFF)
            tl.store(words + row * WIDTH + rank, way | (own_place << 16), mask=picked)
            column = tl.arange(0, BLOCK_H)
            table = tables + slot * table_stride
            lane = tl.arange(0, 128)
            for new in tl.static_range(WIDTH):
                behind = row * ROWS + tl.sum(tl.where(picked & (rank == new), source, 0), 0)
                kept = tl.load(stream + behind * stride_stream + column, mask=column < HIDDEN, other=0.0)
                at = row * WIDTH + new
                tl.store(streams + at * HIDDEN + column, kept, mask=column < HIDDEN)
                # As a step of one token for each: where it stands, and where its keys and values lie.
                lies = start + (LEVEL - 1) * WIDTH + new
                context = lies + 1
                tl.store(positions + at, start + LEVEL - 1)
                tl.store(contexts + at, context)
                tl.store(kv_slots + at, tl.load(table + lies // PAGE) * PAGE + lies % PAGE)
                for first in range(0, lies // PAGE + 1, 128):
                    within = first + lane <= lies // PAGE
                    entries = tl.load(table + first + lane, mask=within, other=0)
                    tl.store(step_tables + at * step_table_stride + first + lane, entries, mask=within)
                # Its part of the work list, as work_list.py describes it: runs of key tiles, about equally long.
                record = items + (at * items_each + item) * 8
                tiles = (context + KEY_TILE - 1) // KEY_TILE
                length = tl.maximum(tl.maximum(min_tiles, 1), (tiles + items_each - 1) // items_each)
                splits = (tiles + length - 1) // length
                each = tiles // splits
                longer = tiles - each * splits
                mine = item < splits
                first_tile = item * each + tl.minimum(item, longer)
                nothing = tl.zeros((ITEMS,), tl.int32)
                tl.store(record, at + nothing, mask=mine)
                tl.store(record + 1, first_tile, mask=mine)
                size = tl.where(mine, each + tl.where(item < longer, 1, 0), 0)
                tl.store(record + 2, size, mask=item < items_each)
                tl.store(record + 3, splits + nothing, mask=mine)
                tl.store(record + 4, at * items_each + nothing, mask=mine)
                tl.store(record + 5, at + nothing, mask=mine)
                tl.store(record + 6, context + nothing, mask=mine)
                page = tl.load(table + first_tile * KEY_TILE // PAGE, mask=mine, other=0)
                tl.store(record + 7, page, mask=mine)


def grow(
    best: Tensor, place: Tensor, mass: Tensor, token_of: Tensor, rows: RoundRows, growth: Growth, stream: Tensor,
    tokens: Tensor, tables: Tensor, trees: Tensor, block_size: int, level: int, drafts: int,
    inputs: NextInputs | None,
) -> None:  # fmt: skip
    """One level of each row's tree: from each part's largest logit [rows of the level, parts], whose it is and the
    part's mass (the sum of exp(logit - largest)), the likeliest tokens behind each node that is followed. Then the
    WIDTH likeliest of this level are followed: `inputs` becomes the head's step of one token for each, and
    `growth.streams` what it continues. Without `inputs` it is the last level: the `drafts` likeliest tokens of all
    are the tree, in `tokens` [slots, ...] and `trees` [slots, MOST_PLACES]."""
    count, parts = len(rows.slots), best.shape[1]
    each_row = len(best) // count
    last = inputs is None
    given = inputs or NextInputs(place, place, place, place, place, place, 64, 1)
    each = 1 if last else len(given.items) // (count * WIDTH)
    hidden = stream.shape[1]
    _grow[(count,)](
        best, place, mass, token_of, rows.slots, rows.starts, stream, tokens, tables, trees, growth.chances,
        growth.tokens, growth.parents, growth.followed, growth.words[max(0, level - 2)], growth.words[level - 1],
        growth.streams, given.tokens, given.positions, given.kv_slots, given.contexts, given.step_tables,
        given.items, parts, stream.stride(0), tokens.stride(0), tables.stride(0), given.step_tables.stride(0),
        growth.chances.stride(0), given.min_tiles, each, LEVEL=level, LAST=last, ROWS=each_row,
        LINES=triton.next_power_of_2(each_row), PARTS=triton.next_power_of_2(parts), WIDTH=WIDTH, EACH=EACH,
        CANDIDATES=candidates_of(level), FIRST=0 if level == 1 else EACH + (level - 2) * WIDTH * EACH,
        DRAFTS=drafts, MOST=MOST_PLACES, HIDDEN=hidden, BLOCK_H=triton.next_power_of_2(hidden), PAGE=block_size,
        KEY_TILE=given.key_tile, ITEMS=triton.next_power_of_2(each), num_warps=8 if parts > 1024 else 4,
    )  # fmt: skip


@triton.jit
def _logit_parts(
    logits, best, place, mass, vocabulary, stride, parts, SIZE: tl.constexpr, AT_ONCE: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = part[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    logit = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocabulary,
                    other=float("-inf")).to(tl.float32)  # fmt: skip
    peak = tl.where(part < parts, tl.max(logit, 1), 0.0)
    found = tl.min(tl.where(logit == peak[:, None], token, vocabulary - 1), 1)
    tl.store(best + row * parts + part, peak, mask=part < parts)
    tl.store(place + row * parts + part, found, mask=part < parts)
    tl.store(mass + row * parts + part, tl.sum(tl.exp(logit - peak[:, None]), 1), mask=part < parts)


def logit_parts(logits: Tensor, best: Tensor, place: Tensor, mass: Tensor) -> None:
    """Of logits [rows, V] in parts of PART tokens: each part's largest, whose it is, and its sum of
    exp(logit - largest)."""
    rows, vocabulary = logits.shape
    parts = best.shape[1]
    _logit_parts[(rows, triton.cdiv(parts, 64))](
        logits, best, place, mass, vocabulary, logits.stride(0), parts, SIZE=PART, AT_ONCE=64, num_warps=4
    )
