"""The mesh of ranks as arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from tests import thorough

AXES = (
    "world", "pp", "dp", "cp", "tp", "data", "ep", "expert_data", "ring", "ulysses", "shard", "copies",
)  # fmt: skip
small = st.sampled_from((1, 2, 3, 4))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, cp = draw(small), draw(small)
    zero = draw(st.sampled_from((0, 1, 2, 3)))
    divisors = lambda number: st.sampled_from([size for size in range(1, number + 1) if number % size == 0])  # noqa: E731
    return Layout(
        dp, draw(small), draw(small), cp, draw(divisors(dp * cp)), zero, ulysses=draw(divisors(cp)),
        shard=draw(divisors(dp)) if zero else None,
    )  # fmt: skip


@settings(max_examples=thorough.examples(12))
@given(layouts())
def test_every_axis_cuts_the_ranks_into_groups_of_equal_size(layout: Layout) -> None:
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        assert len({len(group) for group in groups}) == 1
        assert all(layout.group(axis, rank) == group for group in groups for rank in group)


@settings(max_examples=thorough.examples(25))
@given(layouts())
def test_the_mesh_is_the_array_one_can_print(layout: Layout) -> None:
    mesh = np.arange(layout.world).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    for rank in range(layout.world):
        at = layout.place(rank)
        assert mesh[at.pp, at.dp, at.cp, at.tp] == rank == layout.rank(at)
        assert layout.group("tp", rank) == tuple(mesh[at.pp, at.dp, at.cp, :])
        assert layout.group("pp", rank) == tuple(mesh[:, at.dp, at.cp, at.tp])
        assert layout.group("data", rank) == tuple(mesh[at.pp, :, :, at.tp].flatten())


@settings(max_examples=thorough.examples(25))
@given(layouts())
def test_shards_and_their_copies_make_up_the_data_ranks(layout: Layout) -> None:
    for pair in (("shard", "copies"), ("ep", "expert_data")):
        sizes = [len(layout.group(axis, 0)) for axis in pair]  # type: ignore[arg-type]
        assert sizes[0] * sizes[1] == layout.data_ranks
    if layout.zero:  # experts are shared out by all that hold the same ones, whatever `shard` says
        sizes = [len(layout.group(axis, 0)) for axis in ("shard", "expert_data")]
        assert [layout.zero_ranks, layout.expert_zero_ranks] == sizes
    assert len(layout.group("ring", 0)) * len(layout.group("ulysses", 0)) == layout.cp


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dp": 0}, "dp must be 1 or more"),
        ({"dp": 6, "ep": 4}, "ep 4 does not divide dp × cp = 6.*3 would"),
        ({"cp": 4, "ulysses": 3}, "ulysses 3 does not divide cp 4; 2 would"),
        ({"dp": 4, "zero": 1, "shard": 3}, "shard 3 does not divide dp 4; 2 would"),
        ({"dp": 4, "shard": 2}, "set layout.zero"),
        ({"sequence_parallel": True}, "needs tp of 2 or more"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(**values)  # type: ignore[arg-type]


def test_a_layout_says_what_it_is() -> None:
    assert str(Layout()) == "one process"
    named = Layout(dp=2, tp=2, pp=2, zero=1, sequence_parallel=True, schedule="zb-v")
    assert str(named) == "dp2 tp2+sp pp2 (zb-v) zero1"
