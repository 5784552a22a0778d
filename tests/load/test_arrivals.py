"""Arrival processes: their rate, their shape, and that a seed fixes them."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import CumuloError
from cumulo.load.schedule import Arrivals, parse_process, parse_rates
from tests import thorough

rates = st.floats(0.01, 1e4)


def take(arrivals: Arrivals, count: int, seed: int = 0) -> list[float]:
    return list(itertools.islice(arrivals.times_s(random.Random(seed)), count))


@given(rates, st.integers(0, 2**32), st.sampled_from(["poisson", "constant", "burst"]), rates)
def test_a_seed_fixes_the_times_and_they_never_decrease(
    rate: float, seed: int, process: str, final: float
) -> None:
    for arrivals in (Arrivals(rate, process, 3), Arrivals(rate, process, 3, final, 5.0)):  # type: ignore[arg-type]
        times = take(arrivals, 200, seed)
        assert times == take(arrivals, 200, seed)
        assert all(earlier <= later for earlier, later in itertools.pairwise(times))
        assert times[0] >= 0


@settings(max_examples=thorough.examples(30))
@given(rates, st.integers(0, 2**32))
def test_poisson_arrivals_come_at_their_rate_with_exponential_gaps(rate: float, seed: int) -> None:
    gaps = np.diff(take(Arrivals(rate), 4001, seed)) * rate
    assert abs(gaps.mean() - 1) < 0.1  # six standard errors
    assert abs(gaps.std() - 1) < 0.2  # an exponential's deviation is its mean
    assert abs(np.mean(gaps > 1) - np.exp(-1)) < 0.05


@given(rates)
def test_constant_arrivals_are_evenly_spaced(rate: float) -> None:
    times = take(Arrivals(rate, "constant"), 50)
    assert times == pytest.approx([number / rate for number in range(50)])


@given(rates, st.integers(1, 20))
def test_bursts_come_together_and_keep_the_mean_rate(rate: float, size: int) -> None:
    times = take(Arrivals(rate, "burst", size), size * 10)
    starts = sorted(set(times))
    assert [times.count(start) for start in starts] == [size] * 10
    assert np.diff(starts) == pytest.approx([size / rate] * 9)


@given(rates, rates, st.floats(0.1, 1e3))
def test_a_ramp_has_as_many_arrivals_as_the_integral_of_its_rate(
    start: float, end: float, ramp_s: float
) -> None:
    arrivals = Arrivals(start, "constant", 1, end, ramp_s)
    for number, time_s in enumerate(take(arrivals, 300)):
        assert arrivals.expected_by(time_s) == pytest.approx(number, rel=1e-6, abs=1e-6)
    # The rate at both ends, from the integral's slope.
    tiny = ramp_s * 1e-4
    assert arrivals.expected_by(tiny) / tiny == pytest.approx(start, rel=1e-2, abs=abs(end - start) * 1e-3)
    after = arrivals.expected_by(ramp_s + 1) - arrivals.expected_by(ramp_s)
    assert after == pytest.approx(end, rel=1e-6, abs=1e-6)


def test_what_users_type_is_understood() -> None:
    assert parse_process("Poisson") == ("poisson", 1)
    assert parse_process("burst:8") == ("burst", 8)
    sweep = parse_rates("1,2.5,4", "poisson", 1, None)
    assert [level.label for level in sweep] == ["1/s", "2.5/s", "4/s"]
    (ramp,) = parse_rates("1:8", "constant", 1, 20.0)
    assert (ramp.rate, ramp.final_rate, ramp.ramp_s, ramp.label) == (1, 8, 20.0, "1→8/s")


@pytest.mark.parametrize("text", ["burst", "burst:0", "gamma", "poisson:3"])
def test_an_unknown_process_is_refused(text: str) -> None:
    with pytest.raises(CumuloError, match="burst"):
        parse_process(text)


@pytest.mark.parametrize("text", ["0", "-1", "fast", "nan", "inf", "1,", "1:8"])
def test_an_impossible_rate_is_refused(text: str) -> None:
    with pytest.raises(CumuloError):
        parse_rates(text, "poisson", 1, None)  # the ramp lacks its duration
