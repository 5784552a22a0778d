"""The cost of a schedule comes from playing it: short cuts for ranks that are alike change nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.play_cost import _repeat, play_cost
from cumulo.plan.network.lines import played_chain, played_tree


@pytest.mark.parametrize("algorithm", ["ring", "two-level", "halving-doubling", "two-shot", "one-shot"])
@pytest.mark.parametrize(("ranks", "node_size"), [(16, 4), (8, 8), (8, 1), (12, 3)])
def test_ranks_that_are_alike_give_the_same_as_all_of_them(
    algorithm: str, ranks: int, node_size: int
) -> None:
    schedule = make_schedule("all_reduce", algorithm, CollectiveShape(ranks, ranks * 64, node_size))
    every = replace(schedule, symmetry=(), alike=None)
    assert play_cost(schedule, node_size) == play_cost(every, node_size)


def test_a_ring_of_many_ranks_is_counted_without_playing_every_step() -> None:
    played = play_cost(make_schedule("all_reduce", "ring", CollectiveShape(131_072, 131_072 * 64)), 8)
    assert played.near_hops + played.far_hops == 2 * 131_071
    assert played.far_hops == 2 * 131_072 // 8
    assert played.far_load == pytest.approx(2 * 131_071 / 131_072)


@pytest.mark.parametrize(("nodes", "members"), [(2, 4), (5, 4), (8, 2)])
def test_a_tree_of_chains_takes_the_hops_of_its_tree_and_of_its_chain(nodes: int, members: int) -> None:
    whole = play_cost(
        make_schedule("all_reduce", "tree", CollectiveShape(nodes * members, nodes * members * 64, members)),
        members,
    )
    tree, chain = played_tree(nodes), played_chain(members)
    assert (whole.near_hops, whole.far_hops) == (chain.near_hops, tree.far_hops)
    assert whole.far_load == pytest.approx(tree.far_load)
    assert whole.near_load == pytest.approx(chain.near_load)


def test_twice_the_nodes_are_one_level_more() -> None:
    exact = play_cost(make_schedule("all_reduce", "tree", CollectiveShape(512, 512 * 64)), 1)
    assert played_tree(512).far_hops == exact.far_hops == 18
    assert played_tree(512).far_load == pytest.approx(exact.far_load, rel=0.01)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 50])), max_size=2), min_size=1, max_size=6),
    st.lists(st.integers(0, 4), min_size=6, max_size=6),
    st.integers(0, 90),
)  # fmt: skip
def test_steps_that_repeat_end_when_they_would_if_each_were_played(
    heard: list[list[tuple[int, int]]], begins: list[int], count: int
) -> None:
    ranks = len(heard)
    messages = [[(sender % ranks, takes) for sender, takes in some] for some in heard]
    at = begins[:ranks]
    for _ in range(count):
        at = [
            max([at[one], *(at[sender] + takes for sender, takes in messages[one])]) for one in range(ranks)
        ]
    assert _repeat(begins[:ranks], messages, count) == at
