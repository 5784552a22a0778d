"""The benchmarks' own arithmetic, and one real (small) run of each part that needs no rival."""

import statistics

import pytest

from cumulo.base.nearest import names_in
from cumulo.base.reference_text import reference_text
from cumulo.bench import engine as bench_engine
from cumulo.bench import scheduler as bench_scheduler
from cumulo.bench.engine import CONTESTS, RIVALS, contest_rows
from cumulo.bench.sides import FreshPieces
from cumulo.bench.turns import take_turns
from cumulo.errors import CumuloError


def test_rivals_are_read_from_a_list() -> None:
    rivals = names_in(" llama.cpp, transformers,llama.cpp", "--against", RIVALS)
    assert rivals == ["llama.cpp", "transformers"] and names_in("", "--against", RIVALS) == []
    with pytest.raises(CumuloError, match=r"--against takes transformers, llama.cpp; got 'vllm'"):
        names_in("llama.cpp,vllm", "--against", RIVALS)


def test_the_order_of_sides_alternates() -> None:
    played: list[str] = []
    sides = {name: lambda number, name=name: played.append(f"{name}{number}") for name in "abc"}
    kept = take_turns(sides, 2, lambda _: None, warm_ups=1)
    assert " ".join(played) == "c0 b0 a0 a1 b1 c1 c2 b2 a2"
    assert [len(one) for one in kept.values()] == [2, 2, 2], "the round that warms up does not count"


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
    rates = {"cumulo": ours, "llama.cpp": theirs}
    rows = {row.name: row for contest in CONTESTS for row in contest_rows(contest, rates)}
    row = rows["decode, 1 sequence: cumulo / llama.cpp"]
    assert row.value == statistics.median([1.0, 4.0, 1.5])
    assert (row.must, row.aim, row.ok) == (0.8, 1.2, True)
    assert not rows["prefill, 512 tokens: cumulo / llama.cpp"].reaches(3.0)


def test_the_text_is_long_enough_for_all_rounds() -> None:
    tokens_per_round = sum(m.sequences * m.prompt_tokens for m in CONTESTS)
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
    assert bench_engine.RIVALS == ("transformers", "llama.cpp")
