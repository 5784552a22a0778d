"""The benchmarks' own arithmetic, and one real (small) run of each part that needs no rival."""

import statistics

import pytest

from cumulo.base.reference_text import reference_text
from cumulo.bench import engine as bench_engine
from cumulo.bench import scheduler as bench_scheduler
from cumulo.bench.engine import MEASUREMENTS, _order, _rows, parse_rivals
from cumulo.bench.worker import FreshPieces
from cumulo.errors import CumuloError


def test_rivals_are_read_from_a_list() -> None:
    assert parse_rivals(" llama.cpp, transformers,llama.cpp") == ["llama.cpp", "transformers"]
    assert parse_rivals("") == []


def test_the_order_of_sides_alternates() -> None:
    assert _order(["a", "b", "c"], 1) == ["c", "b", "a"]
    assert _order(["a", "b", "c"], 2) == ["a", "b", "c"]


def test_prompts_are_never_handed_out_twice() -> None:
    prompts = FreshPieces(list(range(100)))
    taken = [
        token
        for batch in (prompts.next_pieces(3, 10), prompts.next_pieces(1, 64))
        for row in batch
        for token in row
    ]
    assert taken == list(range(94))
    with pytest.raises(CumuloError, match="fewer rounds"):
        prompts.next_pieces(1, 7)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    ours, theirs = [10.0, 40.0, 30.0], [10.0, 10.0, 20.0]  # the machine was slow in round 1, for both
    rates = {
        (m.name, side): values
        for m in MEASUREMENTS
        for side, values in (("cumulo", ours), ("llama.cpp", theirs))
    }
    rows = {row.name: row for row in _rows(rates, ["llama.cpp"])}
    row = rows["decode, 1 sequence: cumulo / llama.cpp"]
    assert row.value == statistics.median([1.0, 4.0, 1.5])
    assert (row.must, row.aim, row.ok) == (0.8, 1.2, True)
    assert not rows["prefill, 512 tokens: cumulo / llama.cpp"].reaches(3.0)


def test_the_text_is_long_enough_for_all_rounds() -> None:
    tokens_per_round = sum(m.sequences * m.prompt_tokens for m in MEASUREMENTS)
    # Three characters per token, twenty rounds.
    assert len(reference_text()) > 400_000 > 3 * 20 * tokens_per_round


def test_decoding_requests_are_all_past_their_prompts() -> None:
    scheduler = bench_scheduler._decoding(20)
    assert len(scheduler.running) == 20
    assert all(sequence.computed >= sequence.prompt_length for sequence in scheduler.running)
    plan = bench_scheduler._step(scheduler)
    assert plan.counts == [1] * 20


@pytest.mark.long
def test_the_scheduler_benchmark_measures_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_scheduler, "STEPS", 3)
    monkeypatch.setattr(bench_scheduler, "QUEUED", 50)
    rows = {row.name: row for row in bench_scheduler.measure(repeats=1)}
    assert rows["plan + apply, 256 decoding"].value > 0  # type: ignore[operator]
    assert 500 < rows["memory per queued request"].value < 20_000  # type: ignore[operator]
    assert bench_engine.RIVALS == ("transformers", "llama.cpp")
