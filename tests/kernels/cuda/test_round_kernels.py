"""What a draft head reads against plain torch, and what a proposal leaves for the head's next step."""

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.attention.work_list import build_work_list
from cumulo.kernels.cuda.elementwise.rms_norm import norm_pair, reference
from cumulo.kernels.cuda.elementwise.step_inputs import step_inputs
from cumulo.kernels.cuda.sampling.greedy_rounds import (
    TileConfig,
    fits_tiles,
    likeliest_tiles,
    tile_parts,
)
from cumulo.kernels.cuda.sampling.rounds import NextInputs, RoundRows, propose, round_inputs
from tests.kernels.cuda.tolerance import check_close, poisoned
from tests.thorough import rare

EPS = 1e-5


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).half()


@pytest.mark.parametrize(("m", "k"), [(1, 96), (3, 300), *rare((8, 64), (4, 576))])
def test_token_and_stream_are_normed_apart_and_side_by_side(m: int, k: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(m + k)
    embed, stream = draw(generator, 11, k).to(device), 3 * draw(generator, m, k).to(device)
    norms = [1 + draw(generator, k).to(device) / 4 for _ in range(2)]
    ids = torch.randint(0, 11, (m,), generator=generator).int().to(device)
    out = poisoned(m, 2 * k, dtype=torch.float16, device=device)
    norm_pair(embed, ids, stream, *norms, EPS, out)

    def exact(tokens: Tensor, stream: Tensor, first: Tensor, second: Tensor) -> Tensor:
        normed = (
            torch.nn.functional.rms_norm(x, (k,), gains, EPS)
            for x, gains in ((tokens, first), (stream, second))
        )
        return torch.cat(tuple(normed), dim=-1)

    check_close(out, exact, embed[ids.long()], stream, *norms)


@pytest.mark.parametrize("min_tiles", [1, 3])
def test_a_proposal_leaves_what_separate_launches_would(min_tiles: int, device: torch.device) -> None:
    """Token, position, KV slot, context, block table and a work list that covers every key tile once."""
    count, page, ahead, blocks, tile = 3, 16, 2, 24, 16
    generator = torch.Generator().manual_seed(min_tiles)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    rows = RoundRows.zeros(count, 4, device)
    rows.slots.copy_(torch.tensor([2, -1, 0]))
    rows.starts.copy_(torch.tensor([300, 0, 15]))
    rows.one_each.copy_(torch.tensor([0, 1, 2, 3]))
    tables = torch.randperm(4 * blocks, generator=generator).view(4, blocks).int().to(device)
    logits = torch.randn(count, 40, generator=generator).to(device)
    token_of = torch.randperm(99, generator=generator)[:40].int().to(device)
    tokens, apart = zeros(4, 400), zeros(4, 400)
    items = torch.full((33, 8), 7, dtype=torch.int32, device=device)
    inputs = NextInputs(*(zeros(count) for _ in range(4)), zeros(count, blocks), items, tile, min_tiles)
    best, place = logits.view(count, 8, 5).max(dim=2)
    place = (place + 5 * torch.arange(8, device=device)).int()
    propose(best, place, token_of, rows, tokens, tables, page, ahead, inputs)

    for row in (0, 2):
        apart[rows.slots[row], rows.starts[row] + ahead] = token_of[logits[row].argmax()]
    assert torch.equal(tokens, apart)
    named, positions, slots, contexts = (zeros(count) for _ in range(4))
    step_tables, none = zeros(count, blocks), torch.full((count,), -1, dtype=torch.int32, device=device)
    step_inputs(rows.slots, rows.chain_starts, rows.one_each, none, none, apart[:, 1:], tables, page, named,
                positions, slots, contexts, step_tables)  # fmt: skip
    live = [0, 2]
    for mine, theirs in ((inputs.tokens, named), (inputs.positions, positions), (inputs.kv_slots, slots),
                         (inputs.contexts, contexts)):  # fmt: skip
        assert mine[live].tolist() == theirs[live].tolist()
    assert inputs.kv_slots[1] == -1 and inputs.contexts.tolist() == contexts.tolist()
    assert torch.equal(inputs.step_tables[live], step_tables[live])
    expected = torch.zeros(33, 8, dtype=torch.int32, device=device)
    build_work_list(rows.one_each, contexts, step_tables, expected, None, block_size=page, key_tile=tile,
                    query_tile=16, min_tiles=min_tiles, window=None, chunk_from=2)  # fmt: skip
    assert _covered(items, count) == _covered(expected, count)
    for record in items.tolist():
        if record[2]:
            sequence, first, _, splits, first_item, row, context, block = record
            assert (
                row == sequence
                and context == contexts[row]
                and block == step_tables[row, first * tile // page]
            )
            assert [items[first_item + split, 3].item() for split in range(splits)] == [splits] * splits


@pytest.mark.parametrize(("m", "n", "k"), [(1, 37, 96), (4, 64, 80), *rare((8, 100, 64), (3, 50, 576))])
def test_each_tile_tells_its_largest_output(m: int, n: int, k: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(n)
    x, weight = draw(generator, m, k).to(device), draw(generator, n, k).to(device)
    norm = 1 + draw(generator, k).to(device) / 4
    weight[n // 2] = weight[3]  # of equals the first
    tile = TileConfig(16, 2)
    parts = tile_parts(n, tile)
    best = poisoned(m, parts, dtype=torch.float32, device=device)
    place = torch.full((m, parts), -9, dtype=torch.int32, device=device)
    likeliest_tiles(x, weight, norm, EPS, best, place, tile)
    found = place.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]
    exact = (reference(x.double(), norm.double(), EPS) @ weight.double().t()).argmax(dim=-1)
    assert found.tolist() == exact.tolist()


def test_an_output_that_is_no_number_is_told(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = draw(generator, 2, 48).to(device), draw(generator, 40, 48).to(device)
    weight[20, 5] = torch.nan
    tile = TileConfig(16, 2)
    best = poisoned(2, 3, dtype=torch.float32, device=device)
    place = torch.zeros(2, 3, dtype=torch.int32, device=device)
    likeliest_tiles(x, weight, torch.ones(48, dtype=x.dtype, device=device), EPS, best, place, config=tile)
    assert best.isnan().tolist() == [[False, True, False]] * 2
    assert fits_tiles(8, 576) and not fits_tiles(9, 576) and not fits_tiles(1, 4096)


def test_a_round_begins_as_with_separate_launches(device: torch.device) -> None:
    """Token, position, KV slot, context, table, embedding, and a work list that covers every key tile once, though
    its buffer was full of another step's."""
    lanes, page, blocks, tile, hidden = 3, 16, 24, 16, 20
    generator = torch.Generator().manual_seed(2)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    slots = torch.tensor([2, 2, -1], dtype=torch.int32, device=device)
    starts = torch.tensor([300, 301, 0], dtype=torch.int32, device=device)
    tokens = torch.randint(0, 9, (4, 400), generator=generator).int().to(device)
    tables = torch.randperm(4 * blocks, generator=generator).view(4, blocks).int().to(device)
    embed = torch.randn(9, hidden, generator=generator).to(device)
    stream = poisoned(lanes, hidden, dtype=torch.float32, device=device)
    items = torch.full((31, 8), 7, dtype=torch.int32, device=device)  # one more than equal shares take
    inputs = NextInputs(*(zeros(lanes) for _ in range(4)), zeros(lanes, blocks), items, tile, 1)
    round_inputs(slots, starts, tokens, tables, page, embed, inputs, stream)

    queries = torch.tensor([0, 1, 2, 2], dtype=torch.int32, device=device)
    named, positions, kv_slots, contexts = (zeros(lanes) for _ in range(4))
    step_tables, none = zeros(lanes, blocks), torch.full((lanes,), -1, dtype=torch.int32, device=device)
    step_inputs(slots, starts, queries, none, none, tokens, tables, page, named, positions, kv_slots, contexts,
                step_tables)  # fmt: skip
    for mine, theirs in ((inputs.tokens, named), (inputs.positions, positions), (inputs.kv_slots, kv_slots),
                         (inputs.contexts, contexts), (inputs.step_tables, step_tables)):  # fmt: skip
        assert torch.equal(mine, theirs)
    assert torch.equal(stream, embed[named.long()])
    expected = torch.zeros(31, 8, dtype=torch.int32, device=device)
    build_work_list(queries, contexts, step_tables, expected, None, block_size=page, key_tile=tile, query_tile=16,
                    min_tiles=1, window=None, chunk_from=2)  # fmt: skip
    assert _covered(items, lanes) == _covered(expected, lanes)


def _covered(items: Tensor, rows: int) -> list[list[int]]:
    """Key tiles of each row, in the order of its items."""
    found: list[list[int]] = [[] for _ in range(rows)]
    for sequence, first, count, *_ in items.tolist():
        if count:
            found[sequence] += range(first, first + count)
    return found
