"""Figures from records: percentiles against numpy, goodput, the warm-up's absence, and the objective's verdicts."""

import math
import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import CumuloError
from cumulo.load.campaign import RateSearch
from cumulo.load.slo import is_lost, parse_slo, requests_needed, verdict, wilson_interval
from cumulo.load.summary import RequestRecord, Spread, summarise, timeline, tokens_between
from cumulo.spec.slo import Slo
from tests import thorough


def record(
    due_s: float, first_s: float, gaps_s: list[float], measured: bool = True, error: str | None = None
) -> RequestRecord:
    times = array("d", np.cumsum([due_s + first_s, *gaps_s]).tolist())
    return RequestRecord(
        0, 0, 0, measured, due_s, sent_s=due_s, end_s=times[-1], chunk_times_s=times, error=error,
        completion_tokens=len(times), input_tokens=10,
    )  # fmt: skip


durations = st.floats(0.001, 5)
records = st.lists(
    st.builds(
        record,
        st.floats(0, 50),
        durations,
        st.lists(durations, max_size=6),
        st.booleans(),
        st.sampled_from([None, None, None, "HTTP 500", "timeout"]),
    ),
    max_size=30,
)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_are_numpys(values: list[float]) -> None:
    spread = Spread.from_values(values)
    assert spread is not None
    expected = np.percentile(values, [50, 90, 95, 99]).tolist()
    # Both round in the last place, in their own order.
    assert [spread.p50, spread.p90, spread.p95, spread.p99] == pytest.approx(expected, rel=1e-12, abs=1e-9)
    assert (spread.count, spread.most) == (len(values), max(values))


@given(records)
def test_the_figures_are_those_of_the_measured_requests(made: list[RequestRecord]) -> None:
    slo = Slo(ttft_s=1.0, itl_s=2.0, e2e_s=9.0)
    summary = summarise(made, slo)
    measured = [r for r in made if r.measured]
    good = [r for r in measured if r.error is None]
    assert (summary.requests, summary.succeeded) == (len(measured), len(good))
    assert sum(summary.errors.values()) == len(measured) - len(good)
    if not good:
        assert summary.ttft_s is None and summary.e2e_s is None
        return
    assert summary.ttft_s is not None and summary.e2e_s is not None
    assert summary.ttft_s.p50 == pytest.approx(
        np.percentile([r.chunk_times_s[0] - r.due_s for r in good], 50), rel=1e-12
    )
    assert summary.e2e_s.p99 == pytest.approx(np.percentile([r.end_s - r.due_s for r in good], 99), rel=1e-12)
    gaps = [gap for r in good for gap in np.diff(r.chunk_times_s)]
    assert summary.itl_s == Spread.from_values(gaps)
    kept = [
        r for r in good
        if r.chunk_times_s[0] - r.due_s <= 1
        and r.end_s - r.due_s <= 9
        and all(gap <= 2 for gap in np.diff(r.chunk_times_s))
    ]  # fmt: skip
    assert summary.slo_met == len(kept)  # fewer than a hundred gaps: 99% of them are all of them
    assert summary.slo_share == pytest.approx(len(kept) / len(measured))
    assert summary.goodput_req_s is not None
    assert summary.goodput_req_s * summary.window_s == pytest.approx(len(kept))
    assert summary.goodput_req_s <= summary.completed_req_s


@given(records)
def test_every_token_is_in_exactly_one_of_two_halves_and_in_the_timeline(made: list[RequestRecord]) -> None:
    total = sum(r.output_tokens for r in made)
    middle = 7.123456789
    halves = tokens_between(made, -1, middle) + tokens_between(made, math.nextafter(middle, 99), 1e9)
    assert halves == pytest.approx(total)
    line = timeline(made)
    assert sum(line.output_tok_s) * line.step_s == pytest.approx(total)


def test_throughput_counts_what_arrived_in_the_window() -> None:
    warm = record(0.0, 1.0, [1.0] * 9, measured=False)  # tokens at 1..10
    first = record(5.0, 1.0, [1.0] * 4)  # tokens at 6..10
    summary = summarise([warm, first])
    assert summary.window_s == 5.0
    assert summary.output_tok_s == (5 + 6) / 5.0  # the warm-up's tokens at 5..10 kept the server busy too
    assert summary.completed_req_s == 1 / 5.0


def test_chunks_of_several_tokens_do_not_spoil_the_time_per_token() -> None:
    made = record(0.0, 1.0, [0.4, 0.4])
    made.completion_tokens = 9  # four each after the first
    assert made.tpot_s == pytest.approx(0.1)
    summary = summarise([made])
    assert summary.tokens_per_chunk == 3
    assert summary.itl_s is not None and summary.itl_s.p50 == pytest.approx(0.4)


def test_stopped_requests_neither_succeed_nor_fail() -> None:
    summary = summarise([record(0, 1, [1]), record(0, 1, [1], error="stopped")])
    assert (summary.requests, summary.succeeded, summary.errors) == (1, 1, {})


