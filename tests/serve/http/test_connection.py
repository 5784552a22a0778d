"""What one connection may send: limits of header, framing, trailers and pipelining, and time-outs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.http.raw import Answer, Client, chunked, get, post
from tests.serve.http.transport import Transport, transport
from tests.serve.running_server import wait_for


def kernel_bytes() -> int:
    """What the kernel may keep of a connection whose server has not had its turn yet."""
    limits = [Path(f"/proc/sys/net/ipv4/tcp_{side}mem") for side in "rw"]
    return sum(int(one.read_text().split()[2]) if one.exists() else 8 << 20 for one in limits)


MOST_BYTES = (8 << 20) + kernel_bytes()
SHORT_S = 1.0


@pytest.fixture(scope="module")
def served() -> Iterator[Transport]:
    with transport() as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[Transport]:
    """All time-outs are short."""
    with transport(
        header_timeout_s=SHORT_S,
        body_timeout_s=SHORT_S,
        keep_alive_timeout_s=SHORT_S,
        write_timeout_s=SHORT_S,
    ) as running:
        yield running


# -- what is ordinary ---------------------------------------------------------------------------------------------
def test_requests_follow_each_other_on_a_connection(served: Transport) -> None:
    with Client(served.url) as client:
        for number in range(3):
            client.send(post(b"x" * number))
            answer = client.answer()
            assert answer is not None and f'"body_bytes": {number}'.encode() in answer.body


def test_a_request_may_follow_an_answers_last_byte_before_the_application_ends_it() -> None:
    with transport() as own, Client(own.url) as client, Client(own.url) as other:
        client.send(get("/late"))
        answer = client.answer()
        assert answer is not None and b'"path": "/late"' in answer.body
        client.send(get("/next"))
        other.send(get("/other"))
        assert other.answer() is not None and not own.refused
        own.release()
        answer = client.answer()
        assert answer is not None and b'"path": "/next"' in answer.body


def test_large_headers_within_the_limits_pass(served: Transport) -> None:
    with Client(served.url) as client:
        client.send(get("/" + "p" * 8000, "A: " + "v" * 16000, *(f"B{n}: w" for n in range(98))))
        answer = client.answer()
        assert answer is not None and answer.status == 200 and b'"headers": 100' in answer.body


def test_a_body_of_one_byte_chunks_passes(served: Transport) -> None:
    with Client(served.url) as client:
        client.send(chunked() + b"1\r\nx\r\n" * 50_000 + b"0\r\nT: u\r\n\r\n")
        answer = client.answer()
        assert answer is not None and b'"body_bytes": 50000' in answer.body
        client.send(get("/again"))
        again = client.answer()
        assert again is not None and again.status == 200


def test_a_large_body_followed_by_a_request_passes(served: Transport) -> None:
    with Client(served.url) as client:
        for sent, part in (
            (post(bytes(4 << 20)), b'"body_bytes": 4194304'),
            (get("/after", "C: " + "v" * 15000), b'"path": "/after"'),
        ):
            client.send(sent)
            answer = client.answer()
            assert answer is not None and part in answer.body


def test_a_client_of_http_1_0_gets_no_chunks(served: Transport) -> None:
    with Client(served.url) as client:
        client.send(b"GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        received = b"".join(iter(lambda: client.socket.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"200" in head and b"connection: close" in head and b"chunked" not in head
    assert body.startswith(b'{"path": "/old"')


# -- what is too much ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("begin", "piece", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n", b"X-Header: 0123456789\r\n" * 3000, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"v" * 65536, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", b"n" * 65536, 431),
        (b"GET /", b"u" * 65536, 414),
        (b"", b"\r\n" * 32768, 431),
        (chunked() + b"1;", b"e" * 65536, 400),
        (chunked() + b"1\r\nx\r\n", b"1;" + b"e" * 5000 + b"\r\nx\r\n", 400),
        (chunked() + b"1\r\nx\r\n0\r\n", b"Trailer: 0123456789\r\n" * 3000, 431),
        (chunked() + b"1\r\nx\r\n0\r\nT: u\r\nV: ", b"v" * 65536, 431),
        (chunked() + bytes(1 << 20).join([b"100000\r\n", b"\r\n0\r\nT: "]), b"v" * 1400, 400),
    ],
    ids=[
        "header lines", "header value", "header name", "URL", "empty lines", "chunk extension", "chunk extensions",
        "trailers", "trailer value", "trailer value after a large body",
    ],
)  # fmt: skip
def test_what_never_ends_is_refused_early(served: Transport, begin: bytes, piece: bytes, status: int) -> None:
    with Client(served.url) as client:
        client.send(begin)
        client.flood(piece, MOST_BYTES)
        assert client.lost, "all was taken"


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (get("/", *(f"H{n}: v" for n in range(100))), 431, "header_too_large"),
        (get("/", "H: " + "v" * 17000), 431, "header_too_large"),
        (get("/", *(f"H{n}: {'v' * 8000}" for n in range(9))), 431, "header_too_large"),
        (get("/" + "u" * 9000), 414, "url_too_long"),
        (b"\r\n" * 40000, 431, "header_too_large"),
        (chunked() + b"1;" + b"e" * 400_000, 400, "malformed_request"),
        (chunked() + b"zz\r\n", 400, "malformed_request"),
        (b"not http at all\r\n\r\n", 400, "malformed_request"),
    ],
)
def test_the_refusal_is_an_error_in_openais_shape(
    served: Transport, request_bytes: bytes, status: int, code: str
) -> None:
    with Client(served.url) as client:
        client.send(request_bytes)
        answer = client.answer()
        assert answer is not None and answer.status == status
        assert answer.headers["connection"] == "close"
        assert answer.error["code"] == code and answer.error["message"]
        assert client.is_closed()


@pytest.mark.parametrize("begin", ["POST / HTTP/1.1", "GET / HTTP/1.1\r\nContent-Length: 2"])
def test_a_handshake_that_is_none_is_refused_and_the_server_can_end(begin: str) -> None:
    with transport() as own, Client(own.url) as client:
        client.send(f"{begin}\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n{{}}".encode())
        answer = client.answer()
        assert answer is not None and answer.status == 400 and "WebSocket" in answer.error["message"]
        assert client.is_closed()


def test_a_trailer_does_not_become_a_header(served: Transport) -> None:
    with Client(served.url) as client:
        client.send(chunked() + b"1\r\nx\r\n0\r\nAuthorization: Bearer stolen\r\n\r\n")
        answer = client.answer()
        assert answer is not None and b'"headers": 3' in answer.body


def test_a_request_that_does_not_wait_for_the_answer_ends_the_connection_after_it(served: Transport) -> None:
    with Client(served.url) as client:
        client.send(b"".join(get(f"/{number}") for number in range(200)))
        answer = client.answer()
        assert answer is not None and b'"path": "/0"' in answer.body and client.answer() is None
    wait_for(lambda: served.refused["pipelined"], "the count")


def test_what_came_before_a_malformed_request_is_answered(served: Transport) -> None:
    with Client(served.url) as client:
        client.send(get("/first") + b"\0\0\0\r\n\r\n")
        answer = client.answer()
        assert answer is not None and answer.status == 200 and b"/first" in answer.body
        assert client.is_closed()


def test_the_request_of_a_lost_connection_is_told() -> None:
    with transport() as served:
        client = Client(served.url)
        client.send(get("/hold"))
        wait_for(lambda: served.holding == 1, "the request")
        client.close()
        wait_for(lambda: served.gone == 1 and served.holding == 0, "the news that the client is gone")


# -- what takes too long ------------------------------------------------------------------------------------------
def heard(hasty: Transport, data: bytes) -> tuple[Client, Answer]:
    """A connection on which `data` was sent, and the answer. Where a busy machine takes longer from connecting to
    sending than the server waits, another connection is tried."""
    for _ in range(10):
        client = Client(hasty.url)
        client.send(data)
        if (answer := client.answer()) is not None:
            return client, answer
        client.socket.close()
    raise AssertionError("no connection was answered")


def test_a_silent_connection_is_closed(hasty: Transport) -> None:
    with Client(hasty.url) as client:
        assert client.answer() is None


def test_a_header_that_trickles_is_refused(hasty: Transport) -> None:
    with Client(hasty.url) as client:
        trickle(client, b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        assert client.lost
    wait_for(lambda: hasty.refused["header_timeout"], "the count")


def test_half_a_header_is_answered_with_408(hasty: Transport) -> None:
    client, answer = heard(hasty, b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
    with client:
        assert answer.status == 408 and "header" in answer.error["message"]
        assert client.is_closed()


@pytest.mark.parametrize(
    "begin", [post(b"")[:-4].replace(b": 0", b": 100000") + b"\r\n\r\n", chunked() + b"fffff\r\n"]
)
def test_half_a_body_is_answered_with_408_and_the_application_told(hasty: Transport, begin: bytes) -> None:
    gone = hasty.gone
    client, answer = heard(hasty, begin + b"{")
    with client:
        assert answer.status == 408 and "too slowly" in answer.error["message"]
        assert client.is_closed()
    wait_for(lambda: hasty.gone == gone + 1, "the news to the application")


def test_a_body_that_trickles_is_refused(hasty: Transport) -> None:
    with Client(hasty.url) as client:
        trickle(client, post(b"").replace(b": 0", b": 100000"))
        assert client.lost
    wait_for(lambda: hasty.refused["body_timeout"], "the count")


def test_an_idle_connection_is_closed_after_a_while(hasty: Transport) -> None:
    client, _ = heard(hasty, get())
    with client:
        assert client.is_closed()
    wait_for(lambda: hasty.refused["keep_alive_timeout"], "the count")


@pytest.mark.long
def test_a_request_that_computes_long_is_left_alone(hasty: Transport) -> None:
    with Client(hasty.url) as client, Client(hasty.url) as other:
        client.send(get("/hold"))
        wait_for(lambda: hasty.holding, "the request")
        for _ in range(3):  # three time-outs pass for somebody else
            with Client(hasty.url) as other:
                assert other.answer() is None
        assert client.is_open()
        hasty.release()
        answer = client.answer()
        assert answer is not None and answer.status == 200


def test_a_client_that_never_reads_its_answer_is_cut_off(hasty: Transport) -> None:
    with Client(hasty.url, receive_buffer_bytes=4096) as client:
        client.send(get("/endless"))
        wait_for(lambda: hasty.streaming, "the stream")
        wait_for(lambda: not hasty.streaming, "its end")
    assert hasty.refused["write_timeout"] == 1


def trickle(client: Client, begin: bytes) -> None:
    """One byte at a time, without an end; waits for the server's answer or close between the bytes."""
    client.send(begin)
    client.socket.settimeout(SHORT_S / 8)
    while client.send(b"v"):
        try:
            client.lost = client.socket.recv(65536) is not None
            return
        except TimeoutError:
            continue
        except ConnectionError:
            client.lost = True
            return


def test_the_same_large_request_again_and_again_is_no_silence(served: Transport) -> None:
    """The second one's first block reports what the first one's last report was."""
    with Client(served.url) as client:
        for _ in range(30):
            client.send(post(b"z" * 400_000))
            answer = client.answer()
            assert answer is not None and answer.status == 200 and b'"body_bytes": 400000' in answer.body
