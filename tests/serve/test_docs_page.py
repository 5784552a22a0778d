"""The page /docs is made from the server's own description and loads nothing."""

import re
import threading
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from cumulo.serve import docs_page


class Inner(BaseModel):
    text: str = Field(max_length=9, description="Of the <inner> part")


class Body(BaseModel):
    model: str = Field(json_schema_extra={"enum": ["m"]})
    messages: list[Inner]
    share: float | None = Field(None, ge=0, le=1)
    either: Inner | list[Inner] | None = None


def page() -> str:
    app = FastAPI(title="Some <API>", version="1", docs_url=None, redoc_url=None)

    @app.post("/v1/things", summary="Make a thing")
    async def make(body: Body) -> dict[str, Any]:
        return {}

    @app.get("/health")
    async def health(deep: bool = False) -> dict[str, Any]:
        return {}

    docs_page.install(app)
    answer = TestClient(app).get("/docs")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    return answer.text


def test_every_operation_and_field_is_on_the_page() -> None:
    text = re.sub(r"<[^>]+>", "", page())
    for expected in (
        "POST /v1/things", "Make a thing", "GET /health", "deep", "messages", "list of object", "required",
        "at least 0", "at most 1", "at most 9 characters", "either",
        """-d '{"model": "m", "messages": [{"role": "user", "content": "Hello!"}]}'""".replace('"', "&quot;")
        .replace("'", "&#x27;"),
    ):  # fmt: skip
        assert expected in text, expected
    assert "null" not in text


def test_the_page_loads_nothing_and_escapes_what_it_shows() -> None:
    text = page()
    assert not re.search(r"<script|<link|<img|src=|@import|url\(", text)
    assert "<inner>" not in text and "&lt;inner&gt;" in text and "Some &lt;API&gt;" in text


def test_the_description_is_made_beside_the_event_loop() -> None:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    threads: list[int] = []

    @app.get("/loop")
    async def loop() -> int:
        return threading.get_ident()

    docs_page.install(app)
    describe = app.openapi
    app.openapi = lambda: threads.append(threading.get_ident()) or describe()  # type: ignore[method-assign, func-returns-value]
    with TestClient(app) as client:
        own = client.get("/loop").json()
        assert client.get("/openapi.json").json()["paths"] and client.get("/docs").status_code == 200
    assert len(threads) == 2 and own not in threads
