"""Placing experts by their load: even, and with the router's groups together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.layout.expert_placement import heaviest_share, place_experts


@given(st.data())
def test_a_placement_is_an_order_no_worse_than_the_greedy_bound(data: st.DataObject) -> None:
    ranks, room = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    loads = data.draw(st.lists(st.floats(0, 100), min_size=ranks * room, max_size=ranks * room))
    order = place_experts(loads, ranks)
    assert sorted(order) == list(range(len(loads)))
    if sum(loads):
        # No rank can be ahead of another by more than one expert per place it has.
        sums = [sum(loads[e] for e in order[r * room : (r + 1) * room]) for r in range(ranks)]
        assert max(sums) - min(sums) <= max(loads) * (1 + 1e-9)


def test_heavy_experts_that_lay_together_are_spread() -> None:
    loads = [9.0, 8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0]
    order = place_experts(loads, 4)
    assert heaviest_share(loads, range(8), 4) == pytest.approx(2.0)
    assert heaviest_share(loads, order, 4) == pytest.approx(10 * 4 / 34)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_groups_of_the_router_stay_together(ranks: int) -> None:
    loads = [float((7 * expert) % 13) for expert in range(16)]
    order = place_experts(loads, ranks, groups=4)
    assert sorted(order) == list(range(16))
    for begin in range(0, 16, 4):
        assert len({expert // 4 for expert in order[begin : begin + 4]}) == 1


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 experts do not divide into 4 ranks"):
        place_experts([1.0] * 6, 4)
    with pytest.raises(ConfigError, match="cannot be placed whole"):
        place_experts([1.0] * 24, 6, groups=4)
