"""The console's front door without a browser: who may log out, and from where."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui")

from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from cumulo.console.front import COOKIE, Front, Sessions
from cumulo.serve.access.keys import ApiKeys, Caller, new_key

HOST = "console.example"


@pytest.fixture
def visit(tmp_path: Path) -> TestClient:
    """Somebody who has logged in."""
    key = new_key(tmp_path / "keys.json", "mine")
    sessions = Sessions(ApiKeys(tmp_path / "keys.json", Caller("anyone")))
    front = Front(PlainTextResponse("api"), PlainTextResponse("page"), sessions)
    client = TestClient(front, base_url=f"http://{HOST}", follow_redirects=False)
    answer = client.post("/login", data={"key": key}, headers={"Origin": f"http://{HOST}"})
    assert answer.status_code == 303 and COOKIE in answer.cookies
    assert client.get("/live").text == "page"
    return client


def is_logged_in(visit: TestClient) -> bool:
    return bool(visit.get("/live").status_code == 200)


def test_an_unknown_address_is_a_page_for_people_and_an_error_for_programs() -> None:
    front = Front(PlainTextResponse("api", 404), PlainTextResponse("page"), Sessions(None))
    client = TestClient(front)
    page = client.get("/chats/<b>", headers={"Accept": "text/html,*/*"})
    assert page.status_code == 404 and page.headers["content-type"].startswith("text/html")
    assert "The server has no /chats/&lt;b&gt;" in page.text and 'href="/"' in page.text
    assert client.get("/chats/x").text == "api"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_no_link_and_no_image_can_log_somebody_out(visit: TestClient, method: str) -> None:
    answer = visit.request(method, "/logout")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert "set-cookie" not in answer.headers and is_logged_in(visit)


@pytest.mark.parametrize("origin", ["http://elsewhere.example", "null", f"http://{HOST}.elsewhere.example"])
def test_no_form_of_another_site_logs_in_or_out(visit: TestClient, origin: str) -> None:
    for path in ("/logout", "/login"):
        assert visit.post(path, headers={"Origin": origin}).status_code == 403
    assert is_logged_in(visit)


def test_the_consoles_own_form_logs_out(visit: TestClient) -> None:
    answer: Any = visit.post("/logout", headers={"Origin": f"http://{HOST}"})
    assert answer.status_code == 303 and answer.headers["location"] == "/login"
    assert not is_logged_in(visit)


def test_one_visitor_cannot_hold_all_sockets() -> None:
    """A socket may hold a message that has not ended, so there are only so many."""

    async def play() -> tuple[int, list[str], list[str]]:
        opened, ended = 0, asyncio.Event()

        async def page(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal opened
            opened += 1
            await ended.wait()

        front, refused = Front(page, page, Sessions(None)), list[str]()

        async def connect(address: str) -> None:
            scope = {
                "type": "websocket",
                "path": "/_nicegui_ws/socket.io/",
                "headers": [],
                "client": (address, 1),
            }

            async def receive() -> Message:
                return {"type": "websocket.connect"}

            async def send(message: Message) -> None:
                refused.append(f"{address} {message['type']}")

            await front(scope, receive, send)

        tasks = [asyncio.create_task(connect("attacker")) for _ in range(300)]
        tasks += [asyncio.create_task(connect("honest")) for _ in range(5)]
        await asyncio.sleep(0)
        of_many = list(refused)
        ended.set()
        await asyncio.gather(*tasks)
        refused.clear()
        await connect("attacker")  # when the others have ended there is room
        return opened, of_many, refused

    opened, of_many, later = asyncio.run(play())
    assert of_many == ["attacker websocket.close"] * 236 and not later
    assert opened == 64 + 5 + 1
