"""Every algorithm of the catalogue is proved right for many shapes, and does what its page says."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.collectives.decide.catalog import CollectiveShape, algorithms, make_schedule
from cumulo.collectives.decide.check import check_collective
from cumulo.collectives.decide.schedule import COLLECTIVES
from cumulo.errors import ConfigError

ALL = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]
_NODES = {"two-level", "multi-ring", "tree"}


@pytest.mark.long
@pytest.mark.parametrize(("collective", "algorithm"), ALL, ids=[f"{c}-{a}" for c, a in ALL])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_algorithm_is_right_for_any_shape(collective: str, algorithm: str, data: st.DataObject) -> None:
    node_size = data.draw(st.integers(1, 4)) if algorithm in _NODES else 1
    ranks = node_size * data.draw(st.integers(1, 11 // node_size))
    if algorithm == "tree":
        ranks = data.draw(st.integers(1, 11))  # its last node may be smaller
    pairs = {"all_gather": ranks, "reduce_scatter": ranks, "all_to_all": ranks * ranks}.get(collective, 0)
    blocks = data.draw(st.lists(st.integers(0, 5), min_size=pairs, max_size=pairs))
    shape = CollectiveShape(
        ranks,
        data.draw(st.integers(0, 200)),
        node_size,
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        root=data.draw(st.integers(0, ranks - 1)),
        blocks=tuple(blocks) if data.draw(st.booleans()) else (),
        radix=data.draw(st.integers(2, 4)),
    )
    schedule = make_schedule(collective, algorithm, shape)
    check_collective(schedule)
    if schedule.symmetry:
        _check_symmetry(schedule)


def _check_symmetry(schedule) -> None:  # type: ignore[no-untyped-def]
    """Rank 0 stands for all: the peers of a step, moved, are the peers of every other rank's."""
    for rank in range(schedule.ranks):
        for channel in range(schedule.channels):
            first, here = schedule.steps(0, channel), schedule.steps(rank, channel)
            assert [_chunks_by_peer(schedule, step, rank) for step in first] == [
                _chunks_by_peer(schedule, step, 0) for step in here
            ]


def _chunks_by_peer(schedule, step, rank) -> Counter:  # type: ignore[no-untyped-def,type-arg]
    found: Counter[tuple[str, int]] = Counter()
    for t in step:
        found[t.move.value, schedule.moved(t.peer, rank)] += t.count
    return found


@pytest.mark.parametrize(
    ("algorithm", "steps", "most_sent"),
    [
        ("ring", 14, 2 * 7 * 8),
        ("recursive-doubling", 3, 3 * 64),
        ("halving-doubling", 6, 2 * 7 * 8),
        ("butterfly", 6, 2 * 7 * 8),
        ("one-shot", 1, 7 * 64),
        ("two-shot", 2, 2 * 7 * 8),
        ("two-level", 3 + 2 + 3, 2 * 3 * 16 + 2 * 8),
    ],
)
def test_steps_and_bytes_are_those_of_the_books(algorithm: str, steps: int, most_sent: int) -> None:
    report = check_collective(make_schedule("all_reduce", algorithm, CollectiveShape(8, 64, node_size=4)))
    assert (report.steps, report.most_sent) == (steps, most_sent)


def test_in_a_double_binary_tree_every_rank_sends_about_twice_its_buffer() -> None:
    report = check_collective(make_schedule("all_reduce", "tree", CollectiveShape(31, 3100, pieces=10)))
    sent = [0] * 31
    for (sender, _), elements in report.elements_by_link.items():
        sent[sender] += elements
    assert max(sent) <= 1.5 * 3100 + 3100 / 2  # one tree sends its half up and twice down; the other only up


def test_rings_over_rails_leave_a_node_on_their_own_rail() -> None:
    schedule = make_schedule("all_reduce", "multi-ring", CollectiveShape(16, 1600, node_size=4))
    crossing = {
        (sender % 4, receiver % 4)
        for sender, receiver in check_collective(schedule).elements_by_link
        if sender // 4 != receiver // 4
    }
    assert crossing == {(0, 0), (1, 1), (2, 2), (3, 3)}


def test_the_two_level_all_to_all_sends_one_message_to_each_node() -> None:
    schedule = make_schedule("all_to_all", "two-level", CollectiveShape(16, 160, node_size=4))
    far = [t for step in schedule.steps(0) for t in step if t.move.value == "send" and t.peer >= 4]
    assert [t.peer for t in far] == [4, 8, 12]


@pytest.mark.long
def test_a_schedule_of_a_hundred_thousand_ranks_is_made_without_listing_it() -> None:
    for algorithm in ("ring", "halving-doubling", "two-level"):
        schedule = make_schedule("all_reduce", algorithm, CollectiveShape(131_072, 1 << 28, node_size=8))
        assert schedule.symmetry
        assert algorithm == "ring" or schedule.steps(99_999)


def test_unknown_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        make_schedule("all_reduce", "rings", CollectiveShape(4, 4))
    with pytest.raises(ConfigError, match="no whole number of nodes"):
        make_schedule("all_reduce", "two-level", CollectiveShape(7, 70, node_size=2))
