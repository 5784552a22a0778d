"""Planning: what a seed fixes, how levels end, how traces are read, and how prompts share their beginnings."""

import gzip
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import CumuloError
from cumulo.load import prompts
from cumulo.load.prompts import Ruler, constant, uniform
from cumulo.load.schedule import Arrivals, Workload, plan
from cumulo.load.trace import plan_trace, read_trace
from tests import thorough

WORKLOAD = Workload(uniform(10, 90), uniform(5, 60), uniform(1, 4), 0.5, 100, 3)


@given(st.text(max_size=5), st.integers(1, 40), st.integers(0, 5))
def test_a_seed_fixes_the_whole_schedule(seed: str, count: int, warmup: int) -> None:
    for load in (4, Arrivals(3.0)):
        first, second = (plan(WORKLOAD, load, seed, count, warmup=warmup) for _ in range(2))
        assert tuple(first.conversations) == tuple(second.conversations)
        assert [c.measured for c in first.conversations] == [False] * warmup + [True] * count
        assert first.requests == sum(len(c.turns) for c in first.conversations)


def test_another_seed_gives_other_requests() -> None:
    first, second = (tuple(plan(WORKLOAD, 4, seed, 50).conversations) for seed in "ab")
    assert all(
        one.turns != other.turns or one.seed != other.seed for one, other in zip(first, second, strict=True)
    )


@given(st.floats(0.5, 50), st.floats(0.5, 20))
def test_an_open_loop_of_a_duration_holds_every_arrival_before_its_end(
    rate: float, duration_s: float
) -> None:
    schedule = plan(WORKLOAD, Arrivals(rate), "x", duration_s=duration_s)
    all_times = Arrivals(rate).times_s(random.Random("x/arrivals"))
    expected = list(itertools.takewhile(lambda time_s: time_s < duration_s, all_times))
    assert [c.start_s for c in schedule.conversations] == expected


def test_rates_change_when_requests_come_and_not_which() -> None:
    slow, fast = (tuple(plan(WORKLOAD, Arrivals(rate), "x", 30).conversations) for rate in (1.0, 10.0))
    assert [c.turns for c in slow] == [c.turns for c in fast]
    assert [c.start_s for c in slow] == pytest.approx([(c.start_s or 0) * 10 for c in fast])


def test_a_closed_loop_with_only_a_duration_never_runs_out() -> None:
    schedule = plan(WORKLOAD, 2, "x", duration_s=1.0)
    assert schedule.requests is None and schedule.stop_s == 1.0
    many = list(itertools.islice(schedule.conversations, 5000))
    assert [c.number for c in many] == list(range(5000))


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(CumuloError, match="needs an end"):
        plan(WORKLOAD, 2, "x")


def test_conversations_share_as_many_prefixes_as_asked_and_pause_between_turns() -> None:
    conversations = tuple(plan(WORKLOAD, 2, "x", 100).conversations)
    assert len({c.prefix for c in conversations}) == 3
    assert all(c.prefix_tokens == 100 and c.turns[0].think_s == 0 for c in conversations)
    pauses = [turn.think_s for c in conversations for turn in c.turns[1:]]
    assert all(pause > 0 for pause in pauses)
    assert sum(pauses) / len(pauses) == pytest.approx(0.5, rel=0.3)
    assert plan(Workload(turns=constant(3)), 1, "x", 4).requests == 12


@given(st.text(max_size=8), st.integers(1, 300))
def test_a_text_has_the_words_asked_for_and_is_fixed_by_its_seed(seed: str, words: int) -> None:
    made = prompts.text(seed, words)
    assert len(made.split()) == words
    assert made == prompts.text(seed, words)


def test_texts_of_different_seeds_share_no_long_beginning() -> None:
    texts = [prompts.text(str(seed), 50).split() for seed in range(200)]
    assert len({tuple(text[:4]) for text in texts}) == 200


@given(st.floats(0.5, 3), st.floats(0, 60), st.integers(80, 4000))
@settings(max_examples=thorough.examples(50))
def test_the_ruler_hits_the_planned_tokens(tokens_per_word: float, overhead: float, tokens: int) -> None:
    def counted(words: int) -> int:
        return round(overhead + words * tokens_per_word)

    ruler = Ruler.fit((16, counted(16)), (400, counted(400)))
    assert counted(ruler.words_for(tokens)) == pytest.approx(tokens, rel=0.02, abs=tokens_per_word + 2)


def test_a_server_that_counts_nonsense_leaves_one_token_per_word() -> None:
    assert Ruler.fit((16, 30), (80, 30)) == Ruler()


