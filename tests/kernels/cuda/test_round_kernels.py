"""Kernels that do in one launch what a round did in several, against those."""

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.attention.work_list import build_work_list
from cumulo.kernels.cuda.elementwise.rope_cache import rope_cache
from cumulo.kernels.cuda.elementwise.step_inputs import step_inputs
from cumulo.kernels.cuda.linear import draft_linear
from cumulo.kernels.cuda.linear.draft_linear import paired_linear
from cumulo.kernels.cuda.linear.likeliest_linear import (
    TileConfig,
    fits,
    likeliest_tiles,
    reference,
    tile_parts,
)
from cumulo.kernels.cuda.linear.rotated_linear import rotated_linear
from cumulo.kernels.cuda.sampling.round_inputs import round_inputs
from cumulo.kernels.cuda.sampling.rounds import NextInputs
from tests.kernels.cuda.test_draft_linear import EPS, _covered, draw
from tests.kernels.cuda.tolerance import poisoned
from tests.thorough import rare


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
    exact = reference(x.double().cpu(), weight.double().cpu(), norm.double().cpu(), EPS)
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
    assert fits(8, 576) and not fits(9, 576) and not fits(1, 4096)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_product_that_rotates_leaves_what_two_kernels_do(
    interleaved: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values, to the bit; a token without a slot leaves nothing in the cache."""
    monkeypatch.setattr(draft_linear, "_PAIRED_ROWS", 16)
    generator = torch.Generator().manual_seed(5)
    heads, kv_heads, dim, hidden, m = 2, 1, 16, 96, 3
    embed, stream = draw(generator, 11, hidden).to(device), draw(generator, m, hidden).to(device)
    weight = (draw(generator, (heads + 2 * kv_heads) * dim, 2 * hidden) * hidden**-0.5).to(device)
    norms = [1 + draw(generator, hidden).to(device) / 4 for _ in range(2)]
    angles = torch.randn(20, dim // 2, generator=generator).to(device)
    ids, positions, slots = (
        torch.tensor(row, dtype=torch.int32, device=device) for row in ((4, 9, 0), (3, 19, 0), (18, 5, -1))
    )
    left = []
    for fused in (False, True):
        keys, values = (torch.zeros(3, kv_heads, 16, dim, dtype=torch.half, device=device) for _ in range(2))
        out = poisoned(m, len(weight), dtype=torch.half, device=device)
        rotation = (angles.cos(), angles.sin(), positions, slots, keys, values, heads)
        if fused:
            rotated_linear(embed, ids, stream, weight, out, *norms, EPS, *rotation, interleaved=interleaved)
        else:
            paired_linear(embed, ids, stream, weight, out, *norms, EPS)
            rope_cache(out, *rotation, interleaved=interleaved)
        left.append((out[:2, : heads * dim], keys, values))
    for one, other in zip(*left, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


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
                    min_tiles=1, window=None, invariant=False, chunk_from=2)  # fmt: skip
    assert _covered(items, lanes) == _covered(expected, lanes)
