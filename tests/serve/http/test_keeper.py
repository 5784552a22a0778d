"""Which connections may stay when there are too many, and who is answered when all are busy."""

import contextlib

import pytest

from cumulo.errors import CumuloError
from cumulo.serve.http.limits import room_within
from tests.serve.http.raw import Client, get, post
from tests.serve.http.transport import Transport, transport
from tests.serve.running_server import wait_for

HALF_HEADER = b"GET / HTTP/1.1\r\nHost: a\r\nX: "
HALF_BODY = post(b"").replace(b": 0", b": 1000") + b"half"


def answered(served: Transport, path: str) -> int:
    with Client(served.url) as client:
        client.send(get(path, "Connection: close"))
        answer = client.answer()
        assert answer is not None
        return answer.status


@pytest.mark.parametrize(
    "sent", [b"", HALF_HEADER, HALF_BODY], ids=["nothing", "half a header", "half a body"]
)
@pytest.mark.parametrize("per_address", [8, 4], ids=["overall", "of one address"])
def test_those_that_keep_us_waiting_give_way(sent: bytes, per_address: int) -> None:
    with transport(connections=8, per_address=per_address) as served, contextlib.ExitStack() as stack:
        busy = stack.enter_context(Client(served.url))
        busy.send(get("/hold"))
        wait_for(lambda: served.holding == 1, "the request")
        attackers = [stack.enter_context(Client(served.url)) for _ in range(40)]
        for client in attackers:
            client.send(sent)
        for path in ("/health", "/any", "/health", "/any"):
            assert answered(served, path) == 200
        assert served.refused["evicted"] >= 30 and served.keeper.count <= per_address + 4
        assert busy.is_open()
        served.release()
        answer = busy.answer()
        assert answer is not None and answer.status == 200


def test_a_connection_that_has_been_answered_outlives_those_that_have_not() -> None:
    with transport(connections=8) as served, contextlib.ExitStack() as stack:
        known = stack.enter_context(Client(served.url))
        known.send(get())
        assert known.answer() is not None
        for _ in range(40):
            stack.enter_context(Client(served.url)).send(HALF_HEADER)
        wait_for(lambda: served.refused["evicted"] >= 30, "the attack")
        known.send(get("/again"))
        again = known.answer()
        assert again is not None and again.status == 200


def test_idle_connections_give_way_the_longest_idle_first() -> None:
    with transport(connections=8) as served, contextlib.ExitStack() as stack:
        idle = []
        for _ in range(8):
            idle.append(stack.enter_context(Client(served.url)))
            idle[-1].send(get())
            assert idle[-1].answer() is not None
        assert answered(served, "/any") == 200
        assert idle[0].is_closed() and all(client.is_open() for client in idle[1:])


def test_when_all_are_busy_only_operators_are_answered() -> None:
    with transport(connections=4) as served, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(Client(served.url)) for _ in range(4)]
        for client in busy:
            client.send(get("/hold"))
        wait_for(lambda: served.holding == 4, "the requests")
        silent = [stack.enter_context(Client(served.url)) for _ in range(20)]  # they cannot fill the reserve
        for path in ("/health", "/ready", "/metrics"):
            assert answered(served, path) == 200
        with Client(served.url) as client:
            client.send(post(b"{}", "/v1/chat/completions"))
            answer = client.answer()
        assert answer is not None and answer.status == 503 and answer.headers["retry-after"] == "2"
        assert answer.error["code"] == "too_many_connections"
        assert all(client.is_open() for client in busy) and not silent[0].is_open()
        served.release()
        assert all(client.answer() is not None for client in busy)
        assert answered(served, "/any") == 200


def test_places_are_given_back() -> None:
    with transport(connections=4) as served:
        for _ in range(20):
            assert answered(served, "/any") == 200
        wait_for(lambda: served.keeper.count == 0, "the end of all connections")


def test_descriptors_are_kept_for_the_process_and_for_newcomers() -> None:
    assert room_within(10_000, 4096) == 4096
    assert 84 < room_within(200, 4096) <= 134
    with pytest.raises(CumuloError, match="raise the limit of open files"):
        room_within(30, 4096)
    assert room_within(60, 2) == 2


def test_sockets_take_at_most_a_part_of_the_places() -> None:
    handshake = get(
        "/", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )  # fmt: skip
    with transport(connections=40) as served, contextlib.ExitStack() as stack:
        statuses = []
        for _ in range(15):
            client = stack.enter_context(Client(served.url))
            client.send(handshake)
            answer = client.answer()
            statuses.append(answer.status if answer is not None else 0)
        assert statuses == [101] * 10 + [503] * 5
        for _ in range(60):  # sockets are not idle: they do not give way
            stack.enter_context(Client(served.url))
        assert answered(served, "/any") == 200
        assert served.sockets == 10
    assert served.sockets == 0
