"""A stream is cut at its seals, however it arrives."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cumulo.fleet.decide.sealed_stream import SealedStream
from cumulo.fleet.wire import read_resume

EVENTS = [b"data: %d\n\n" % number for number in range(6)]
SEALS = [b": 17\n\n", b": 1 2\n\n", b': 5 [{"token":5}]\n\n', b": 9\n\n", b": 8\n\n", b": end 640\n\n"]
WHOLE = b"".join(events + seal for events, seal in zip(EVENTS, SEALS, strict=True))


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_how_the_bytes_are_cut_does_not_matter(places: list[int]) -> None:
    stream, told = SealedStream(), b""
    cuts = sorted({0, len(WHOLE), *places})
    for begin, end in pairwise(cuts):
        told += stream.feed(WHOLE[begin:end])
    assert told == b"".join(EVENTS)
    assert stream.state == "ended" and stream.cached_tokens == 640 and stream.tokens == 6


@given(st.integers(0, len(WHOLE)))
def test_wherever_it_breaks_events_and_tokens_belong_together(place: int) -> None:
    stream = SealedStream()
    told = stream.feed(WHOLE[:place])
    resume = read_resume(stream.resume_body("/v1/x", b'{"a": 1}'))
    batches = told.count(b"\n\n")
    assert resume.ids == [17, 1, 2, 5, 9, 8][: (0, 1, 3, 4, 5, 6, 6)[batches]]
    assert json.loads(bytes(resume.body)) == {"a": 1} and resume.path == "/v1/x"
    assert json.loads(bytes(resume.logprobs)) == ([{"token": 5}] if batches >= 3 else [])


def test_a_failure_is_held_back() -> None:
    stream = SealedStream()
    assert stream.feed(EVENTS[0] + SEALS[0] + b'data: {"error": 1}\n\n: failed 503\n\n') == EVENTS[0]
    assert stream.state == "failed" and stream.failed_status == 503 and b"error" in stream.failure
    stream.restart()
    assert stream.feed(EVENTS[1] + b': {"0.0":3,"0.1":2}\n\n') == EVENTS[1]
    assert read_resume(stream.resume_body("/", b"{}")).counts == {"0.0": 3, "0.1": 2}


def test_events_without_a_token_leave_the_tokens_readable() -> None:
    stream = SealedStream()
    assert stream.feed(EVENTS[0] + SEALS[0] + EVENTS[1] + b": \n\n") == EVENTS[0] + EVENTS[1]
    assert stream.tokens == 1 and read_resume(stream.resume_body("/", b"{}")).ids == [17]


def test_a_beginning_without_a_token_waits_for_one_because_another_server_would_begin_again() -> None:
    stream = SealedStream()
    assert stream.feed(b"data: created\n\n: \n\n") == b""
    stream.restart()
    assert stream.feed(b"data: created\n\n: \n\n") == b""
    assert stream.feed(EVENTS[0] + SEALS[0]) == b"data: created\n\n" + EVENTS[0]
