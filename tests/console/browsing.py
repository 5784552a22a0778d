"""A real browser for the console's tests: Chromium by playwright, on pages that must end without an error."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from tests.serve.running_server import RunningServer, needs_built_in_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_MISSING = [
    name
    for name, there in (
        ("nicegui", find_spec("nicegui")),
        ("playwright", find_spec("playwright")),
        ("a Chromium browser", CHROMIUM),
    )
    if not there
]
in_a_browser = [
    pytest.mark.long,
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}"),
    needs_built_in_model,
]
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-extensions", "--disable-features=PaintHolding,Translate",
]  # fmt: skip
PATIENCE_MS = 300_000  # for what always comes, on a busy machine later
# Without animations, which take most of a browser's time where no GPU draws.
DESKTOP = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light", "reduced_motion": "reduce"}
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "reduced_motion": "reduce"}
LONG_TASK = "Count from 1 to 2000, one number per line."


_pages: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by browser: the one that tests use in turn


@contextmanager
def looking_at(browser: Any, server: RunningServer, path: str, screen: dict[str, Any]) -> Iterator[Any]:
    """A page that must end without an error in it and without having asked another host for anything. It is the
    browser's only one, and has forgotten the test before: a new one would start another process and compile all
    scripts again, two CPU seconds."""
    page = _pages.pop(browser, None) or browser.new_context().new_page()
    page.set_default_timeout(PATIENCE_MS)
    _set_up(page, **screen)
    complaints: list[str] = []
    own = (server.url, server.url.replace("http", "ws", 1), "data:", "blob:")
    heard = {
        "console": lambda message: message.type == "error" and complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
        "requestfailed": lambda request: complaints.append(f"failed: {request.url}"),
        "request": lambda request: request.url.startswith(own) or complaints.append(request.url),
        "websocket": lambda socket: socket.url.startswith(own) or complaints.append(socket.url),
    }
    for event, hear in heard.items():
        page.on(event, hear)
    try:
        page.goto(server.url + path)
        yield page
        assert complaints == []
    except BaseException:
        page.context.close()
        raise
    for event, hear in heard.items():
        page.remove_listener(event, hear)
    page.evaluate("window.onpagehide = null; sessionStorage.clear()")
    page.goto("about:blank")
    _forget(page, server.url)
    _pages[browser] = page


def _set_up(
    page: Any,
    *,
    viewport: dict[str, int],
    color_scheme: str,
    reduced_motion: str,
    permissions: Sequence[str] = (),
) -> None:
    page.set_viewport_size(viewport)
    page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
    page.context.clear_permissions()
    page.context.grant_permissions(list(permissions))


def _forget(page: Any, origin: str) -> None:
    """What pages of this server have stored in the browser, cookies included."""
    line = page.context.new_cdp_session(page)
    line.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
    line.detach()
    page.context.clear_cookies()


def ready(page: Any) -> None:
    """The page is connected and has read what the browser keeps: settings made from here on are told in order."""
    page.wait_for_function("window.did_handshake")
    page.locator("ul.chats > *").first.wait_for(state="attached")


def settings(page: Any, **numbers: str) -> None:
    ready(page)
    for name, value in numbers.items():
        page.get_by_label(name.replace("_", " ").capitalize(), exact=True).fill(value)


def say(page: Any, text: str) -> None:
    ready(page)
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")


def answered(page: Any, answers: int = 1) -> None:
    """So many answers are shown, all of them are finished, and the browser has stored them."""
    page.wait_for_function(
        "(n) => document.querySelectorAll('.said.assistant .foot').length == n"
        " && document.querySelectorAll('.said.assistant').length == n"
        " && !Object.values(localStorage).some((kept) => kept.includes('\"pending\"'))",
        arg=answers,
    )


def begun(page: Any) -> None:
    """The answer that is being made has a few words already."""
    page.wait_for_function("document.querySelector('.answer-text.waiting')?.innerText.length > 3")
    # Who leaves before the browser has stored the question finds nothing on return.
    page.wait_for_function("Object.values(localStorage).some((kept) => kept.includes('\"pending\"'))")


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).last.inner_text())


def stored_chats(page: Any) -> list[dict[str, Any]]:
    """The conversations in the browser's storage."""
    return list(page.evaluate("cumuloChats.list().map(({id}) => cumuloChats.load(id))"))
