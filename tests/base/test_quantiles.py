"""The two rules of cumulo/base/quantiles.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.base.quantiles import percentile, quantile

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)
SHARES = st.floats(0, 1)


def test_quantiles_are_interpolated() -> None:
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.9) == pytest.approx(0.9)
    assert quantile([5.0], 0.9) == 5.0


@given(VALUES, SHARES)
def test_quantiles_are_numpys(values: list[float], share: float) -> None:
    expected = np.quantile(values, share)
    assert quantile(sorted(values), share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99.0


@given(VALUES, SHARES)
def test_a_percentile_is_the_smallest_value_that_the_share_does_not_exceed(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found is not None and found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values) or found == min(values)