def test_an_objective_is_read_and_applied() -> None:
    slo = parse_slo("ttft=500ms, itl=50ms,e2e=2s", 0.9)
    assert slo == Slo(ttft_s=0.5, itl_s=0.05, e2e_s=2.0, share=0.9)
    assert str(slo) == "ttft ≤ 500 ms, itl ≤ 50 ms, e2e ≤ 2 s for 90% of requests"
    assert slo.met_by(record(0, 0.5, [0.049] * 10))
    assert not slo.met_by(record(0, 0.51, [0.049] * 10))
    assert not slo.met_by(record(0, 0.5, [0.049] * 9 + [0.06]))
    assert not slo.met_by(record(0, 0.1, [0.01], error="HTTP 500"))
    assert Slo(itl_s=0.05).met_by(record(0, 1, [0.04] * 199 + [0.5]))  # one gap in two hundred may be long
    assert slo.cannot_be_met(0.6, has_first_token=False)
    assert not slo.cannot_be_met(0.6, has_first_token=True)
    assert slo.cannot_be_met(2.1, has_first_token=True)


@pytest.mark.parametrize(
    ("text", "share"), [("ttft", 0.9), ("speed=1s", 0.9), ("ttft=soon", 0.9), ("ttft=1s", 1.0)]
)
def test_an_objective_that_cannot_be_read_is_refused(text: str, share: float) -> None:
    with pytest.raises(CumuloError):
        parse_slo(text, share)


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_interval_holds_the_observed_share_and_narrows(total: int, part: float) -> None:
    met = round(total * part)
    low, high = wilson_interval(met, total)
    assert 0 <= low <= met / total + 1e-12 and met / total - 1e-12 <= high <= 1
    wider = wilson_interval(met, total)
    narrower = wilson_interval(met * 10, total * 10)
    assert narrower[1] - narrower[0] < wider[1] - wider[0]


@settings(max_examples=thorough.examples(15))
@given(st.floats(0.8, 0.99), st.integers(1, 3))
def test_a_rate_just_at_the_objective_is_hardly_ever_misjudged(share: float, times: int) -> None:
    total = requests_needed(share) * times
    chance = {"holds": 0.0, "fails": 0.0, "unclear": 0.0}
    for met in range(total + 1):
        chance[verdict(met, total, share)] += (
            math.comb(total, met) * share**met * (1 - share) ** (total - met)
        )
    # 5% are promised; whole requests cannot meet that exactly.
    assert chance["holds"] < 0.11
    assert chance["fails"] < 0.11


@given(st.floats(0.5, 0.995))
def test_the_fewest_requests_are_just_enough(share: float) -> None:
    needed = requests_needed(share)
    assert verdict(needed, needed, share) == "holds"
    assert verdict(needed - 1, needed - 1, share) != "holds"


@given(st.integers(1, 400), st.floats(0.5, 0.99), st.data())
def test_a_lost_trial_fails_whatever_comes_after(planned: int, share: float, data: st.DataObject) -> None:
    missed = data.draw(st.integers(0, planned))
    if is_lost(missed, planned, share):
        total_missed = data.draw(st.integers(missed, planned))
        assert verdict(planned - total_missed, planned, share) == "fails"


@given(st.floats(0.01, 1000), st.floats(0.05, 500), st.floats(0.02, 0.5))
def test_the_search_encloses_a_sharp_limit_from_below(start: float, limit: float, tolerance: float) -> None:
    search = RateSearch(start, tolerance, most_trials=99)
    while (rate := search.next_rate()) is not None:
        search.tell(rate, rate <= limit)
    assert search.found is not None
    assert search.found <= limit < search.failing <= search.found * (1 + tolerance)
    assert search.found == search.confirmed


@given(st.integers(0, 10_000))
def test_the_search_ends_and_stays_below_every_failure_when_trials_are_noisy(seed: int) -> None:
    rng = random.Random(seed)
    search = RateSearch(1.0, 0.1)
    while (rate := search.next_rate()) is not None:
        search.tell(rate, rng.random() < 1 / (1 + (rate / 10) ** 8))
    assert len(search.trials) <= search.most_trials
    if search.confirmed is not None:
        assert search.trials.count((search.confirmed, True)) >= 2
        assert search.confirmed < search.failing


def test_a_best_rate_that_fails_its_confirmation_is_given_up() -> None:
    search = RateSearch(4.0, 1.0)
    answers = {4.0: [True, False, False]}
    while (rate := search.next_rate()) is not None:
        given = answers.get(rate)
        search.tell(rate, given.pop(0) if given else rate < 3)
    assert search.trials == [(4, True), (8, False), (8, False), (4, False), (4, False), (2, True), (2, True)]
    assert search.found == 2


def test_a_single_hiccup_does_not_bound_the_search() -> None:
    search = RateSearch(4.0, 1.0)
    hiccups = {4.0: 1, 16.0: 1}
    while (rate := search.next_rate()) is not None:
        fails = hiccups.pop(rate, 0) or rate > 20
        search.tell(rate, not fails)
    assert search.found == 16


def test_a_server_that_never_holds_has_no_rate() -> None:
    search = RateSearch(1.0)
    while (rate := search.next_rate()) is not None:
        search.tell(rate, False)
    assert search.found is None and search.confirmed is None
    assert len(search.trials) <= 20
