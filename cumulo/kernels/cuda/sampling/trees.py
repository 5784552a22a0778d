"""Trees of drafts, verified without the host (SpecInfer, Miao et al. 2023): which path of a tree agrees with what
was drawn, and its keys and values moved to their places. tree_growth.py makes the trees.

A tree's nodes are verified in lanes side by side: the last known token in place 0, its root, then the drafts, each
behind its parent in the order of places. A node is one word: the places on the way to it, as bits, and its own
place. Keys and values of place i lie i positions behind the root's; a node sees those of its ancestors only.

Must move: a few words a node, and the keys and values of the nodes that are kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.sampling.rounds import RoundRows
from cumulo.kernels.cuda.sampling.sample import COLUMNS, POSITION

MOST_PLACES = 16  # of a tree, its root included: bits of a word


def tree_words(parents: list[int]) -> list[int]:
    """Of nodes given by their parents' places, the root's first (its own)."""
    ways = [1]
    for place, parent in enumerate(parents[1:], 1):
        ways.append(ways[parent] | 1 << place)
    return [way | place << 16 for place, way in enumerate(ways)]


def accepted_path(drawn: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    """Places of the longest way from the root on which every token is what was drawn behind its parent; the first
    of equals."""
    ways = {0: [0]}
    for place in range(1, len(parents)):
        if parents[place] in ways and drawn[parents[place]] == tokens[place]:
            ways[place] = [*ways[parents[place]], place]
    return max(ways.values(), key=len)


@triton.jit
def _depth(words):
    """How many drafts are on the way to a node."""
    depth = tl.zeros_like(words)
    for bit in tl.static_range(1, 16):
        depth += (words >> bit) & 1
    return depth


@triton.jit(
    do_not_specialize=["lanes"], do_not_specialize_on_alignment=["lane_slots", "lane_starts", "draws"]
)
def _inputs(lane_slots, lane_starts, draws, trees, positions, words, lanes, PLACES: tl.constexpr,
            MOST: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, POSITION: tl.constexpr):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    slot = tl.load(lane_slots + lane, mask=lane < lanes, other=-1).to(tl.int64)
    place = lane % PLACES
    word = tl.load(trees + slot * MOST + place, mask=slot >= 0, other=1)
    position = tl.load(lane_starts + lane, mask=slot >= 0, other=0) - place + _depth(word)
    tl.store(words + lane, word, mask=lane < lanes)
    tl.store(positions + lane, position, mask=slot >= 0)
    tl.store(draws + lane * COLUMNS + POSITION, position + 1, mask=slot >= 0)


def tree_inputs(
    lane_slots: Tensor, lane_starts: Tensor, draws: Tensor, trees: Tensor, positions: Tensor, words: Tensor,
    places: int,
) -> None:  # fmt: skip
    """Where the lanes of a round stand whose rows have a tree each (`trees` [slots, MOST_PLACES]): its words, and
    positions, of lanes and their draws, by depth instead of by place."""
    lanes = len(lane_slots)
    _inputs[(1,)](
        lane_slots, lane_starts, draws, trees, positions, words, lanes, PLACES=places, MOST=MOST_PLACES,
        BLOCK=triton.next_power_of_2(lanes), COLUMNS=COLUMNS, POSITION=POSITION, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lanes"], do_not_specialize_on_alignment=["lane_slots", "lane_starts"])
def _accept(lane_slots, lane_starts, picked, token_ids, words, next_tokens, tokens, row_slots, row_starts,
            kept_rows, moves, turns, out, out_stride, token_stride, lanes, PLACES: tl.constexpr,
            TURNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    first = row * PLACES
    slot = tl.load(lane_slots + first, mask=first < lanes, other=-1).to(tl.int64)
    tl.store(row_slots + row, slot.to(tl.int32))
    place = tl.arange(0, BLOCK)
    inside = place < PLACES
    if slot < 0:
        tl.store(kept_rows + row, 0)
        tl.store(moves + first + place, tl.full((BLOCK,), -1, tl.int32), mask=inside)
    else:
        word = tl.load(words + first + place, mask=inside, other=0)
        way = word & 0xFFFF
        depth = _depth(word)
        parent = tl.zeros_like(place)
        for bit in tl.static_range(0, 16):
            parent = tl.where((((way >> bit) & 1) != 0) & (place > bit), bit, parent)
        drawn = tl.load(picked + first + place, mask=inside, other=-1)
        behind = tl.load(picked + first + parent, mask=inside, other=-1)
        token = tl.load(token_ids + first + place, mask=inside, other=-2)
        right = inside & ((place == 0) | (behind == token))
        rights = tl.sum(tl.where(right, 1 << place, 0), 0)
        whole = inside & ((way & rights) == way)
        count = tl.max(tl.where(whole, depth, 0), 0)
        kept = tl.min(tl.where(whole & (depth == count), place, BLOCK), 0)
        path = tl.sum(tl.where(place == kept, way, 0), 0)
        on_path = inside & (((path >> place) & 1) != 0)
        turn = tl.load(turns + row)
        told = out + row * out_stride + turn % TURNS * (PLACES + 1)
        tl.store(told, count)
        tl.store(told + 1 + depth, drawn, mask=on_path)
        tl.store(turns + row, turn + 1)
        root = tl.load(lane_starts + first)
        tl.store(tokens + slot * token_stride + root + 1 + depth, tl.maximum(drawn, 0), mask=on_path)
        start = root + count + 1
        tl.store(row_starts + row, start)
        tl.store(lane_starts + first + place, start + place, mask=inside)
        tl.store(next_tokens + first + place, tl.maximum(drawn, 0), mask=inside)
        tl.store(kept_rows + row, first + kept)
        tl.store(moves + first + place, tl.where(on_path & (depth != place), depth, -1), mask=inside)


def accept_tree(
    lane_slots: Tensor, lane_starts: Tensor, picked: Tensor, token_ids: Tensor, words: Tensor, next_tokens: Tensor,
    tokens: Tensor, rows: RoundRows, moves: Tensor, drafts: int,
) -> None:  # fmt: skip
    """After a round in which each row verified a tree of `drafts` tokens in drafts + 1 lanes, and `picked` [lanes]
    was drawn behind `token_ids`: fills `rows` except its chain, writes what is kept into `tokens` [slots, ...] and
    moves the lanes to the next round's. `next_tokens`: behind every lane, what was drawn there; `moves` [lanes]: to
    which place of its row a kept lane's keys and values belong, -1 where they stay."""
    _accept[(len(rows.slots),)](
        lane_slots, lane_starts, picked, token_ids, words, next_tokens, tokens, rows.slots, rows.starts, rows.kept,
        moves, rows.turns, rows.told, rows.told.stride(0), tokens.stride(0), len(lane_slots), PLACES=drafts + 1,
        TURNS=rows.told_rounds(drafts), BLOCK=triton.next_power_of_2(drafts + 1), num_warps=1,
    )  # fmt: skip


