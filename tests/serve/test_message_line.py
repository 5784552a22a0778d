"""The link between API process and engine: whole messages, in order, without waiting."""

import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.serve.engine_link.engine_process import EngineLoop
from cumulo.serve.engine_link.message_line import MessageLine
from cumulo.serve.engine_link.messages import Abort, BlockMap


def pair(buffer_bytes: int | None = None) -> tuple[MessageLine, MessageLine]:
    left, right = socket.socketpair()
    if buffer_bytes is not None:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return MessageLine(left), MessageLine(right)


@given(st.lists(st.binary(max_size=3000), max_size=40), st.lists(st.booleans(), max_size=40))
def test_messages_arrive_whole_and_in_order(messages: list[bytes], reads: list[bool]) -> None:
    sender, receiver = pair(4096)
    received: list[bytes] = []
    for position, message in enumerate(messages):
        sender.send(message)
        if position < len(reads) and reads[position]:
            received += receiver.receive()
    while len(received) < len(messages):
        sender.flush()
        received += receiver.receive()
    assert received == messages and not sender.has_unsent
    sender.close()
    assert receiver.receive() == [] and receiver.closed
    receiver.close()


def test_a_message_larger_than_any_buffer_does_not_block_its_sender() -> None:
    sender, receiver = pair()
    large = bytes(range(256)) * (8 << 12)
    sender.send(large)
    sender.send(b"after it")
    assert sender.has_unsent
    received = receiver.receive()
    while len(received) < 2:
        sender.flush()
        received += receiver.receive()
    assert received == [large, b"after it"]
    sender.close()
    receiver.close()


def test_what_was_said_before_the_end_is_heard() -> None:
    sender, receiver = pair()
    receiver.send(b"nobody reads this")
    sender.send(b"last words")
    sender.close()
    assert receiver.receive() == [b"last words"] and not receiver.closed
    assert receiver.receive() == [] and receiver.closed
    with pytest.raises(OSError):
        receiver.send(b"to nobody")
    receiver.close()


def test_closing_waits_for_what_is_unsent_but_not_for_ever() -> None:
    sender, receiver = pair(4096)
    sender.send(bytes(1 << 20))
    sender.close(patience_s=0.01)
    assert receiver.receive() == [] and receiver.closed  # not whole: nobody takes half a message
    receiver.close()


def test_an_engine_whose_reports_had_to_wait_rests_when_they_are_gone() -> None:
    """Its poll would return at once for ever while it watches for room that it does not need."""
    ours, theirs = pair(4096)
    engine = SimpleNamespace(
        runner=None, link=None, mover=None, guidance=None, adapters=None, scheduler=None, on_step=None
    )
    loop = EngineLoop(engine, ours)  # type: ignore[arg-type]
    report = BlockMap(["request"] * 1000, [0] * 1000, b"")
    while not ours.has_unsent:
        loop._send(report)
    assert loop._poller.poll(0) == []  # no room yet
    while ours.has_unsent:
        theirs.receive()
        ours.flush()
    loop._send(Abort("request"))  # type: ignore[arg-type]
    assert not ours.has_unsent and loop._poller.poll(0) == []
    for line in (ours, theirs):
        line.close()
