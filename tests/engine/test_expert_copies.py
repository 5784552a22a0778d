"""Copies of experts are placed by load: everything is held, ranks hold equally many, and the busiest gets less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.layout.expert_placement import EMPTY, ExpertCopies, copies_problem, first_places, place_copies


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], ExpertCopies]:
    ranks = draw(st.integers(2, 5))
    experts = draw(st.integers(ranks, 20))
    fitting = [r for r in range(1, experts * (ranks - 1) + 1) if (experts + r) % ranks == 0]
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return loads, first_places(experts, ranks, draw(st.sampled_from(fitting[:6])))


def check_whole(one: ExpertCopies, experts: int) -> None:
    """Every expert is held, and its copies share its tokens: each row belongs to exactly one of them."""
    assert len({len(held) for held in one.places}) == 1
    for expert in range(experts):
        copies = [held for rank in range(len(one.places)) for held in one.held(rank) if held.expert == expert]
        assert sorted(held.copy for held in copies) == list(range(len(copies)))
        assert {held.copies for held in copies} == {len(copies)} and copies


@given(cases())
def test_a_placement_holds_every_expert_and_never_loads_the_busiest_more(
    case: tuple[list[int], ExpertCopies],
) -> None:
    loads, first = case
    check_whole(first, len(loads))
    after = place_copies(loads, first)
    check_whole(after, len(loads))
    assert after.busiest(loads) <= first.busiest(loads)
    assert after is first or all(EMPTY not in held for held in after.places)
    check_whole(place_copies(loads[::-1], after), len(loads))


@given(cases())
def test_the_moves_lead_to_the_new_placement(case: tuple[list[int], ExpertCopies]) -> None:
    loads, first = case
    after = place_copies(loads, first)
    now = [list(held) for held in first.places]
    for move in first.moves_to(after):
        assert move.expert in first.places[move.source]
        now[move.target][move.place] = move.expert
    assert [tuple(held) for held in now] == list(after.places)


def test_an_expert_with_most_tokens_is_shared() -> None:
    loads = [1000, 10, 10, 10, 10, 10]
    first = first_places(6, 2, 2)
    after = place_copies(loads, first)
    assert after.ranks_of(0) == [0, 1]
    assert first.busiest(loads) > 1.9 and after.busiest(loads) < 1.05
    assert place_copies([10] * 6, first) is first  # nothing to gain


def test_copies_that_cannot_be_shared_evenly_are_refused_with_those_that_can() -> None:
    assert copies_problem(6, 2, 2) is None
    assert copies_problem(6, 4, 1) == (
        "1 redundant experts next to 6 cannot be shared evenly by ep 4; 2, 6, 10 can"
    )
    with pytest.raises(ConfigError, match="2, 4, 6 can"):
        first_places(6, 2, 3)
