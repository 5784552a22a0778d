"""The checker refuses wrong schedules by name, and counts right ones."""

from dataclasses import replace

import pytest

from cumulo.collectives.decide.check import WrongCollective, check_collective
from cumulo.collectives.decide.ring import ring_all_reduce
from cumulo.collectives.decide.schedule import (
    CollectiveSchedule,
    CollectiveStep,
    EvenSizes,
    Move,
    Transfer,
)


def _listed(schedule: CollectiveSchedule) -> list[list[list[CollectiveStep]]]:
    """All steps by rank and channel, to be changed."""
    return [
        [list(schedule.steps(rank, channel)) for channel in range(schedule.channels)]
        for rank in range(schedule.nodes)
    ]


def _with(schedule: CollectiveSchedule, steps: list[list[list[CollectiveStep]]]) -> CollectiveSchedule:
    return replace(schedule, program=lambda rank, channel: steps[rank][channel])


def test_a_ring_all_reduce_takes_its_steps_and_bytes() -> None:
    report = check_collective(ring_all_reduce(5, 1000))
    assert report.steps == 8
    assert report.most_sent == 2 * 4 * 200
    assert report.additions_by_rank == (800,) * 5
    assert report.elements_by_link == {(rank, (rank + 1) % 5): 1600 for rank in range(5)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("elements", [0, 1, 5, 100])
def test_a_ring_is_right_with_channels_rounds_and_empty_chunks(ranks: int, elements: int) -> None:
    schedule = ring_all_reduce(ranks, elements, channels=2, rounds=3)
    assert sum(schedule.sizes) == elements
    check_collective(schedule)


def test_rings_in_different_orders_are_right() -> None:
    orders = [[0, 1, 2, 3], [0, 2, 1, 3], [3, 0, 2, 1]]
    report = check_collective(ring_all_reduce(4, 120, channels=3, orders=orders))
    assert (2, 1) in report.elements_by_link and (1, 0) not in report.elements_by_link


def test_the_symmetry_gives_every_rank_its_peers() -> None:
    schedule = ring_all_reduce(6, 600, channels=2)
    own = [[t.peer for t in step] for step in schedule.steps(0, 1)]
    for rank in range(6):
        moved = [[schedule.moved(peer, rank) for peer in step] for step in own]
        assert moved == [[t.peer for t in step] for step in schedule.steps(rank, 1)]


def test_a_lost_step_is_a_deadlock_that_names_who_waits() -> None:
    schedule = ring_all_reduce(3, 30)
    steps = _listed(schedule)
    del steps[1][0][-1]
    with pytest.raises(WrongCollective, match=r"deadlock: .*rank 1 has ended"):
        check_collective(_with(schedule, steps))


def test_sends_before_receives_deadlock_under_rendezvous() -> None:
    schedule = CollectiveSchedule(
        "all_reduce",
        "naive",
        2,
        EvenSizes(4, 1),
        lambda rank, channel: [(Transfer(Move.SEND, 1 - rank, 0),), (Transfer(Move.REDUCE, 1 - rank, 0),)],
    )
    with pytest.raises(WrongCollective, match="deadlock: rank 0 waits in step 0 to send to 1"):
        check_collective(schedule)


def test_a_part_counted_twice_is_found() -> None:
    twice: list[CollectiveStep] = [(Transfer(Move.SEND, 1, 0),)] * 2
    takes: list[CollectiveStep] = [(Transfer(Move.REDUCE, 0, 0),)] * 2
    back: list[CollectiveStep] = [(Transfer(Move.SEND, 0, 0),)]
    gets: list[CollectiveStep] = [(Transfer(Move.COPY, 1, 0),)]
    steps = [[twice + gets], [takes + back]]
    schedule = CollectiveSchedule("all_reduce", "twice", 2, (4,), lambda rank, channel: steps[rank][channel])
    with pytest.raises(WrongCollective, match="rank 0's part 2 times, not 1"):
        check_collective(schedule)


def test_a_chunk_that_a_rank_does_not_have_cannot_be_sent() -> None:
    steps: list[list[CollectiveStep]] = [[(Transfer(Move.COPY, 1, 0),)], [(Transfer(Move.SEND, 0, 0),)]]
    schedule = CollectiveSchedule("all_gather", "wrong", 2, (1, 1), lambda rank, channel: steps[rank])
    with pytest.raises(WrongCollective, match="rank 1, channel 0, step 0 sends chunk 0"):
        check_collective(schedule)


def test_messages_that_do_not_match_are_named() -> None:
    schedule = ring_all_reduce(3, 30)
    steps = _listed(schedule)
    first = steps[0][0][0]
    steps[0][0][0] = (replace(first[0], chunk=(first[0].chunk + 1) % 3), first[1])
    with pytest.raises(WrongCollective, match=r"rank 0 sends chunk .* but rank 1 expects chunk"):
        check_collective(_with(schedule, steps))
