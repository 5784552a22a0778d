"""Who holds what: every element of every parameter, as often as it should be, wherever the layout puts it."""

import numpy as np
import pytest

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout, held_chunks
from cumulo.layout.pieces import Box, chunk_parts, pieces, zero_rows
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec

DENSE = ModelSpec("llama", 32, 8, 5, 4, 2, 2, 12, 64, tied_embeddings=True, qkv_bias=True, qk_norm=True)
EXPERTS = ModelSpec(
    "deepseek_v3", 32, 8, 4, 4, 4, 2, 12, 64,
    moe=MoESpec(4, 2, 6, shared_hidden=4, selection_bias=True, dense_layers=(0,)), mla=MLASpec(6, 4, 2, 2, 2),
)  # fmt: skip
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(dp=2, tp=2, sequence_parallel=True),
    Layout(dp=2, pp=2, cp=2, ep=2),
    Layout(dp=4, ep=4, tp=2),
    Layout(pp=2, schedule="zb-v", tp=2, cp=2),
    Layout(pp=2, schedule="interleaved-1f1b"),
    Layout(pp=4, schedule="dualpipe", dp=2, ep=2),
]


@pytest.mark.parametrize("spec", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_element_is_held_by_exactly_its_holders(spec: ModelSpec, layout: Layout) -> None:
    seen = {name: np.zeros(shape, dtype=int) for name, shape in parameter_shapes(spec).items()}
    wanted = {name: np.zeros(shape, dtype=int) for name, shape in parameter_shapes(spec).items()}
    for rank in range(layout.world):
        for name, piece in pieces(spec, layout, rank).items():
            own = np.zeros(piece.shape, dtype=int)
            for box in piece.boxes:
                seen[name][box.whole_slices] += 1
                wanted[name][box.whole_slices] = len(piece.holders)
                own[box.held_slices] += 1
            assert (own == 1).all(), f"{name}: the local part is not covered once"
            assert rank in piece.holders
    for name in seen:
        np.testing.assert_array_equal(seen[name], wanted[name], name)
        assert (seen[name] >= 1).all(), name


def test_holders_agree_on_what_they_hold() -> None:
    layout = Layout(dp=2, pp=2, tp=2, ep=2, schedule="dualpipe")
    everyones = [pieces(EXPERTS, layout, rank) for rank in range(layout.world)]
    for own in everyones:
        for name, piece in own.items():
            for other in piece.holders:
                assert everyones[other][name].boxes == piece.boxes


def test_a_fused_projection_gives_each_rank_some_of_every_part() -> None:
    boxes = pieces(DENSE, Layout(tp=2), 1)["layers.0.attention.qkv.weight"].boxes
    assert boxes == (
        Box((4, 0), (4, 8), (0, 0)),  # half of the query's 8 rows
        Box((10, 0), (2, 8), (4, 0)),  # half of the key's 4
        Box((14, 0), (2, 8), (6, 0)),
    )


@pytest.mark.parametrize("rows", [1, 3, 8, 10])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zero_gives_every_row_to_one_rank(rows: int, ranks: int) -> None:
    parts = [zero_rows(rows, ranks, index) for index in range(ranks)]
    assert [row for begin, end in parts for row in range(begin, end)] == list(range(rows))


def test_rows_of_a_piece_keep_their_place_in_the_whole() -> None:
    piece = pieces(DENSE, Layout(tp=2), 1)["layers.0.attention.qkv.weight"]
    whole = np.arange(16 * 8).reshape(16, 8)
    local = np.zeros(piece.shape, dtype=int)
    for box in piece.boxes:
        local[box.held_slices] = whole[box.whole_slices]
    rows = np.zeros((3, 8), dtype=int)
    for box in piece.cut_rows(3, 6):
        rows[box.held_slices] = whole[box.whole_slices]
    np.testing.assert_array_equal(rows, local[3:6])


def test_layers_are_spread_evenly_and_the_head_chunk_is_not_the_longest() -> None:
    parts = chunk_parts(DENSE, Layout(pp=2))
    assert [len(part.layers) for part in parts] == [3, 2]
    assert [part.first for part in parts] == [True, False]
    assert [part.last for part in parts] == [False, True]


def test_a_v_puts_the_first_and_the_last_chunk_on_one_stage() -> None:
    layout = Layout(pp=2, schedule="zb-v")
    assert held_chunks(layout, 0) == ((0, 0), (3, 0))
    assert held_chunks(layout, 1) == ((1, 0), (2, 0))


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 layers cannot fill the 8 chunks"):
        chunk_parts(DENSE, Layout(pp=4, schedule="zb-v"))
