"""The short way to an endpoint: FastAPI's answers, and FastAPI's own way for whatever is not in good form."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from cumulo.serve import direct_route
from cumulo.serve.bodies.reader import BodyReader
from cumulo.serve.errors import ApiError, install


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: str
    count: int = 1


router = APIRouter()


@router.post("/ask")
async def ask(body: Question, request: Request) -> Response:
    if body.text == "teapot":
        raise ApiError(418, "no coffee")
    way = "direct" if request.scope.get("route") is None else "FastAPI"
    return JSONResponse({"text": body.text * body.count, "way": way})


def application(direct: bool) -> FastAPI:
    app = FastAPI()
    install(app)
    app.include_router(router)
    if direct:
        direct_route.install(app, direct_route.json_endpoints([router]), BodyReader())
    return app


def post(
    app: FastAPI, content: bytes, kind: str = "application/json", method: str = "POST"
) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, "/ask", content=content, headers={"Content-Type": kind})

    return asyncio.run(send())


def test_a_request_in_good_form_takes_the_short_way() -> None:
    answer = post(application(direct=True), b'{"text": "ha", "count": 3}')
    assert answer.status_code == 200 and answer.json() == {"text": "hahaha", "way": "direct"}
    assert post(application(direct=False), b'{"text": "ha"}').json()["way"] == "FastAPI"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'{"text": 5}', b'{"count": 1}', b'{"text": "a", "extra": 1}', b"\xff\xfe",
        b'{"text": "teapot"}', b'{"text": "a", "count": "x"}', b"[" * 500,
    ],
)  # fmt: skip
def test_whatever_is_wrong_is_told_as_fastapi_would(content: bytes) -> None:
    answers = [post(application(direct), content) for direct in (True, False)]
    assert answers[0].status_code == answers[1].status_code >= 400
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize(("kind", "method"), [("text/plain", "POST"), ("application/json", "PUT")])
def test_other_kinds_of_requests_never_come_near_it(kind: str, method: str) -> None:
    answers = [post(application(direct), b'{"text": "a"}', kind, method) for direct in (True, False)]
    assert answers[0].status_code == answers[1].status_code >= 400
    assert answers[0].json() == answers[1].json()


def test_a_body_in_pieces_is_put_together_and_one_cut_short_is_no_body() -> None:
    def play(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        waiting = iter(messages)

        async def receive() -> dict[str, Any]:
            return next(waiting)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/ask", "raw_path": b"/ask", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            "server": ("test", 80), "client": ("test", 1), "root_path": "", "state": {},
        }  # fmt: skip
        asyncio.run(application(direct=True)(scope, receive, send))
        return sent

    def part(body: bytes, more: bool) -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": more}

    whole = play([part(b'{"text"', True), part(b': "yes"}', False), {"type": "http.disconnect"}])
    assert b'"yes"' in whole[1]["body"] and b'"direct"' in whole[1]["body"]
    cut = play([part(b'{"text": "yes"}', True), {"type": "http.disconnect"}, {"type": "http.disconnect"}])
    assert not cut or cut[0]["status"] >= 400
