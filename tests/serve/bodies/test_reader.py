"""Where a body is read: small ones at once, large ones in their place, slow ones not at all."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import Field
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from cumulo.serve.bodies import reader
from cumulo.serve.bodies.reader import BodyReader, JsonRoute
from cumulo.serve.bodies.strict import Strict
from cumulo.serve.errors import ApiError, ClientGone, install

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


SCOPE: dict[str, Any] = {"client": ("10.0.0.1", 5), "headers": [(b"content-type", b"application/json")]}


def read(parts: tuple[bytes, ...], model: type[Strict] = Question, kind: bytes = b"application/json") -> Any:
    scope = {**SCOPE, "headers": [(b"content-type", kind)]}
    return asyncio.run(BodyReader().read(scope, pieces(*parts), model))


def test_small_bodies_are_read_at_once_and_large_ones_in_a_thread() -> None:
    small, large = b'{"text": "a"}', b'{"text": "' + b"a" * 70_000 + b'"}'
    here = threading.current_thread().name
    assert read((small,), Where).threads == [here]
    assert read((large[:100], large[100:]), Where).threads[0].startswith("read-body")
    many = b'{"text": "a", "threads": [' + b'"",' * 5000 + b'""]}'  # short, but with much structure
    assert read((many,), Where).threads[-1].startswith("read-body")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has no body"),
        (b"{", "not valid JSON: Expecting property name enclosed in double quotes at position 1"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"\xff", "not valid JSON"),
        (b'{"text": 5}', "'text': Input should be a valid string"),
        (b"{}", "'text' is missing"),
        (b'{"text": "a", "extra": 1}', "'extra' is not a field this server knows"),
        (rb'{"text": "a", "\ud800": 1}', "string"),
        (b"[" * 70_000, "objects and lists"),
    ],
)
def test_whatever_is_wrong_is_told(content: bytes, told: str) -> None:
    with pytest.raises(ApiError, match=re.escape(told)) as caught:
        read((content,))
    assert caught.value.status == 400


def test_a_body_of_another_kind_is_refused() -> None:
    with pytest.raises(ApiError, match="sent with Content-Type: application/json"):
        read((b'{"text": "a"}',), kind=b"text/plain")
    assert read((b'{"text": "a"}',), kind=b"application/problem+json; charset=utf-8").text == "a"


async def _loaded(scope: Scope, body: Question) -> None:
    """The model that a body names is there."""


def test_a_route_gives_its_endpoint_the_body_and_errors_to_the_application() -> None:
    app, router = FastAPI(), APIRouter(route_class=JsonRoute)
    app.state.bodies, app.state.models = BodyReader(), SimpleNamespace(enter=_loaded)
    install(app)

    @router.post("/ask")
    async def ask(body: Question, request: Request) -> Response:
        if body.text == "teapot":
            raise ApiError(418, "no coffee")
        return JSONResponse({"text": body.text, "path": request.url.path})

    app.include_router(router)
    client = TestClient(app)
    assert client.post("/ask", json={"text": "a"}).json() == {"text": "a", "path": "/ask"}
    assert client.post("/ask", json={"text": "teapot"}).status_code == 418
    assert client.post("/ask", json={"text": 5}).json()["error"]["param"] == "text"
    schema = client.get("/openapi.json").json()["paths"]["/ask"]["post"]["requestBody"]
    assert schema["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Question"}


def test_a_large_body_that_arrives_slowly_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SLACK_S", 0.0)
    monkeypatch.setattr(reader, "PACE_BYTES_S", 1 << 60)
    with pytest.raises(ApiError, match="others wait for its place") as caught:
        read((b'{"text": "', b"a" * 70_000, b"a", b"a", b'"}'))
    assert (caught.value.status, caught.value.headers["Connection"]) == (408, "close")
    assert read((b'{"text":', b'"a"}')) == Question(text="a")  # small ones may take their time


def test_a_sender_that_leaves_half_way_frees_its_place() -> None:
    async def play() -> None:
        bodies = BodyReader()
        waiting: list[dict[str, Any]] = [
            {"type": "http.request", "body": b"a" * 70_000, "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive() -> dict[str, Any]:
            return waiting.pop(0)

        with pytest.raises(ClientGone):
            await bodies.read(SCOPE, receive, Question)
        for _ in range(2 * reader.IN_MEMORY):
            large = pieces(b" " * 70_000, b'{"text": "a"}')
            assert (await bodies.read(SCOPE, large, Question)).text == "a"

    asyncio.run(play())
