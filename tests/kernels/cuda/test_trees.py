"""Trees of drafts on a GPU, against plain Python: what is kept, what moves, what grows, and what a node sees."""

import math
import random

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.attention.paged_attention import attention_plan
from cumulo.kernels.cuda.sampling.rounds import NextInputs, RoundRows
from cumulo.kernels.cuda.sampling.tree_growth import EACH, PART, WIDTH, Growth, grow, logit_parts
from cumulo.kernels.cuda.sampling.trees import (
    MOST_PLACES,
    accept_tree,
    accepted_path,
    settle,
    tree_inputs,
    tree_words,
)


def random_tree(rng: random.Random, places: int) -> list[int]:
    return [0, *(rng.randrange(place) for place in range(1, places))]


def depth_of(parents: list[int], place: int) -> int:
    return 0 if place == 0 else 1 + depth_of(parents, parents[place])


def ancestors(parents: list[int], place: int) -> list[int]:
    """Of a place, itself included, from the root."""
    return [0] if place == 0 else [*ancestors(parents, parents[place]), place]


def ints(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_the_longest_path_that_was_drawn_is_kept_and_told(device: torch.device) -> None:
    rng, drafts, places = random.Random(3), 7, 8
    slots, starts = [2, 0, -1, 4, 1, 3], [5, 0, 0, 9, 3, 20]
    parents = [random_tree(rng, places) for _ in slots]
    drawn = [[rng.randrange(2) for _ in range(places)] for _ in slots]
    drawn[4][0] = -1  # logits were NaN there
    named = [[rng.randrange(2) for _ in range(places)] for _ in slots]
    trees = ints([tree_words([0] * MOST_PLACES)] * 5, device)
    for slot, tree in zip(slots, parents, strict=True):
        if slot >= 0:
            trees[slot, :places] = ints(tree_words(tree), device)
    lane_slots = ints([slot for slot in slots for _ in range(places)], device)
    lane_starts = ints([start + place for start in starts for place in range(places)], device)
    draws = torch.full((len(lane_slots), 9), -5, dtype=torch.int32, device=device)
    positions, words = ints([-1] * len(lane_slots), device), ints([0] * len(lane_slots), device)
    tree_inputs(lane_slots, lane_starts, draws, trees, positions, words, places)
    rows, tokens = RoundRows.zeros(len(slots), 2 * (drafts + 2), device), ints([[-7] * 40] * 5, device)
    rows.turns[:] = 1  # the second round of a step
    behind, moves = ints([0] * len(lane_slots), device), ints([9] * (len(lane_slots) + MOST_PLACES), device)
    flat = [ints([one for row in table for one in row], device) for table in (drawn, named)]
    accept_tree(lane_slots, lane_starts, *flat, words, behind, tokens, rows, moves, drafts)
    kept_counts = set()
    for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        lanes = range(row * places, (row + 1) * places)
        if slot < 0:
            assert rows.slots[row] == -1 and all(moves[lane] == -1 for lane in lanes)
            continue
        depths = [depth_of(parents[row], place) for place in range(places)]
        assert positions[lanes].tolist() == [start + depth for depth in depths]
        assert draws[lanes, 1].tolist() == [start + depth + 1 for depth in depths]
        path = accepted_path(drawn[row], named[row], parents[row])
        kept_counts.add(len(path))
        told = rows.told[row, drafts + 2 :].tolist()
        assert told[0] == len(path) - 1 and told[1 : 1 + len(path)] == [drawn[row][place] for place in path]
        came = [max(0, drawn[row][place]) for place in path]
        assert tokens[slot, start + 1 : start + 1 + len(path)].tolist() == came
        assert rows.starts[row] == start + len(path) and rows.kept[row] == row * places + path[-1]
        assert lane_starts[lanes].tolist() == [start + len(path) + place for place in range(places)]
        assert behind[lanes].tolist() == [max(0, token) for token in drawn[row]]
        wanted = {place: depth for depth, place in enumerate(path) if depth != place}
        assert moves[lanes].tolist() == [wanted.get(place, -1) for place in range(places)]
    assert len(kept_counts) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_kept_keys_and_values_go_to_their_places_and_nothing_else_moves(
    dtype: torch.dtype, device: torch.device
) -> None:
    generator, drafts = torch.Generator().manual_seed(0), 4
    keys, values = (
        torch.randn(2, 6, 3, 4, dim, generator=generator).to(dtype).to(device) for dim in (16, 24)
    )
    before = [one.float().cpu().clone() for one in (keys, values)]
    lanes = torch.randperm(24, generator=generator)[:10]  # of two rows, whose places lie anywhere
    moves = ints([-1, -1, -1, 2, 3, -1, -1, 1, -1, -1], device)  # place 3 is read, and written by place 4
    settle(keys, values, lanes.int().to(device), moves, drafts, 2)
    source = torch.arange(24)
    for lane, target in ((3, 2), (4, 3), (7, 6)):
        source[lanes[target]] = lanes[lane]
    for now, then in zip((keys, values), before, strict=True):
        flat = then.transpose(2, 3).flatten(1, 2)[:, source]
        assert torch.equal(now.float().cpu().transpose(2, 3).flatten(1, 2), flat)


@pytest.mark.parametrize(("prefix", "block_size"), [(3, 16), (60, 64)])
def test_a_node_sees_its_ancestors_and_the_prefix_only(
    prefix: int, block_size: int, device: torch.device
) -> None:
    """Against attention over the keys of its way alone; the second tree lies across a tile's end."""
    generator, places, heads, kv_heads, dim = torch.Generator().manual_seed(prefix), 6, 4, 2, 16
    parents = [0, 0, 0, 1, 2, 4]
    blocks = -(-(prefix + places) // block_size)
    keys, values = (
        torch.randn(blocks, kv_heads, block_size, dim, generator=generator).to(device) for _ in range(2)
    )
    query = torch.randn(places, heads, dim, generator=generator).to(device)
    plan = attention_plan(places, places, heads, kv_heads, dim, block_size, blocks, True, False, device)
    contexts = ints([prefix + place for place in range(1, places + 1)], device)
    plan.prepare(
        ints(list(range(places + 1)), device), contexts, ints([list(range(blocks))] * places, device)
    )
    plan.trees = ints(tree_words(parents), device)
    out = torch.full((places, heads, dim), math.nan, device=device)
    plan.attend(query, keys, values, out, dim**-0.5)
    flat_keys, flat_values = (one.transpose(1, 2).flatten(0, 1).double() for one in (keys, values))
    for place in range(places):
        seen = [*range(prefix), *(prefix + one for one in ancestors(parents, place))]
        key, value = (one[seen].repeat_interleave(heads // kv_heads, 1) for one in (flat_keys, flat_values))
        scores = torch.einsum("hd,nhd->hn", query[place].double(), key) * dim**-0.5
        mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)
        torch.testing.assert_close(out[place].double(), mixed, rtol=1e-4, atol=1e-5)


def grown(
    chances_behind: dict[tuple[int, ...], Tensor], token_of: list[int], levels: int, drafts: int
) -> tuple[list[tuple[int, int]], list[tuple[int, ...]]]:
    """A tree grown in plain Python, from the logarithms of chances behind each way of tokens: (token, parent's
    place) of every draft, and the ways that are followed behind the last level."""
    nodes: list[tuple[float, int, tuple[int, ...]]] = []
    followed, chances = [()], {(): 0.0}
    for _ in range(levels):
        level: list[tuple[float, int, tuple[int, ...]]] = []
        for way in followed:
            best = chances_behind[way].topk(EACH)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                longer = (*way, token_of[index])
                chances[longer] = chances[way] + value
                level.append((-chances[longer], len(nodes) + len(level), longer))
        nodes += level
        followed = [way for _, _, way in sorted(level)[:WIDTH]]
    chosen = [way for _, _, way in sorted(nodes)[:drafts]]
    place_of = {(): 0} | {way: place for place, way in enumerate(chosen, 1)}
    return [(way[-1], place_of[way[:-1]]) for way in chosen], followed


def test_a_tree_grows_where_its_tokens_are_likeliest(device: torch.device) -> None:
    """Two rows and one that is nobody's; each level leaves the head a step of one token for each followed node."""
    generator, vocabulary, hidden, page, drafts, levels = torch.Generator().manual_seed(1), 200, 24, 16, 7, 3
    slots, starts, live = [1, -1, 0], [14, 0, 37], [0, 2]
    token_of = torch.randperm(500, generator=generator)[:vocabulary]
    names = token_of.tolist()
    rows = RoundRows.zeros(3, 4, device)
    rows.slots.copy_(ints(slots, device))
    rows.starts.copy_(ints(starts, device))
    growth = Growth.empty(3, hidden, torch.float32, device)
    tokens, tables = ints([[0] * 64] * 2, device), torch.randperm(8, generator=generator).view(2, 4).int()
    trees, lanes = ints([[1] * MOST_PLACES] * 2, device), 3 * WIDTH
    items = torch.full((lanes * 2, 8), 7, dtype=torch.int32, device=device)
    inputs = NextInputs(
        *(ints([0] * lanes, device) for _ in range(4)), ints([[0] * 4] * lanes, device), items, 16, 1
    )
    parts = -(-vocabulary // PART)
    logits_of: list[dict[tuple[int, ...], Tensor]] = [{}, {}, {}]
    chances_of: list[dict[tuple[int, ...], Tensor]] = [{}, {}, {}]
    stream_of: list[dict[tuple[int, ...], Tensor]] = [{}, {}, {}]
    ways: list[list[tuple[int, ...]]] = [[()], [()], [()]]
    for level in range(1, levels + 1):
        for row, way in [(number, way) for number in range(3) for way in ways[number]]:
            # Each part tells its largest logit only, so that no part has two large ones.
            logits = torch.full((vocabulary,), -20.0)
            logits[torch.arange(parts) * PART] = 3 * torch.randn(parts, generator=generator)
            logits_of[row].setdefault(way, logits)
            chances_of[row].setdefault(way, logits.log_softmax(-1))
            stream_of[row].setdefault(way, torch.randn(hidden, generator=generator))
        given, stream = (
            torch.stack([of[row][way] for row in range(3) for way in ways[row]]).to(device)
            for of in (logits_of, stream_of)
        )
        best, mass = (torch.zeros(len(given), parts, device=device) for _ in range(2))
        place = torch.zeros(len(given), parts, dtype=torch.int32, device=device)
        logit_parts(given, best, place, mass)
        grow(best, place, mass, token_of.int().to(device), rows, growth, stream, tokens, tables.to(device), trees,
             page, level, drafts, inputs if level < levels else None)  # fmt: skip
        if level == levels:
            break
        ways[1] = [()] * WIDTH
        assert inputs.kv_slots[WIDTH : 2 * WIDTH].tolist() == [-1] * WIDTH
        assert inputs.contexts[WIDTH : 2 * WIDTH].tolist() == [0] * WIDTH
        for row in live:
            ways[row] = grown(chances_of[row], names, level, 1)[1]
            mine, start, table = (
                range(row * WIDTH, (row + 1) * WIDTH),
                starts[row],
                tables[slots[row]].tolist(),
            )
            lies = [start + (level - 1) * WIDTH + new for new in range(WIDTH)]
            assert inputs.tokens[mine].tolist() == [way[-1] for way in ways[row]]
            assert inputs.positions[mine].tolist() == [start + level - 1] * WIDTH
            assert inputs.contexts[mine].tolist() == [one + 1 for one in lies]
            assert inputs.kv_slots[mine].tolist() == [table[one // page] * page + one % page for one in lies]
            for lane, way in zip(mine, ways[row], strict=True):
                assert torch.equal(growth.streams[lane].cpu(), stream_of[row][way[:-1]])
                mine_of = [item for item in items.tolist() if item[2] and item[0] == lane]
                tiles = sorted(tile for item in mine_of for tile in range(item[1], item[1] + item[2]))
                assert tiles == list(range(-(-int(inputs.contexts[lane]) // 16)))
    for row in live:
        nodes, _ = grown(chances_of[row], names, levels, drafts)
        first = starts[row] + 1
        assert tokens[slots[row], first : first + drafts].tolist() == [token for token, _ in nodes]
        words = tree_words([0, *(parent for _, parent in nodes)])
        assert trees[slots[row], 1 : 1 + drafts].tolist() == words[1:]
        assert len({parent for _, parent in nodes}) > 2
