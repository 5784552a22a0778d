"""Indices of views of views are what numpy finds by looking."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cumulo.compile.passes.index import COLUMN, ROW, IndexForm, number, split


def value(form: IndexForm, x: int, y: int) -> int:
    return int(eval(str(form), {}, {"x": x, "y": y}))


def joined(index: tuple[IndexForm, ...], strides: tuple[int, ...]) -> IndexForm:
    total = number(0)
    for form, stride in zip(index, strides, strict=True):
        total = total + form * stride
    return total


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[int, int, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Rows and columns of a tile, and shapes with the orders their dimensions are turned to."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=5))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        mixed = draw(st.permutations(factors))
        cuts = sorted(draw(st.sets(st.integers(1, len(mixed) - 1), max_size=3)))
        shape = tuple(math.prod(mixed[a:b]) for a, b in zip([0, *cuts], [*cuts, len(mixed)], strict=True))
        steps.append((shape, tuple(draw(st.permutations(range(len(shape)))))))
    cut = draw(st.integers(0, len(factors)))
    return math.prod(factors[:cut]), math.prod(factors[cut:]), steps


@given(case=reshapes())
def test_the_index_through_reshapes_and_turns_is_that_of_numpy(case: tuple) -> None:
    rows, columns, steps = case
    limits = {"x": rows, "y": columns}
    form = ROW * columns + COLUMN
    expected = np.arange(rows * columns)
    # From the last view to the memory: each step reads the tensor before it at a turned index.
    for shape, order in steps:
        index = split(form, shape, limits)
        turned = tuple(index[place] for place in order)
        form = joined(turned, strides_of(tuple(shape[place] for place in order)))
        inverse = np.argsort(order)
        numbers = np.arange(rows * columns).reshape([shape[place] for place in order]).transpose(inverse)
        expected = numbers.reshape(-1)[expected]
    found = [value(form, x, y) for x in range(rows) for y in range(columns)]
    assert found == list(expected)


def test_a_number_split_and_put_together_is_the_number_itself() -> None:
    form = ROW * 64 + COLUMN
    parts = split(form, (2, 16, 4, 16), {"x": 32, "y": 64})
    assert str(joined(parts, strides_of((2, 16, 4, 16)))) == "x * 64 + y"


def test_rows_and_columns_come_apart_where_a_shape_allows_it() -> None:
    batch, row, column = split(ROW * 64 + COLUMN, (2, 16, 64), {"x": 32, "y": 64})
    assert (str(column), row.uses("y"), batch.uses("y")) == ("y", False, False)