def test_named_blocks_give_equal_beginnings() -> None:
    one = prompts.block_text((1, 2, 3), 25, 10, "s", "one")
    other = prompts.block_text((1, 2, 9), 25, 10, "s", "other")
    assert one.split()[:20] == other.split()[:20]
    assert one.split()[20:] != other.split()[20:]
    assert len(prompts.block_text((1,), 25, 10, "s", "one").split()) == 25
    assert prompts.block_text((1, 2), 20, 10, "t", "one") != prompts.block_text((1, 2), 20, 10, "s", "one")


CSV = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0299600,110,27\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,API\n9,GPT-4,10,0,10,API\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}\n'
    '{"timestamp": 0, "input_length": 7, "output_length": 6, "hash_ids": [46]}\n'
)


def test_public_traces_are_read_as_they_are_published(tmp_path: Path) -> None:
    for name, text in (("azure.csv", CSV), ("burst.csv", BURST), ("mooncake.jsonl", MOONCAKE)):
        (tmp_path / name).write_text(text)
    azure = read_trace(tmp_path / "azure.csv")
    assert [(row.input_tokens, row.output_tokens) for row in azure] == [(4808, 10), (110, 27)]
    assert [row.time_s for row in azure] == pytest.approx([0, 0.05], abs=1e-4)
    burst = read_trace(tmp_path / "burst.csv")
    assert [(row.time_s, row.input_tokens, row.output_tokens) for row in burst] == [(0, 472, 18), (4, 10, 1)]
    mooncake = read_trace(tmp_path / "mooncake.jsonl", 1e-3)
    assert [(row.time_s, row.blocks) for row in mooncake] == [(0, (46,)), (3, (46, 47))]


def test_a_trace_becomes_a_schedule_and_rows_of_a_conversation_its_turns(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("time_s,input_tokens,output_tokens,session\n0,5,6,a\n1,7,8,b\n4,9,10,a\n6,1,2,\n")
    rows = read_trace(file)
    first, second, third = plan_trace(rows, "x", speed=2).conversations
    assert [(t.input_tokens, t.not_before_s) for t in first.turns] == [(5, 0), (9, 2)]
    assert (second.start_s, third.start_s) == (0.5, 3)
    assert plan_trace(rows, "x").requests == 4
    assert plan_trace(rows, "x", limit=2).requests == 2
    assert plan_trace(rows, "x", stop_s=4).requests == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "when,input_tokens\n1,2\n", "no time"),
        ("t.csv", "timestamp,input_tokens\n1,2\n", "no answer length"),
        ("t.csv", "timestamp,input_tokens,output_tokens\nnoon,2,3\n", "neither a number"),
        ("t.csv", "timestamp,input_tokens,output_tokens\n1,-2,3\n", "whole number"),
        ("t.csv", "timestamp,input_tokens,output_tokens\n", "no rows"),
        ("t.jsonl", '{"timestamp": 1', "line 1 is not JSON"),
        ("t.jsonl", "[1]\n", "JSON object"),
        ("t.jsonl", '{"timestamp": ' + "[" * 100_000, "line 1 is not JSON"),
        (
            "t.csv",
            "timestamp,input_tokens,output_tokens\n1," + "9" * 5000 + ",1\n",
            "prompt's length must be",
        ),
        ("t.csv", "timestamp,input_tokens,output_tokens\n1,999999999,1\n", "at most 16,777,216"),
        (
            "t.csv",
            "timestamp,input_tokens,output_tokens\nnan,1,1\n",
            "neither a number of seconds nor a date",
        ),
        (
            "t.jsonl",
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [[]]}',
            "whole numbers",
        ),
    ],
)
def test_a_trace_that_cannot_be_replayed_says_where(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CumuloError, match=message):
        read_trace(tmp_path / name)
    with pytest.raises(CumuloError, match="cannot read the trace"):
        read_trace(tmp_path / "missing.csv")


@pytest.mark.parametrize(
    ("content", "cut", "message"),
    [
        (b"[" * (1 << 23), None, "line 1 has 4,194,304 characters or more"),
        (b"timestamp,input_tokens,output_tokens\n1,1,1\n", -9, "cannot read the trace"),
    ],
)
def test_a_compressed_trace_is_read_within_bounds(
    tmp_path: Path, content: bytes, cut: int | None, message: str
) -> None:
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(content)[:cut])
    with pytest.raises(CumuloError, match=message):
        read_trace(tmp_path / "t.csv.gz")
