"""The console in a real browser, on a real server with the built-in model."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from cumulo.serve.keys import new_key
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model, running_server, wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [
    name
    for name, there in (
        ("nicegui", find_spec("nicegui")),
        ("playwright", find_spec("playwright")),
        ("a Chromium browser", CHROMIUM),
    )
    if not there
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    needs_built_in_model,
]
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
PATIENCE_MS = 60_000
DESKTOP = {"viewport": {"width": 1180, "height": 760}, "color_scheme": "light"}
PHONE = {"viewport": {"width": 390, "height": 780}, "color_scheme": "dark"}
LONG_TASK = "Count from 1 to 2000, one number per line."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        running = player.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@contextmanager
def looking_at(browser: Any, server: RunningServer, path: str, screen: dict[str, Any]) -> Iterator[Any]:
    """A page that must end without an error in it and without having asked another host for anything."""
    context = browser.new_context(**screen)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    own = (server.url, server.url.replace("http", "ws", 1), "data:", "blob:")
    page.on("request", lambda request: request.url.startswith(own) or complaints.append(request.url))
    page.on("websocket", lambda socket: socket.url.startswith(own) or complaints.append(socket.url))
    page.goto(server.url + path)
    try:
        yield page
        assert complaints == []
    finally:
        context.close()


def say(page: Any, text: str) -> None:
    page.wait_for_function("window.did_handshake")  # so that the sampling controls are told before
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).last.inner_text())


def test_an_answer_streams_and_its_story_is_one_click_away(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        page.get_by_label("Most tokens").fill("60")
        say(page, "Write a poem about the sea.")
        page.wait_for_function("document.querySelector('.streaming')?.innerText.length > 3")
        early = page.evaluate("document.querySelector('.streaming')?.innerText ?? ''")
        page.wait_for_function(
            "(n) => (document.querySelector('.streaming')?.innerText.length ?? 0) > n", arg=len(early)
        )
        page.wait_for_selector(".foot")
        answer = text_of(page, ".said.assistant")
        assert len(answer) > len(early) > 0
        assert re.search(r"\d+ tokens · first after", answer)
        page.get_by_text("its story").click()
        page.wait_for_selector("ol.events")
        events = text_of(page, "ol.events")
        assert "arrived with" in events and "first token" in events and "finished" in events
        assert "prompt tokens" in text_of(page, ".words")


def test_a_stopped_answer_ends_in_the_engine_and_is_found_in_requests(
    browser: Any, server: RunningServer
) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        page.get_by_label("Most tokens").fill("6000")
        page.get_by_label("Temperature").fill("0")
        say(page, LONG_TASK)
        page.wait_for_function("document.querySelector('.streaming')?.innerText.length > 10")
        page.get_by_label("Stop").click()
        page.wait_for_selector(".foot")
        assert "stopped" in text_of(page, ".foot")
        wait_for(lambda: server.get("/health").json()["running"] == 0, "the engine to be idle", server)
        request_id = page.locator(".foot a").get_attribute("href").rsplit("/", 1)[-1]

        page.get_by_role("link", name="Requests").click()
        page.locator(".filters").get_by_text("abort", exact=True).click()
        row = page.locator(f'tr:has(a[href="/requests/{request_id}"])')
        row.wait_for()
        assert "abort" in row.inner_text()
        assert page.locator("tbody .badge").all_inner_texts() == ["abort"]  # what ended well is filtered out
        row.locator("a").click()
        page.wait_for_selector("ol.events")
        assert "finished: abort" in text_of(page, "ol.events")


def test_closing_the_page_ends_what_it_asked_for(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        page.get_by_label("Most tokens").fill("6000")
        page.get_by_label("Temperature").fill("0")
        say(page, LONG_TASK)
        page.wait_for_function("document.querySelector('.streaming')?.innerText.length > 10")
        assert server.get("/health").json()["running"] == 1
    wait_for(lambda: server.get("/health").json()["running"] == 0, "the engine to be idle", server, 20)


def test_a_message_sent_before_the_page_is_connected_is_answered(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        page.wait_for_function("window.did_handshake")
        page.evaluate("window.did_handshake = false")
        box = page.get_by_label("Message", exact=True)
        # The page tells its events in any order once it is connected: here the text long after the key.
        page.evaluate(
            "window.setTimeout = ((real) => (f, ms) => real(f, ms + Math.random() * 50))(setTimeout)"
        )
        box.fill("Hello!")
        box.press("Enter")
        page.evaluate("window.did_handshake = true")
        page.wait_for_selector(".said.user")
        with suppress(Exception):  # playwright's: a short answer has ended by itself, and the button is gone
            page.get_by_label("Stop").click(timeout=5000)
        page.wait_for_selector(".foot")
        assert "Hello!" in text_of(page, ".said.user")


def test_regenerate_replaces_the_answer_and_clear_forgets_everything(
    browser: Any, server: RunningServer
) -> None:
    with looking_at(browser, server, "/", PHONE) as page:
        page.get_by_role("button", name="Sampling").click()
        page.get_by_label("Most tokens").fill("8")
        page.get_by_text("Token probabilities").click()
        page.get_by_label("Close").click()
        say(page, "Hello!")
        page.wait_for_selector(".foot")
        token = page.locator(".token").first
        assert "likely (log-probability" in token.get_attribute("title")
        first_story = page.locator(".foot a").get_attribute("href")
        page.get_by_role("button", name="Regenerate").click()
        page.wait_for_function(
            "(old) => { const a = document.querySelectorAll('.foot a');"
            " return a.length == 1 && a[0].getAttribute('href') != old }",
            arg=first_story,
        )
        assert page.locator(".said.user").count() == 1
        page.get_by_role("button", name="Clear").click()
        page.wait_for_selector("text=Talk to")
        assert page.locator(".said").count() == 0


def test_tools_can_be_entered_called_and_answered(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        page.wait_for_function("window.did_handshake")
        page.get_by_label("Most tokens").fill("100")
        page.get_by_label("Temperature").fill("0")
        page.get_by_text("Tools", exact=True).click()
        box = page.get_by_label("Tools (JSON)")
        box.fill('[{"type": "function"}]')
        problem = page.get_by_text("0.function: Field required")
        problem.wait_for()
        for _ in range(5):  # where it appears, it can move the button away from under the pointer
            page.get_by_role("button", name="Example").click()
            page.wait_for_timeout(3000)
            if not problem.count():
                break
        problem.wait_for(state="detached")
        page.get_by_label("Calls").click()
        page.get_by_role("option", name="Must call get_weather").click()
        say(page, "How is the weather in Paris?")
        page.wait_for_selector(".foot")
        call = page.locator(".call")
        assert "get_weather" in call.inner_text() and "city" in call.inner_text()
        page.get_by_label("Calls").click()
        page.get_by_role("option", name="May not call").click()
        page.get_by_label("Result of get_weather").fill('{"sky": "clear", "celsius": 21}')
        page.get_by_role("button", name="Send result").click()
        page.wait_for_function("document.querySelectorAll('.foot').length == 2")
        assert page.get_by_role("button", name="Send result").count() == 0, "it was answered already"
        assert page.locator(".problem").count() == 0
        words = text_of(page, ".said.assistant").split()
        assert len(words) > 5, "the model went on"


def test_tools_that_are_none_are_refused_before_anything_is_asked(
    browser: Any, server: RunningServer
) -> None:
    with looking_at(browser, server, "/", PHONE) as page:
        page.wait_for_function("window.did_handshake")
        page.get_by_role("button", name="Sampling").click()
        page.get_by_text("Tools", exact=True).click()
        page.get_by_label("Tools (JSON)").fill("[1")
        page.get_by_text("not JSON").wait_for()
        page.get_by_label("Close").click()
        say(page, "Hello!")
        page.get_by_text("The tools cannot be used: not JSON").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_description_of_the_api_needs_no_other_host(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/docs", PHONE) as page:
        page.locator("summary", has_text="/v1/chat/completions").click()
        page.get_by_text("top_logprobs", exact=True).first.wait_for()
        assert page.locator("script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert server.get("/redoc").status_code == 404


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop-light", "phone-dark"])
def test_every_page_loads_whole_and_fits_the_screen(
    browser: Any, server: RunningServer, screen: dict[str, Any]
) -> None:
    server.client().chat.completions.create(
        model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Hi"}]
    )
    expected = {
        "/": "Ask something",
        "/requests": "received",
        "/live": "cached, reusable",
        "/system": "fastapi",
        "/requests/none": "Nothing is known",
    }
    with looking_at(browser, server, "/system", screen) as page:
        for path, content in expected.items():
            page.goto(server.url + path)
            found = page.get_by_placeholder(content) if path == "/" else page.get_by_text(content)
            found.first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        dark = page.evaluate("document.body.classList.contains('body--dark')")
        assert dark == (screen["color_scheme"] == "dark")


def test_a_page_that_is_not_seen_is_sent_nothing(browser: Any, server: RunningServer) -> None:
    frames: list[str] = []
    with looking_at(browser, server, "/system", DESKTOP) as page:
        page.on(
            "websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(str(frame)))
        )
        page.goto(server.url + "/live")
        page.get_by_text("Memory: predicted").wait_for()
        wait_for(lambda: page.wait_for_timeout(50) or any("update" in f for f in frames), "news")
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        page.wait_for_timeout(1500)  # what was under way arrives
        frames.clear()
        server.client().chat.completions.create(
            model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Hi again"}]
        )
        page.wait_for_timeout(2500)
        assert [frame for frame in frames if "update" in frame] == []
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        wait_for(
            lambda: page.wait_for_timeout(50) or any("update" in frame for frame in frames), "news again"
        )


def test_a_foreign_page_cannot_open_a_socket(server: RunningServer) -> None:
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    assert server.get(path, headers={"Origin": "http://elsewhere.example"}).status_code == 403
    assert server.get(path, headers={"Origin": server.url}).status_code != 403


def test_with_api_keys_the_console_asks_for_one_and_shows_only_its_requests(
    browser: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    mine, other = new_key(keys, "mine"), new_key(keys, "other")
    with running_server("--api-keys", str(keys)) as server:
        assert server.get("/live").headers["location"] == "/login"
        wrong = httpx.post(server.url + "/login", data={"key": "ck-wrong"})
        assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
        theirs = server.client(other).chat.completions.create(
            model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Hi"}]
        )
        with looking_at(browser, server, "/", DESKTOP) as page:
            page.get_by_label("API key").fill(mine)
            page.get_by_role("button", name="Open the console").click()
            page.get_by_label("Most tokens").fill("4")
            say(page, "Hello!")
            page.wait_for_selector(".foot")
            (cookie,) = [c for c in page.context.cookies() if c["name"] == "cumulo_console"]
            assert cookie["httpOnly"] and mine not in cookie["value"]
            page.goto(server.url + "/requests")
            page.wait_for_selector("tbody tr")
            assert page.locator("tbody tr td:last-child").all_inner_texts() == ["mine"]
            page.goto(f"{server.url}/requests/{theirs.id}")
            page.get_by_text("Nothing is known").wait_for()
            # Stopping the server does not wait for pages that are open.
            assert server.end() == 0
