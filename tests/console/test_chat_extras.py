"""What keeps people with the chat, in a real browser: queued messages, two models, examples, long lines of code."""

from pathlib import Path
from typing import Any

import pytest

from cumulo.models.files.load import inspect_model
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
    stored_chats,
    text_of,
)
from tests.console.test_chat import put_chat
from tests.models.adapter_files import write_adapter
from tests.serve.running_server import RunningServer, running_server
from tests.serve.tiny_model import save_tiny_model

pytestmark = in_a_browser


def test_a_message_sent_during_an_answer_waits_for_its_end(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        settings(page, max_tokens="3000", temperature="0")
        say(page, LONG_TASK)
        begun(page)
        for text in ("Say A.", "Say B."):
            say(page, text)
            page.get_by_text(f"Queued: {text}").wait_for()
        page.get_by_label("Take out of the queue").first.click()
        page.get_by_text("Queued: Say A.").wait_for(state="detached")
        page.get_by_label("Max tokens").fill("4")
        page.reload()
        page.get_by_text("Queued: Say B.").wait_for()
        page.get_by_label("Stop").click()
        answered(page, 2)
        assert page.locator(".said.user").all_inner_texts() == [LONG_TASK, "Say B."]
        assert page.get_by_text("Queued:").count() == 0 and stored_chats(page)[0]["queued"] == []


def test_what_waits_is_sent_in_order_after_a_restart_and_what_is_typed_stays(
    browser: Any, server: RunningServer
) -> None:
    lost = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Half", "pending": "0" * 24}]
    with looking_at(browser, server, "/", DESKTOP) as page:
        put_chat(page, lost, queued=[{"role": "user", "content": "Say A."}])
        page.get_by_text("The server no longer has this answer").wait_for()
        settings(page, max_tokens="4", temperature="0")
        page.get_by_label("Message", exact=True).fill("Say B.")
        page.reload()
        page.get_by_text("Queued: Say A.").wait_for()
        box = page.get_by_label("Message", exact=True)
        page.wait_for_function("document.querySelector('.ask textarea').value == 'Say B.'")
        box.press("Enter")
        answered(page, 3)
        assert page.locator(".said.user").all_inner_texts() == ["Hi", "Say A.", "Say B."]
        page.reload()
        answered(page, 3)
        assert box.input_value() == ""


@pytest.mark.thorough  # on a busy machine the answer may end before the page is there again
def test_a_growing_answer_is_stored_while_it_grows(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        settings(page, max_tokens="3000", temperature="0")
        say(page, LONG_TASK)
        page.wait_for_function(
            "cumuloChats.load(cumuloChats.list()[0]?.id)?.entries"
            ".some((entry) => entry.pending && entry.content.length > 10)"
        )
        page.reload()
        begun(page)
        page.get_by_label("Stop").click()
        answered(page)
        assert "1" in text_of(page, ".said.assistant") and len(stored_chats(page)[0]["entries"]) == 2


def test_two_models_answer_side_by_side_and_one_answer_is_gone_on_with(browser: Any, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    folder = write_adapter(tmp_path / "poet", inspect_model(model).spec)
    with (
        running_server(str(model), "--lora", f"poet={folder}") as server,
        looking_at(browser, server, "/", DESKTOP) as page,
    ):
        settings(page, max_tokens="5", temperature="0")
        page.get_by_label("Compare with").click()
        page.get_by_role("option", name="poet (adapter)").click()
        say(page, "Sing!")
        answered(page, 2)
        assert page.locator(".compared-answers > div").count() == 2
        assert text_of(page, ".said.assistant .foot").startswith("poet")
        assert page.locator(".foot").first.inner_text().startswith("tiny-random")
        page.reload()
        answered(page, 2)
        page.get_by_role("button", name="Use this answer").click()
        page.locator(".compared-answers > .shown").get_by_text("poet").wait_for()
        say(page, "More!")
        page.locator(".said.user").get_by_text("More!").wait_for()
        answered(page, 2)
        assert page.locator(".foot").first.inner_text().startswith("poet")
        assert [entry.get("parent") for entry in stored_chats(page)[0]["entries"]] == [
            None,
            None,
            0,
            None,
            None,
        ]


def test_an_empty_chat_offers_examples(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", PHONE) as page:
        ready(page)
        page.locator(".examples button").last.click()
        page.locator(".said.user").get_by_text("rainy Sunday").wait_for()
        page.get_by_label("Stop").click()
        answered(page)


def test_a_long_line_of_code_scrolls_in_its_block(browser: Any, server: RunningServer) -> None:
    line = "print(" + ", ".join(f"'word {number}'" for number in range(80)) + ")"
    with looking_at(browser, server, "/", PHONE) as page:
        put_chat(
            page,
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"```python\n{line}\n```"}],
        )
        answered(page)
        code = page.locator(".code-block pre")
        assert code.evaluate("(node) => node.scrollWidth > node.clientWidth && node.clientHeight < 60")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.locator(".thread").evaluate("(node) => node.scrollWidth <= node.clientWidth")
