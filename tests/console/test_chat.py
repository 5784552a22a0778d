"""The chat page in a real browser, on a real server: what is said, kept, changed, shown and refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

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
from tests.serve.running_server import RunningServer, wait_for

pytestmark = in_a_browser
HOSTILE = """<style>body { display: none }</style>
<form action="/logout" method="post"><input name="key"><button>Log in again</button></form>
<div style="position: fixed; inset: 0" onclick="document.title = 'owned'">overlay</div>
<iframe src="/system"></iframe><img src="https://elsewhere.example/p.png" onerror="document.title = 'owned'">
[script](javascript:document.title='owned') [page](data:text/html,owned) [bank](https://elsewhere.example/x)
![picture](https://elsewhere.example/p.png)

**bold** `<code>`

```python
def f(x):  # <script>
    return "a"
```
"""


def idle(server: RunningServer) -> bool:
    return bool(server.get("/health").json()["running"] == 0)


def put_chat(
    page: Any, entries: list[dict[str, Any]], name: str = "kept before", number: int = 1, **more: Any
) -> None:
    """A conversation in the browser's storage, as if it had been held there, shown after a reload."""
    ready(page)
    named = {"id": f"{number:024x}", "title": name, "name": name, "updated_s": number}
    chat = named | {"entries": entries} | more
    page.evaluate("(chat) => { cumuloChats.save(chat); cumuloChats.stay(chat.id) }", chat)
    page.reload()
    ready(page)


def test_an_answer_streams_survives_reload_and_navigation_and_its_story_opens_beside_it(
    browser: Any, server: RunningServer
) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        settings(page, max_tokens="24")
        say(page, "Write a poem about the sea.")
        begun(page)
        early = page.evaluate("document.querySelector('.answer-text')?.innerText ?? ''")
        answered(page)
        answer = text_of(page, ".answer-text")
        assert len(answer) > len(early) > 0
        assert "24 tokens · TTFT" in text_of(page, ".foot") and "max_tokens" in text_of(page, ".foot")

        page.get_by_label("Story", exact=True).click()
        page.locator(".story-panel ol.events").wait_for()
        events = text_of(page, ".story-panel ol.events")
        assert "arrived with" in events and "first token" in events and "finished" in events
        assert page.locator(".said.user").is_visible(), "the chat is still there"
        ttft = text_of(page, ".story-panel .tile:has-text('TTFT') b")
        foot = "".join(text_of(page, ".foot").split())
        assert f"TTFT{''.join(ttft.split())}·" in foot, "one number everywhere"
        page.keyboard.press("Escape")
        page.locator(".story-panel.open").wait_for(state="detached")
        page.get_by_label("Story", exact=True).click()
        page.locator(".story-panel.open").wait_for()
        page.get_by_label("Close story").click()

        page.reload()
        answered(page)
        assert text_of(page, ".answer-text") == answer
        assert page.get_by_label("Max tokens").input_value() == "24", "settings are kept, too"
        page.get_by_role("link", name="Requests").click()
        page.wait_for_selector("table.requests")
        page.get_by_role("link", name="Chat").click()
        answered(page)
        assert text_of(page, ".answer-text") == answer
        assert "Write a poem" in text_of(page, ".said.user")


@pytest.mark.thorough
def test_leaving_the_page_does_not_end_an_answer_and_stop_does(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        settings(page, max_tokens="6000", temperature="0")
        say(page, LONG_TASK)
        begun(page)
        page.goto(server.url + "/system")
        page.get_by_text("Versions").wait_for()
        assert not idle(server)
        page.goto(server.url)
        begun(page)
        early = text_of(page, ".answer-text")
        page.wait_for_function(
            "(n) => document.querySelector('.answer-text')?.innerText.length > n", arg=len(early)
        )
        # Another conversation meanwhile; the answer is still there on return.
        page.get_by_role("button", name="New chat").click()
        page.get_by_text("Talk to").wait_for()
        page.locator(".chat-name").first.click()
        begun(page)
        page.keyboard.press("Escape")
        answered(page)
        assert "stopped" in text_of(page, ".foot")
        wait_for(lambda: idle(server), "the engine to be idle", server)
        (kept,) = stored_chats(page)
        assert kept["entries"][1]["content"].startswith("1") and len(kept["entries"][1]["content"]) > 10


def test_what_a_model_writes_can_only_become_markdown(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        put_chat(page, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": HOSTILE}])
        answered(page)
        assert page.title() == "Chat · Cumulo"
        answer = page.locator(".answer-text")
        for tag in ("style", "form", "input", "iframe", "img", "script", "object", "[onclick]", "[style]"):
            assert answer.locator(tag).count() == 0, tag
        assert answer.locator("button").all_inner_texts() == ["Copy"], "ours, of the code block"
        assert "<form action=" in answer.inner_text(), "shown as the text it is"
        links = answer.locator("a")
        assert {links.nth(n).get_attribute("href") for n in range(links.count())} == {
            "https://elsewhere.example/x",
            "https://elsewhere.example/p.png",
        }
        for number in range(links.count()):
            assert {"noopener", "noreferrer"} <= set(str(links.nth(number).get_attribute("rel")).split())
        assert "bank (elsewhere.example)" in answer.inner_text()
        assert answer.locator("strong").inner_text() == "bold"
        assert answer.locator("code").first.inner_text() == "<code>"
        assert answer.locator(".hl-keyword").all_inner_texts() == ["def", "return"]


def test_a_message_can_be_edited_an_answer_made_again_and_all_versions_stay(
    browser: Any, server: RunningServer
) -> None:
    screen = DESKTOP | {"permissions": ["clipboard-read", "clipboard-write"]}
    with looking_at(browser, server, "/", screen) as page:
        settings(page, max_tokens="6")
        say(page, "Hello!")
        answered(page)
        first = stored_chats(page)[0]["entries"][1]["about"]["request_id"]
        page.get_by_label("Regenerate").click()
        wait_for(
            lambda: stored_chats(page)[0]["entries"][-1].get("about", {}).get("request_id", first) != first,
            "another answer",
        )
        answered(page)
        page.get_by_label("Copy", exact=True).last.click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == stored_chats(page)[0]["entries"][2]["content"]

        say(page, "And a second one.")
        answered(page, 2)
        page.locator(".turn").first.hover()
        page.get_by_label("Edit", exact=True).first.click()
        field = page.get_by_label("Edit message")
        field.fill("Good evening!")
        field.press("Enter")
        answered(page)
        assert page.locator(".said.user").all_inner_texts() == ["Good evening!"]
        # The versions before are kept, also over a reload.
        page.reload()
        answered(page)
        page.locator(".turn").hover()
        page.get_by_label("Earlier version").click()
        answered(page, 2)
        assert page.locator(".said.user").all_inner_texts() == ["Hello!", "And a second one."]
        assert page.locator(".foot .versions").all_inner_texts() == ["chevron_left\n2/2\nchevron_right"]
        page.locator(".foot").get_by_label("Earlier version").click()
        answered(page)
        assert stored_chats(page)[0]["entries"][1]["about"]["request_id"] == first
        assert page.locator(".said.user").all_inner_texts() == ["Hello!"]
        for left in (4, 2, 0):  # what followed on other branches stays
            page.locator(".turn").first.hover()
            page.get_by_label("Delete turn").first.click()
            wait_for(
                lambda left=left: sum(len(one["entries"]) for one in stored_chats(page)) == left,
                "the deletion",
            )
        page.get_by_text("Talk to").wait_for()
        wait_for(lambda: stored_chats(page) == [], "the empty conversation to be forgotten")


def test_token_probabilities_are_shown_on_markdown_while_it_streams(
    browser: Any, server: RunningServer
) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        settings(page, max_tokens="120", temperature="0")
        page.get_by_text("Token probabilities").click()
        # Noted by the page itself: who looks every half second may find the answer finished.
        page.evaluate(
            "new MutationObserver(() => {"
            " window.streamed ||= !!document.querySelector('.answer-text.waiting .token') })"
            ".observe(document.body, {subtree: true, childList: true, attributes: true})"
        )
        say(page, "Write a Python function that adds two numbers.")
        answered(page)
        assert page.evaluate("window.streamed")
        token = page.locator(".code-block .token").first
        token.hover()
        bubble = page.locator(".token-odds")
        bubble.wait_for()
        assert "probability" in bubble.inner_text() and "%" in bubble.inner_text()
        shown = page.locator(".answer-text").inner_text()
        assert "def" in shown and "```" not in shown
        entry = stored_chats(page)[0]["entries"][1]
        assert "".join(odds[0] for odds in entry["odds"]) == entry["content"]


def test_a_refused_message_goes_back_to_where_it_was_written(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", PHONE) as page:
        ready(page)
        page.get_by_role("button", name="Settings").click()
        page.get_by_text("Tools", exact=True).click()
        page.get_by_label("Tools (JSON)").fill("[1")
        page.get_by_text("not JSON").wait_for()
        page.get_by_label("Close settings").click()
        say(page, "Hello!")
        page.get_by_text("The tools cannot be used: not JSON").wait_for()
        assert page.get_by_label("Message", exact=True).input_value() == "Hello!"
        assert page.locator(".said").count() == 0
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Tools (JSON)").fill("")
        page.get_by_label("Close settings").click()
        # The server's own refusal: more tokens than the context holds.
        words = "word " * 9000
        say(page, words)
        page.get_by_role("alert").get_by_text("this model's context holds").wait_for()
        assert page.get_by_label("Message", exact=True).input_value() == words.strip()
        assert page.locator(".said").count() == 0 and stored_chats(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.long
def test_conversations_are_searched_renamed_exported_and_deleted(browser: Any, server: RunningServer) -> None:
    said = [
        {
            "role": "user",
            "content": "Tell me of <b>whales</b>",
            "files": [{"name": "a.txt", "text": "Baleen"}],
        },
        {"role": "assistant", "content": "They sing."},
    ]
    with looking_at(browser, server, "/", DESKTOP) as page:
        put_chat(page, said, "Sea animals")
        put_chat(
            page, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho."}], "Greeting", 2
        )
        names = page.locator(".chat-name > :first-child")
        assert names.all_inner_texts() == ["Greeting", "Sea animals"]
        page.get_by_label("Search conversations").fill("SING")
        page.wait_for_function("document.querySelectorAll('.chat-name').length == 1")
        assert names.all_inner_texts() == ["Sea animals"], "found by what was said in it"
        page.get_by_label("Search conversations").fill("nothing")
        page.get_by_text("No conversation matches.").wait_for()
        page.get_by_label("Search conversations").fill("baleen")
        page.get_by_label("Menu of Sea animals").wait_for()
        page.get_by_label("Menu of Sea animals").click()
        page.get_by_text("Rename", exact=True).click()
        page.get_by_label("Name of the conversation").fill("Whales")
        page.get_by_role("button", name="Rename").click()
        page.get_by_label("Menu of Whales").wait_for()

        for form, name in (("Markdown", "whales.md"), ("JSON", "whales.json")):
            page.get_by_label("Menu of Whales").click()
            with page.expect_download() as download:
                page.get_by_text(f"Export as {form}").click()
            assert download.value.suggested_filename == name
            text = Path(download.value.path()).read_text("utf-8")
            if form == "JSON":
                assert json.loads(text)["entries"] == said
            else:
                assert text.startswith(
                    "# Whales\n\n## User\n\nAttached file: a.txt\n\nTell me of <b>whales</b>\n\n## Assistant"
                    "\n\nThey sing."
                )

        page.get_by_label("Menu of Whales").click()
        page.get_by_text("Delete", exact=True).click()
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_text("No conversation matches.").wait_for()
        assert [chat["name"] for chat in stored_chats(page)] == ["Greeting"]


_DROP = """({name, text}) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  document.dispatchEvent(new DragEvent('drop', {dataTransfer, cancelable: true}));
}"""


@pytest.mark.long
def test_a_text_file_and_a_preset_reach_the_model(
    browser: Any, server: RunningServer, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("alpha\n```\nbeta\n")
    (tmp_path / "picture.bin").write_bytes(bytes(range(256)))
    (tmp_path / "large.txt").write_text("x" * 300_000)
    with looking_at(browser, server, "/", DESKTOP) as page:
        settings(page, max_tokens="4")
        page.get_by_label("Preset", exact=True).click()
        page.get_by_role("option", name="Short answers").click()
        prompt = page.get_by_label("System prompt")
        wait_for(lambda: "two sentences" in prompt.input_value(), "the preset")
        prompt.fill("Answer like a pirate.")
        page.locator(".preset-row").get_by_text("Short answers").wait_for(state="detached")
        page.get_by_label("Save as preset").click()
        page.get_by_label("Name of the preset").fill("Pirate")
        page.get_by_role("button", name="Save", exact=True).click()
        page.get_by_label("Delete preset").wait_for()

        chooser = page.locator("#ask-file")
        for name, reason in (("picture.bin", "not a text file"), ("large.txt", "larger than 200 kB")):
            chooser.set_input_files(str(tmp_path / name))
            page.get_by_role("alert").get_by_text(reason).wait_for()
        page.evaluate(_DROP, {"name": "notes.txt", "text": notes.read_text()})
        page.locator(".chips .file-chip").get_by_text("notes.txt (15 characters, ").wait_for()
        page.get_by_label("Remove notes.txt").click()
        page.locator(".chips .file-chip").wait_for(state="detached")
        chooser.set_input_files(str(notes))
        page.locator(".chips .file-chip").get_by_text("notes.txt (15 characters, ").wait_for()
        say(page, "What is in the file?")
        answered(page)
        assert (
            page.locator(".said.user .file-chip").count() == 1
            and page.locator(".chips .file-chip").count() == 0
        )
        page.get_by_label("Edit", exact=True).click()
        page.get_by_role("button", name="Cancel").click()
        page.locator(".said.user .file-chip").get_by_text("notes.txt (15 characters)").wait_for()
        entry = stored_chats(page)[0]["entries"][0]
        assert entry["files"] == [{"name": "notes.txt", "text": "alpha\n```\nbeta\n"}]
        with_file = stored_chats(page)[0]["entries"][1]["about"]["request_id"]
        tokens = server.get(f"/v1/requests/{with_file}/explain").json()["data"][0]["tokens"]["prompt"]
        assert tokens > 40, "system prompt, file and question are in the prompt"
        page.reload()
        ready(page)
        page.get_by_label("Preset", exact=True).click()
        page.get_by_role("option", name="Pirate").click()
        wait_for(lambda: prompt.input_value() == "Answer like a pirate.", "the preset kept by the browser")


@pytest.mark.long
def test_keys_of_the_keyboard(browser: Any, server: RunningServer) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho."}]
    with looking_at(browser, server, "/", DESKTOP) as page:
        put_chat(page, said)
        settings(page, max_tokens="3")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        page.get_by_text("Keyboard shortcuts", exact=True).wait_for()
        page.keyboard.press("Escape")
        page.locator(".q-dialog").wait_for(state="detached")  # until then, keys are the dialog's
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.press("Control+/")
        page.get_by_text("Keyboard shortcuts", exact=True).wait_for()
        page.keyboard.press("Escape")
        page.locator(".q-dialog").wait_for(state="detached")
        focused = "(label) => document.activeElement?.getAttribute('aria-label') == label"
        page.keyboard.press("Control+k")
        page.wait_for_function(focused, arg="Search conversations")
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        page.wait_for_function(focused, arg="Message")
        page.keyboard.press("n")
        assert page.get_by_label("Message", exact=True).input_value() == "n", "a letter where one types"
        page.get_by_label("Message", exact=True).fill("")
        page.keyboard.press("Escape")
        page.keyboard.press("r")
        wait_for(
            lambda: stored_chats(page)[0]["entries"][-1].get("about", {}).get("output_tokens"), "an answer"
        )
        page.keyboard.press("n")
        page.get_by_text("Talk to").wait_for()


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
        answered(page)
        assert "Hello!" in text_of(page, ".said.user")


@pytest.mark.thorough
def test_a_lost_answer_is_told_and_storage_of_others_is_not_read(browser: Any, server: RunningServer) -> None:
    with looking_at(browser, server, "/", DESKTOP) as page:
        put_chat(
            page,
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "pending": "0" * 24}],
        )
        answered(page)
        page.get_by_text("The server no longer has this answer").wait_for()
        page.evaluate("localStorage.setItem('cumulo:other:chat:' + 'f'.repeat(24), '{\"entries\": []}')")
        page.evaluate(
            "Object.keys(localStorage).forEach((k) => k.includes(':chat:') && localStorage.setItem(k, 'x'))"
        )
        page.reload()
        ready(page)
        page.get_by_text("No conversations yet.").wait_for()
        others = page.evaluate("localStorage.getItem('cumulo:other:chat:' + 'f'.repeat(24))")
        assert (stored_chats(page), others) == ([], "x")
