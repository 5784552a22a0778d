"""A chat that fills its context, in a real browser: a meter, turns that are left out, what ended an answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.browsing import (
    DESKTOP,
    answered,
    in_a_browser,
    looking_at,
    ready,
    say,
    settings,
    stored_chats,
    text_of,
)
from tests.console.test_chat import put_chat
from tests.serve.running_server import RunningServer, quick_model, running_server

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    with running_server(quick_model(), "--max-context", "220") as server:
        yield server


def meter(page: Any) -> int:
    return int(page.get_by_role("meter").get_attribute("aria-valuenow"))


def test_a_full_chat_goes_on_without_its_oldest_turns_and_says_so(browser: Any, small: RunningServer) -> None:
    with looking_at(browser, small, "/", DESKTOP) as page:
        settings(page, max_tokens="20", temperature="0")
        for number in range(7):
            say(page, f"Tell me of the number {number}, and of the one that comes next.")
            answered(page, number + 1)
        page.locator(".left-out").get_by_text("no longer sent: the context is full").wait_for()
        assert 0 < meter(page) <= 220
        assert page.locator(".ask-problem").inner_text() == ""
        assert "stopped at max_tokens" in text_of(page, ".foot")

        page.get_by_label("Max tokens").fill("400")
        say(page, "Go on.")
        answered(page, 8)
        assert "the context is full" in text_of(page, ".foot")
        page.get_by_label("Story", exact=True).last.click()
        page.locator(".story-panel").get_by_text("the context is full").first.wait_for()
        page.get_by_label("Close story").click()

        page.get_by_role("button", name="Summarize older turns").click()
        page.get_by_text("The turns above are sent as a summary").wait_for()
        assert any(entry.get("summary") for entry in stored_chats(page)[0]["entries"])
        page.reload()
        answered(page, 8)
        page.get_by_text("The turns above are sent as a summary").wait_for()


def test_a_file_that_does_not_fit_the_context_is_refused_at_once(
    browser: Any, small: RunningServer, tmp_path: Path
) -> None:
    (tmp_path / "large.txt").write_text("many words " * 400)
    (tmp_path / "small.txt").write_text("few words")
    with looking_at(browser, small, "/", DESKTOP) as page:
        ready(page)
        page.locator("#ask-file").set_input_files(str(tmp_path / "large.txt"))
        page.get_by_role("alert").get_by_text("large.txt cannot be attached: the files would take").wait_for()
        page.locator("#ask-file").set_input_files(str(tmp_path / "small.txt"))
        page.locator(".chips .file-chip").get_by_text("small.txt").wait_for()
        assert page.locator(".chips .file-chip").count() == 1


def test_a_conversation_of_a_million_characters_is_kept_whole(browser: Any, small: RunningServer) -> None:
    said = [
        {"role": role, "content": f"{number}: " + "words 🐋 " * 250, "about": {"finish_reason": "stop"}}
        for number in range(300)
        for role in ("user", "assistant")
    ]
    with looking_at(browser, small, "/", DESKTOP) as page:
        put_chat(page, said)
        page.locator(".said.user").get_by_text("299:").wait_for()
        settings(page, max_tokens="4")
        say(page, "Hello!")
        answered(page, 21)
        (kept,) = stored_chats(page)
        assert len(kept["entries"]) == 602 and kept["entries"][0]["content"] == said[0]["content"]
        assert page.locator(".ask-problem").inner_text() == ""


def test_an_answer_that_was_cut_is_continued_in_place(browser: Any, small: RunningServer) -> None:
    with looking_at(browser, small, "/", DESKTOP) as page:
        settings(page, max_tokens="12", temperature="0")
        say(page, "Tell me of the sea.")
        answered(page)
        begins = stored_chats(page)[0]["entries"][1]["content"]
        page.get_by_role("button", name="Continue").click()
        page.locator(".foot").get_by_text("24 tokens").wait_for()
        answered(page)
        (kept,) = stored_chats(page)
        assert len(kept["entries"]) == 2
        assert kept["entries"][1]["content"].startswith(begins) and len(kept["entries"][1]["content"]) > len(
            begins
        )


def test_a_setting_out_of_its_bounds_is_refused_with_the_bounds(browser: Any, small: RunningServer) -> None:
    with looking_at(browser, small, "/", DESKTOP) as page:
        settings(page, temperature="9")
        page.locator(".settings").get_by_text("0 to 2", exact=True).wait_for()
        say(page, "Hello!")
        page.get_by_text("Temperature is 9, but must be 0 to 2.").wait_for()
        assert page.get_by_label("Message", exact=True).input_value() == "Hello!"
        assert stored_chats(page) == []


def test_a_chat_of_200_turns_shows_its_end_at_once_and_the_rest_on_request(
    browser: Any, small: RunningServer
) -> None:
    said = [
        {"role": role, "content": f"{number}: **words** `code`", "about": {"finish_reason": "stop"}}
        for number in range(200)
        for role in ("user", "assistant")
    ]
    with looking_at(browser, small, "/", DESKTOP) as page:
        put_chat(page, said)
        page.locator(".said.user").get_by_text("199:").wait_for()
        assert page.locator(".said").count() == 40
        settings(page, max_tokens="4")
        say(page, "Hello!")
        answered(page, 21)
        earlier = page.locator(".earlier")
        for left, first in (("100 of 360", 130), ("100 of 260", 80), ("100 of 160", 30), ("60", 0)):
            page.get_by_role("button", name=f"Show {left} earlier messages").click()
            page.locator(".said.user").first.get_by_text(f"{first}:").wait_for()
        earlier.wait_for(state="hidden")
        numbers = page.locator(".said.user").all_inner_texts()
        assert numbers == [f"{number}: **words** `code`" for number in range(200)] + ["Hello!"]
        assert len(stored_chats(page)[0]["entries"]) == 402
