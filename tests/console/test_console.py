"""The console's other pages in a real browser, on a real server, and who may see them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cumulo.serve.access.keys import new_key
from tests.cli.conftest import cumulo_process
from tests.console.browsing import (
    DESKTOP,
    LONG_TASK,
    PHONE,
    answered,
    begun,
    in_a_browser,
    looking_at,
    ready,
    say,
    settings,
    text_of,
)
from tests.serve.running_server import MODEL, RunningServer, quick_model, running_server, wait_for

pytestmark = in_a_browser


@pytest.mark.thorough  # once its row did not come, and nobody knows why
def test_a_stopped_answer_ends_in_the_engine_and_is_found_in_requests(
    browser: Any, server: RunningServer
) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        settings(page, max_tokens="6000", temperature="0")
        say(page, LONG_TASK)
        begun(page)
        page.get_by_label("Stop").click()
        answered(page)
        wait_for(lambda: server.get("/health").json()["running"] == 0, "the engine to be idle", server)
        request_id = page.evaluate("cumuloChats.load(cumuloChats.list()[0].id).entries[1].about.request_id")

        page.get_by_role("link", name="Requests").click()
        page.locator(".filters").get_by_text("abort", exact=True).click()
        row = page.locator(f'tr:has(a[href="/requests/{request_id}"])')
        row.wait_for()
        assert "abort" in row.inner_text()
        assert set(page.locator("tbody .badge").all_inner_texts()) == {
            "abort"
        }  # what ended well is filtered out
        row.locator("a").click()
        page.wait_for_selector("ol.events")
        assert "finished: abort" in text_of(page, "ol.events")


@pytest.mark.long
def test_tools_can_be_entered_called_and_answered(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        settings(page, max_tokens="100", temperature="0")
        page.get_by_text("Tools", exact=True).click()
        box = page.get_by_label("Tools (JSON)")
        box.fill('[{"type": "function"}]')
        problem = page.get_by_text("0.function: Field required")
        problem.wait_for()
        # By key: where the problem appears, it can move the button away from under the pointer.
        page.get_by_role("button", name="Example").press("Enter")
        problem.wait_for(state="detached")
        page.get_by_label("Calls").click()
        page.get_by_role("option", name="Must call get_weather").click()
        say(page, "How is the weather in Paris?")
        answered(page)
        call = page.locator(".call")
        assert "get_weather" in call.inner_text() and "city" in call.inner_text()
        page.get_by_label("Calls").click()
        page.get_by_role("option", name="May not call").click()
        page.get_by_label("Result of get_weather").fill('{"sky": "clear", "celsius": 21}')
        page.get_by_role("button", name="Send result").click()
        answered(page, 2)
        assert page.get_by_role("button", name="Send result").count() == 0, "it was answered already"
        assert page.locator(".problem:visible").count() == 0
        words = text_of(page, ".said.assistant").split()
        assert len(words) > 5, "the model went on"


def test_rejected_calls_appear_with_their_reason_and_two_stories_are_compared(
    browser: Any, server: RunningServer
) -> None:
    asked = [
        server.client()
        .chat.completions.create(
            model=MODEL, max_tokens=count, messages=[{"role": "user", "content": "Compare " * count}]
        )
        .id
        for count in (2, 5)
    ]
    refused = server.post(
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "temperatur": 1},
    )
    assert refused.status_code == 400
    with looking_at(browser, server, "/requests", DESKTOP) as page:
        page.locator(".filters").get_by_text("rejected", exact=True).click()
        row = page.locator("tr.rejected").first
        row.wait_for()
        assert "400" in row.inner_text() and "did you mean 'temperature'?" in row.inner_text()
        page.get_by_label("Filter by id, key or reason").fill("no such words")
        page.get_by_text("No request matches").wait_for()
        page.get_by_label("Filter by id, key or reason").fill("")
        page.locator(".filters").get_by_text("all", exact=True).click()
        for name in asked:
            page.get_by_label(f"Compare {name}").check()
        page.get_by_role("button", name="Compare").click()
        page.locator("table.compared").wait_for()
        assert page.locator("ol.events").count() == 2
        output = page.locator("table.compared tr", has_text="Output, tokens").inner_text().split()
        assert output[-3:] == ["2", "5", "2.50×"]
        # The short id that the table shows is enough for the command.
        page.goto(server.url + "/requests")
        short = page.locator(f'a[href="/requests/{asked[1]}"]').inner_text()
    told = cumulo_process("explain", short, "--server", server.url)
    assert asked[1] in told.out and "finished: length after 5 tokens" in told.out, told


def test_live_names_its_numbers_and_shows_an_hour(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/live", DESKTOP) as page:
        page.get_by_text("cached, reusable").wait_for()
        tiles = page.locator(".tile")
        for term, words in (
            ("TTFT p50", "Time to first token"),
            ("ITL p99", "Inter-token latency"),
            ("Fairness index", "Jain's index"),
            ("KV cache usage", "blocks that running requests hold"),
            ("Engine RSS", "Resident memory"),
        ):
            tile = tiles.filter(has_text=term)
            tile.first.wait_for()
            assert words in str(tile.first.get_attribute("data-tip")), term
        assert page.locator(".tiles").first.locator(".tile").count() % 6 == 0, "the grid has no holes"
        page.get_by_text("1 hour", exact=True).click()
        page.get_by_text("one column is 30 s").wait_for()
        page.get_by_text("1 hour ago").first.wait_for()
        answer = server.client().chat.completions.create(
            model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Hi"}]
        )
        page.get_by_text("1 min", exact=True).click()
        decode = page.locator(".card", has_text="Decode throughput").locator("svg path[fill='var(--accent)']")
        decode.first.wait_for(state="attached")
        assert answer.usage is not None and answer.usage.completion_tokens


def test_system_shows_values_that_apply(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/system", DESKTOP) as page:
        page.get_by_text("max_tokens_per_step").wait_for()
        values = page.locator("table.plain td:last-child").all_inner_texts()
        assert "512.0 MiB" not in values and "0.5 GiB" in values and "float32" in values
        assert not {"auto", "None", "not set", ""} & set(values)
        assert page.get_by_text("temperature 0.1, top_p 0.5").count() == 1, (
            "what the built-in model recommends"
        )


@pytest.mark.thorough
def test_queued_requests_and_an_engine_that_is_not_ready_are_shown(browser: Any) -> None:
    with running_server(quick_model(), "--max-running", "1") as server, ThreadPoolExecutor() as pool:
        body = {"model": MODEL, "messages": [{"role": "user", "content": LONG_TASK}], "max_tokens": 600}
        calls = [pool.submit(server.post, "/v1/chat/completions", body) for _ in range(2)]
        wait_for(lambda: server.sample("cumulo:num_requests_waiting") == 1, "one waiting", server)
        os.kill(server.engine_pid(), signal.SIGSTOP)  # so that they are under way until the page has shown it
        with looking_at(browser, server, "/requests", DESKTOP) as page:
            page.locator("td .badge.queued").wait_for()
            page.locator("td .badge.running").wait_for()
            page.goto(server.url)
            ready(page)
            os.kill(server.engine_pid(), signal.SIGKILL)
            page.get_by_role("status").get_by_text("The engine is being restarted").wait_for()
            page.locator(".ask-status").wait_for(state="hidden")
        assert [call.result().status_code for call in calls] == [200, 200]


def test_the_description_of_the_api_needs_no_other_host(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/docs", PHONE) as page:
        page.locator(".opblock-summary", has_text="/v1/chat/completions").click()
        page.get_by_text("top_logprobs").first.wait_for()
    assert server.get("/redoc").status_code == 404


@pytest.mark.parametrize(
    "screen",
    [
        pytest.param(DESKTOP, id="desktop-light"),
        pytest.param(PHONE, id="phone-dark", marks=pytest.mark.long),
    ],
)
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
        "/fleet": "a single engine",
        "/jobs": "Cluster map",
        "/requests/none": "Nothing is known",
    }
    with looking_at(browser, server, "/system", screen) as page:
        for path, content in expected.items():
            page.goto(server.url + path)
            found = page.get_by_placeholder(content) if path == "/" else page.get_by_text(content)
            found.first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        assert page.evaluate(
            "() => [...document.querySelectorAll('.bar nav a')].at(-1).getBoundingClientRect().right"
            " <= document.querySelector('header.top .q-btn').getBoundingClientRect().left"
        ), "no link is under the button"
        dark = page.evaluate("document.body.classList.contains('body--dark')")
        assert dark == (screen["color_scheme"] == "dark")


def test_a_page_that_is_not_seen_is_sent_nothing(browser: Any, server: RunningServer) -> None:
    frames: list[str] = []
    with looking_at(browser, server, "/system", DESKTOP) as page:
        page.on(
            "websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(str(frame)))
        )

        def news(within_ms: int) -> bool:
            frames.clear()
            page.wait_for_timeout(within_ms)
            return any("update" in frame for frame in frames)

        page.goto(server.url + "/live")
        page.get_by_text("Memory ledger").wait_for()
        wait_for(lambda: news(50), "news")
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

        def silence() -> bool:
            server.client().chat.completions.create(
                model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Hi again"}]
            )
            return not news(3000)  # a page that is seen hears something every second

        wait_for(silence, "silence")  # later, where the server learns late that the page is hidden
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        wait_for(lambda: news(50), "news again")


@pytest.mark.long
def test_a_page_that_does_not_answer_for_a_while_keeps_what_was_entered(
    browser: Any, server: RunningServer
) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        ready(page)
        page.get_by_label("Message", exact=True).fill("not sent yet")
        page.evaluate("() => { const end = Date.now() + 13_000; while (Date.now() < end) {} }")
        page.wait_for_function("window.did_handshake")
        page.get_by_role("button", name="New chat").wait_for()
        assert page.get_by_label("Message", exact=True).input_value() == "not sent yet"


def test_a_foreign_page_cannot_open_a_socket(server: RunningServer) -> None:
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    assert server.get(path, headers={"Origin": "http://elsewhere.example"}).status_code == 403
    assert server.get(path, headers={"Origin": server.url}).status_code != 403


def test_with_api_keys_the_console_asks_for_one_and_shows_only_its_requests(
    browser: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    mine, other = new_key(keys, "mine"), new_key(keys, "other")
    with running_server(quick_model(), "--api-keys", str(keys)) as server:
        assert server.get("/live").headers["location"] == "/login"
        wrong = httpx.post(server.url + "/login", data={"key": "ck-wrong"}, timeout=60)
        assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
        theirs = server.client(other).chat.completions.create(
            model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Hi"}]
        )
        with looking_at(browser, server, "/", DESKTOP) as page:
            page.get_by_label("API key").fill(mine)
            page.get_by_role("button", name="Open the console").click()
            settings(page, max_tokens="4")
            say(page, "Hello!")
            answered(page)
            (cookie,) = [c for c in page.context.cookies() if c["name"] == "cumulo_console"]
            assert cookie["httpOnly"] and mine not in cookie["value"]
            page.goto(server.url + "/requests")
            page.wait_for_selector("tbody tr")
            assert page.locator("tbody tr td:last-child").all_inner_texts() == ["mine"]
            page.goto(f"{server.url}/requests/{theirs.id}")
            page.get_by_text("Nothing is known").wait_for()
            # Only the button logs out: no link, no image, no form of another site.
            assert server.get("/logout", cookies={cookie["name"]: cookie["value"]}).status_code == 405
            foreign = httpx.post(
                server.url + "/logout",
                cookies={cookie["name"]: cookie["value"]},
                headers={"Origin": "http://elsewhere.example"},
                timeout=60,
            )
            assert foreign.status_code == 403
            page.goto(server.url + "/system")
            page.get_by_label("Log out").click()
            page.get_by_label("API key").wait_for()
            assert server.get("/live", cookies={cookie["name"]: cookie["value"]}).status_code == 303
            # Stopping the server does not wait for pages that are open.
            assert server.end() == 0