@triton.jit
def _settle(keys, values, kv_slots, moves, key_layer, key_block, key_head, key_stride, value_layer, value_block,
            value_head, value_stride, PLACES: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
            KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * PLACES
    layer = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    place = tl.arange(0, BLOCK)
    target = tl.load(moves + first + place, mask=place < PLACES, other=-1)
    if tl.max(target, 0) >= 0:
        moved = target >= 0
        here = tl.load(kv_slots + first + place, mask=moved, other=0).to(tl.int64)
        there = tl.load(kv_slots + first + target, mask=moved, other=0).to(tl.int64)
        column = tl.arange(0, COLUMNS)[None, :]
        of_keys = keys + layer * key_layer + head * key_head + column
        of_values = values + layer * value_layer + head * value_head + column
        from_key = (here // PAGE * key_block + here % PAGE * key_stride)[:, None]
        from_value = (here // PAGE * value_block + here % PAGE * value_stride)[:, None]
        in_key, in_value = moved[:, None] & (column < KEY_DIM), moved[:, None] & (column < VALUE_DIM)
        key = tl.load(of_keys + from_key, mask=in_key, other=0)
        value = tl.load(of_values + from_value, mask=in_value, other=0)
        tl.debug_barrier()  # one may be written where another is read
        to_key = (there // PAGE * key_block + there % PAGE * key_stride)[:, None]
        to_value = (there // PAGE * value_block + there % PAGE * value_stride)[:, None]
        tl.store(of_keys + to_key, key, mask=in_key)
        tl.store(of_values + to_value, value, mask=in_value)


def settle(keys: Tensor, values: Tensor, kv_slots: Tensor, moves: Tensor, drafts: int, rows: int) -> None:
    """In every layer of `keys` and `values` [layers, blocks, heads, block_size, ...], those of the lanes that
    `accept_tree` kept go to where their tokens now stand. `kv_slots` [lanes]: where they are."""
    keys, values = (one.view(torch.uint8) if one.itemsize == 1 else one for one in (keys, values))
    layers, _, heads, page, key_dim = keys.shape
    _settle[(rows, layers, heads)](
        keys, values, kv_slots, moves, *keys.stride()[:4], *values.stride()[:4], PLACES=drafts + 1,
        BLOCK=triton.next_power_of_2(drafts + 1), PAGE=page, KEY_DIM=key_dim, VALUE_DIM=values.shape[-1],
        COLUMNS=triton.next_power_of_2(max(key_dim, values.shape[-1])), num_warps=1,
    )  # fmt: skip
