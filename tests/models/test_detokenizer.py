"""Incremental detokenisation equals the whole decode; stop strings are found wherever the text is cut."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import InvalidRequest
from cumulo.models.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf
from tests import thorough
from tests.models.vocabularies import byte_level_metadata, sentencepiece_metadata

BYTE_LEVEL = tokenizer_from_gguf(byte_level_metadata())
SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])

TEXTS = st.text(st.sampled_from("ab the \n\té日本語한👩‍👧😀𝔘̈́ा▁"), max_size=60)


def pieces(tokenizer, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@BOTH
@given(data=st.data(), skip_special=st.booleans(), continues=st.booleans())
@settings(max_examples=thorough.examples(150), deadline=None)
def test_pieces_of_random_tokens_join_to_the_whole_decode(tokenizer, data, skip_special, continues):
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 3), max_size=40))
    options = {"skip_special": skip_special, "continues": continues}
    assert "".join(pieces(tokenizer, ids, **options)) == tokenizer.decode(ids, **options)


@BOTH
@given(text=TEXTS)
@settings(max_examples=thorough.examples(150), deadline=None)
def test_no_piece_of_a_valid_text_ever_holds_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    found = pieces(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in found)
    assert found[-1] == ""
    assert "".join(found) == tokenizer.decode(ids)


@BOTH
def test_a_character_is_shown_with_its_last_byte_and_not_before(tokenizer):
    ids = tokenizer.encode("😀")  # in neither vocabulary, so four tokens of one byte each
    ids = [token for token in ids if tokenizer.token_bytes(token) != b" "]
    assert len(ids) == 4
    assert pieces(tokenizer, ids) == ["", "", "", "😀", ""]


@BOTH
def test_an_unfinished_character_becomes_one_replacement_at_the_end(tokenizer):
    ids = [token for token in tokenizer.encode("x😀") if tokenizer.token_bytes(token) != b" "][:-1]
    assert pieces(tokenizer, ids)[-1] == "\ufffd"


def test_the_space_sentencepiece_puts_first_is_taken_off_once_and_kept_in_a_continuation():
    ids = SENTENCEPIECE.encode("the  cat")
    assert SENTENCEPIECE.decode(ids) == "".join(pieces(SENTENCEPIECE, ids)) == "the  cat"
    assert "".join(pieces(SENTENCEPIECE, ids, continues=True)) == " the  cat"


# -- stop strings -------------------------------------------------------------------------------------------


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop to end begins, and which it is; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return None


@given(
    text=st.text("ab\u00e9", max_size=40),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=6),
    include_stop=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=thorough.examples(400), deadline=None)
def test_stops_are_those_of_a_naive_search_however_the_text_is_cut(text, stops, include_stop, seed):
    matcher = StopStringMatcher(stops, include_stop)
    shown, matched, position = "", None, 0
    cuts = random.Random(seed)
    while position < len(text) and matched is None:
        size = cuts.randint(0, 3)
        emitted, matched = matcher.push(text[position : position + size])
        shown += emitted
        position += size
        if matched is None:
            read = text[:position]
            held = len(read) - len(shown)
            could_begin = [
                n for n in range(len(read) + 1) if any(s.startswith(read[len(read) - n :]) for s in stops)
            ]
            assert read.startswith(shown) and held == max(could_begin, default=0)
    shown += matcher.finish()
    expected = naive(text, stops)
    if expected is None:
        assert (shown, matched) == (text, None)
    else:
        start, stop = expected
        assert matched == stop
        assert shown == text[: start + len(stop) if include_stop else start]


def test_nothing_is_shown_after_a_stop():
    matcher = StopStringMatcher(["END"])
    assert matcher.push("abEN") == ("ab", None)
    assert matcher.push("D and more") == ("", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.finish() == ""


def test_thousands_of_stop_strings_do_not_hold_back_more():
    stops = [f"stop number {number}!" for number in range(5000)]
    matcher = StopStringMatcher(stops)
    assert matcher.push("an answer with stop number 77") == ("an answer with ", None)
    assert matcher.push("7 no") == ("stop number 777 no", None)
    assert matcher.push(" stop number 4999!") == (" ", "stop number 4999!")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequest):
        StopStringMatcher(["x", ""])
