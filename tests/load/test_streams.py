"""The parsers under the client: bytes may arrive in any pieces and mean the same."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.load.answer import ErrorInStream, EventReader, MalformedStream, MeasuredAnswer
from cumulo.load.connection import BadResponse, Response

line_text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\n"), max_size=30)


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@given(
    st.data(),
    st.lists(st.lists(line_text, min_size=1, max_size=3), max_size=6),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_events_are_the_same_however_their_bytes_are_cut(
    data: st.DataObject, events: list[list[str]], end: str
) -> None:
    text = f": a comment{end}event: ping{end}" + "".join(
        "".join(f"data: {line}{end}" for line in lines) + end for lines in events
    )
    stream = EventReader()
    seen = [event for piece in data.draw(cut(text.encode())) for event in stream.feed(piece)]
    seen += stream.feed(b"\n") if end == "\r" else []  # a last carriage return may be half of a line end
    assert [event.decode() for event in seen] == ["\n".join(lines) for lines in events]


def test_the_space_after_data_is_optional_and_an_open_event_is_noticed() -> None:
    stream = EventReader()
    assert stream.feed(b"data:x\n\n") == [b"x"]
    assert not stream.unfinished
    assert stream.feed(b"data: y\n") == []
    assert stream.unfinished


def chunked(pieces: list[bytes], trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailer + b"\r\n"


@given(st.data(), st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.booleans())
def test_a_chunked_body_is_the_same_however_its_bytes_are_cut(
    data: st.DataObject, pieces: list[bytes], has_trailer: bool
) -> None:
    response = Response()
    raw = chunked(pieces, b"X-Sum: 1\r\n" if has_trailer else b"")
    body = b"".join(part for piece in data.draw(cut(raw)) for part in response.feed(piece))
    assert body == b"".join(pieces)
    assert (response.status, response.complete, response.keep_alive) == (200, True, True)


@given(st.data(), st.binary(max_size=200), st.sampled_from(["counted", "until the end"]))
def test_other_bodies_are_too(data: st.DataObject, body: bytes, form: str) -> None:
    head = b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\n"
    if form == "counted":
        head += b"Content-Length: %d\r\n" % len(body)
    else:
        head += b"Connection: close\r\n"
    response = Response()
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"\r\n" + body
    seen = b"".join(part for piece in data.draw(cut(raw)) for part in response.feed(piece))
    assert (seen, response.status, response.headers["retry-after"]) == (body, 503, "2")
    assert response.complete == (form == "counted")
    response.end()
    assert response.complete


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 fine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: some\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000,
    ],
)
def test_bytes_that_are_no_response_are_refused(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        Response().feed(raw)


def test_a_connection_that_ends_inside_a_body_leaves_it_incomplete() -> None:
    response = Response()
    response.feed(chunked([b"abc"])[:-5])
    response.end()
    assert not response.complete


def ok() -> Response:
    response = Response()
    response.feed(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    return response


def event(fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_only_chunks_with_text_count_as_tokens() -> None:
    answer, response = MeasuredAnswer(keep_text=True), ok()
    deltas = [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"reasoning_content": "hm"},
        {"content": None},
    ]
    for second, delta in enumerate(deltas):
        answer.receive(response, event({"choices": [{"delta": delta, "finish_reason": None}]}), float(second))
    answer.receive(response, event({"choices": [{"text": "lo"}]}), 4.0)  # a completion's chunk
    call = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    answer.receive(response, event({"choices": [{"delta": call}]}), 5.0)
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    answer.receive(response, event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n", 6.0)
    answer.check_end(response)
    assert list(answer.chunk_times_s) == [1, 2, 4, 5]
    assert answer.text == "Helhmlo"
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (9, 5, 4)


@pytest.mark.parametrize(
    "data", [b"data: {\n\n", b"data: 7\n\n", event({}), event({"choices": [3]}), event([1])]
)
def test_an_event_that_is_no_chunk_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedStream):
        MeasuredAnswer().receive(ok(), data, 0.0)


def test_an_error_event_is_told_apart() -> None:
    with pytest.raises(ErrorInStream, match="engine died"):
        MeasuredAnswer().receive(ok(), event({"error": {"message": "the engine died"}}), 0.0)


def test_a_stream_must_say_that_it_is_finished() -> None:
    answer, response = MeasuredAnswer(), ok()
    answer.receive(response, event({"choices": [{"text": "x", "finish_reason": None}]}), 0.0)
    with pytest.raises(MalformedStream, match="without a finish reason"):
        answer.check_end(response)
    answer.receive(response, event({"choices": [{"text": "", "finish_reason": "stop"}]}), 0.0)
    answer.check_end(response)
