"""Max-min fair rates: cumulo/collectives/simulate/player.py."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.collectives.simulate.player import max_min

Paths = Sequence[Sequence[int]]


def best(rows: list[list[Fraction]], bounds: list[Fraction], goal: list[Fraction]) -> Fraction:
    """max goal·x where rows·x <= bounds and x >= 0: the simplex method in exact numbers, by Bland's rule."""
    width, height = len(goal), len(rows)
    table = [[*row, *(Fraction(int(i == j)) for j in range(height)), bounds[i]] for i, row in enumerate(rows)]
    top = [*(-value for value in goal), *(Fraction(0) for _ in range(height + 1))]
    basis = list(range(width, width + height))
    while (enter := next((j for j, value in enumerate(top[:-1]) if value < 0), None)) is not None:
        ratios = [(row[-1] / row[enter], basis[i], i) for i, row in enumerate(table) if row[enter] > 0]
        assert ratios, "unbounded"
        leave = min(ratios)[2]
        pivot = table[leave][enter]
        table[leave] = [value / pivot for value in table[leave]]
        for i, row in enumerate(table):
            if i != leave and row[enter]:
                factor = row[enter]
                table[i] = [value - factor * one for value, one in zip(row, table[leave], strict=True)]
        factor = top[enter]
        top = [value - factor * one for value, one in zip(top, table[leave], strict=True)]
        basis[leave] = enter
    return top[-1]


def lexicographic(paths: Paths, capacity: Sequence[int]) -> list[Fraction]:
    """Linear programs, one after another: raise all rates together as far as they go, fix those that can go no
    further, and go on with the rest."""
    rates: list[Fraction | None] = [None] * len(paths)
    while None in rates:
        open_ = [i for i, rate in enumerate(rates) if rate is None]
        left = [
            Fraction(one) - sum(rate for i, rate in enumerate(rates) if rate is not None and link in paths[i])
            for link, one in enumerate(capacity)
        ]
        users = [[Fraction(int(link in paths[i])) for i in open_] for link in range(len(capacity))]
        level = best([[sum(row)] for row in users], left, [Fraction(1)])
        spare = [one - level * sum(row) for one, row in zip(left, users, strict=True)]
        for at, i in enumerate(open_):
            if best(users, spare, [Fraction(int(j == at)) for j in range(len(open_))]) == 0:
                rates[i] = level
    return [rate for rate in rates if rate is not None]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_shares_are_those_of_linear_programs(data: st.DataObject) -> None:
    links = data.draw(st.integers(1, 5))
    capacity = data.draw(st.lists(st.integers(1, 12), min_size=links, max_size=links))
    paths = data.draw(
        st.lists(
            st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True), min_size=1, max_size=6
        )
    )
    width = max(len(path) for path in paths)
    padded = np.array([[*path, *[-1] * (width - len(path))] for path in paths])
    found = max_min(padded, np.array(capacity, float))
    assert found == pytest.approx([float(rate) for rate in lexicographic(paths, capacity)], rel=1e-9)


def test_every_message_of_a_large_network_has_a_full_link_on_which_none_gets_more() -> None:
    random = np.random.default_rng(3)
    capacity = random.uniform(1, 100, 500)
    paths = np.array([random.choice(500, 5, replace=False) for _ in range(4000)])
    rates = max_min(paths, capacity)
    load = np.bincount(paths.ravel(), np.repeat(rates, 5), 500)
    assert (load <= capacity * (1 + 1e-9)).all()
    most = np.zeros(500)
    np.maximum.at(most, paths.ravel(), np.repeat(rates, 5))
    full = load >= capacity * (1 - 1e-9)
    assert (full[paths] & (rates[:, None] >= most[paths] * (1 - 1e-9))).any(axis=1).all()


def test_a_message_sends_no_more_than_it_can_and_others_get_the_rest() -> None:
    paths = np.array([[0], [0], [0]])
    rates = max_min(paths, np.array([9.0]), most=np.array([1.0, np.inf, np.inf]))
    assert rates.tolist() == [1.0, 4.0, 4.0]
