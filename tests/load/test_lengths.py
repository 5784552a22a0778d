"""Length distributions: their moments, their bounds, and what users may type."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.base.quantities import parse_duration_s, quantity
from cumulo.errors import CumuloError
from cumulo.load.prompts import Lengths, constant, empirical, lognormal, normal, parse_lengths, uniform
from tests import thorough

distributions = st.one_of(
    st.builds(constant, st.integers(1, 5000)),
    st.builds(lambda low, more: uniform(low, low + more), st.integers(1, 1000), st.integers(0, 1000)),
    st.builds(normal, st.floats(1, 1000), st.floats(0, 300)),
    st.builds(lognormal, st.floats(1, 1000), st.floats(0, 1.5)),
    st.builds(lambda values: empirical(tuple(values)), st.lists(st.integers(1, 9999), min_size=1)),
)


def draw(lengths: Lengths, count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [lengths.draw(rng) for _ in range(count)]


@given(distributions, st.integers(0, 2**32))
def test_every_draw_is_at_least_one_and_a_seed_fixes_it(lengths: Lengths, seed: int) -> None:
    values = draw(lengths, 100, seed)
    assert min(values) >= 1
    assert values == draw(lengths, 100, seed)


@settings(max_examples=thorough.examples(20))
@given(st.floats(200, 2000), st.floats(1, 40), st.floats(0.05, 0.8))
def test_the_moments_are_those_asked_for(centre: float, deviation: float, sigma: float) -> None:
    gauss = np.array(draw(normal(centre, deviation), 4000))
    assert gauss.mean() == pytest.approx(centre, abs=deviation * 0.1 + 0.1)
    assert gauss.std() == pytest.approx(deviation, rel=0.15, abs=0.3)
    logs = np.log(draw(lognormal(centre, sigma), 4000))
    assert np.median(logs) == pytest.approx(np.log(centre), abs=sigma * 0.1 + 0.01)
    assert logs.std() == pytest.approx(sigma, rel=0.1, abs=0.01)


@given(st.integers(1, 500), st.integers(0, 500))
def test_a_uniform_length_reaches_both_ends_and_no_further(low: int, more: int) -> None:
    values = draw(uniform(low, low + more), 60 * (more + 1) if more < 20 else 200)
    assert min(values) >= low and max(values) <= low + more
    if more < 20:
        assert set(values) == set(range(low, low + more + 1))


def test_a_largest_length_is_kept_by_drawing_again() -> None:
    values = draw(lognormal(100, 1.0, 150), 2000)
    assert max(values) <= 150
    assert values.count(150) < 100  # not piled up at the edge


def test_a_distribution_with_nothing_in_its_range_is_refused() -> None:
    with pytest.raises(CumuloError, match="narrow its spread"):
        draw(normal(1, 1e12, 1), 1)


def test_what_users_type_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n5 8\n")
    assert str(parse_lengths("128", "--input")) == str(constant(128))
    assert str(parse_lengths("uniform:64-256", "--input")) == str(uniform(64, 256))
    assert str(parse_lengths("normal:100,20", "--input")) == str(normal(100, 20))
    assert str(parse_lengths("lognormal:100,0.5,900", "--input")) == str(lognormal(100, 0.5, 900))
    assert str(parse_lengths(f"file:{file}", "--input")) == str(empirical((3, 5, 8)))


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "many",
        "uniform:9",
        "uniform:9-3",
        "uniform:0-3",
        "normal:5",
        "normal:0,1",
        "lognormal:9,1,5",
        "zipf:2",
    ],
)
def test_an_impossible_length_is_refused_with_the_options_name(text: str) -> None:
    with pytest.raises(CumuloError, match="--input"):
        parse_lengths(text, "--input")


def test_a_missing_or_empty_file_of_lengths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CumuloError, match="cannot read"):
        parse_lengths(f"file:{tmp_path / 'none'}", "--input")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(CumuloError, match="no lengths"):
        parse_lengths(f"file:{tmp_path / 'empty'}", "--input")


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2", 2), ("1.5m", 90), ("250 us", 0.00025), (".5s", 0.5)]
)
def test_durations_are_understood(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "5 parsecs", "-1s", "1s2"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(CumuloError, match="must look like"):
        parse_duration_s(text)


@given(st.floats(1e-6, 900))
def test_a_shown_duration_reads_back_as_nearly_the_same(seconds: float) -> None:
    assert parse_duration_s(quantity(seconds, "s")) == pytest.approx(seconds, rel=0.006)
