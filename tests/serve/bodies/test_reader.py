"""Where a body is read: small ones at once, large ones in their place, slow ones not at all."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import Field

from cumulo.serve.bodies import reader
from cumulo.serve.bodies.reader import BodyReader
from cumulo.serve.errors import ApiError
from cumulo.serve.openai.fields import Strict

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Question(Strict):
    text: str


class Where(Strict):
    """Notes which thread validates it."""

    text: str
    threads: list[str] = Field(default_factory=list)

    def model_post_init(self, context: Any) -> None:
        self.threads.append(threading.current_thread().name)


def pieces(*parts: bytes) -> Receive:
    waiting = list(parts)

    async def receive() -> dict[str, Any]:
        part = waiting.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    return receive


def read(parts: tuple[bytes, ...], model: type[Strict] | None = Question) -> tuple[list[Any], Any]:
    return asyncio.run(BodyReader().read({"client": ("10.0.0.1", 5)}, pieces(*parts), model, None))


def test_small_bodies_are_read_at_once_and_large_ones_in_a_thread() -> None:
    small, large = b'{"text": "a"}', b'{"text": "' + b"a" * 70_000 + b'"}'
    here = threading.current_thread().name
    assert read((small,), Where)[1].threads == [here]
    assert read((large[:100], large[100:]), Where)[1].threads[0].startswith("read-body")
    many = b'{"text": "' + b"[" * 3000 + b'"}'  # short, but perhaps with much structure
    assert read((many,), Where)[1].threads[0].startswith("read-body")


def test_a_small_mistake_and_a_path_without_a_model_are_left_to_fastapi() -> None:
    assert read((b'{"text": 5}',)) == (
        [{"type": "http.request", "body": b'{"text": 5}', "more_body": False}],
        None,
    )
    messages, value = read((b"[1]", b" " * 70_000), None)
    assert len(messages) == 2 and value is None
    with pytest.raises(ApiError, match="objects and lists"):
        read((b"[" * 70_000,), None)


def test_a_large_body_that_arrives_slowly_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SLACK_S", 0.0)
    monkeypatch.setattr(reader, "PACE_BYTES_S", 1 << 60)
    with pytest.raises(ApiError, match="others wait for its place") as caught:
        read((b'{"text": "', b"a" * 70_000, b"a", b"a", b'"}'))
    assert (caught.value.status, caught.value.headers["Connection"]) == (408, "close")
    assert read((b'{"text":', b'"a"}'))[1] == Question(text="a")  # small ones may take their time


def test_a_sender_that_leaves_half_way_frees_its_place() -> None:
    async def play() -> None:
        bodies = BodyReader()
        waiting: list[dict[str, Any]] = [
            {"type": "http.request", "body": b"a" * 70_000, "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive() -> dict[str, Any]:
            return waiting.pop(0)

        messages, value = await bodies.read({}, receive, Question, None)
        assert messages[-1] == {"type": "http.disconnect"} and value is None
        for _ in range(2 * reader.IN_MEMORY):
            assert (await bodies.read({}, pieces(b" " * 70_000, b'{"text": "a"}'), Question, None))[
                1
            ].text == "a"

    asyncio.run(play())
