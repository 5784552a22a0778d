"""The adapters on the system page and in the chat's settings: what is shown, and the buttons in a real browser."""

from pathlib import Path
from typing import Any

import pytest

from cumulo.console.chat.settings import model_options
from cumulo.console.system_page import adapters_html
from cumulo.models.files.load import inspect_model
from cumulo.serve.adapter_registry import ServedAdapter
from tests.console.browsing import (
    DESKTOP,
    answered,
    in_a_browser,
    looking_at,
    ready,
    say,
    settings,
    text_of,
)
from tests.models.adapter_files import write_adapter
from tests.serve.running_server import running_server
from tests.serve.tiny_model import NAME, save_tiny_model

_CHOSEN = """Object.values(localStorage).some((kept) => kept.includes('"model":"poet"'))"""


def test_adapters_are_shown_with_what_they_do_and_buttons_only_for_operators() -> None:
    loaded = ServedAdapter("poet", "/runs/<poet>", "poet@1", ready=True, rank=8, calls=2, answered=1200)
    leaving = ServedAdapter("old", "/runs/old", "old@2", ready=True, dropped=True, rank=4, calls=1)
    shown = adapters_html([loaded, leaving], most=8, may_operate=True)
    assert "Adapters (2 of 8)" in shown and "/runs/&lt;poet&gt;" in shown and "1,200" in shown
    assert 'aria-label="Drop poet"' in shown and 'aria-label="Drop old"' not in shown
    assert "finishing its last requests" in shown
    assert "<button" not in adapters_html([loaded], most=8, may_operate=False)


def test_a_server_without_adapters_says_how_to_have_some() -> None:
    assert "--max-loras" in adapters_html([], most=0, may_operate=True)
    assert "/v1/load_lora_adapter" in adapters_html([], most=8, may_operate=True)


def test_the_settings_of_a_chat_list_adapters_as_such() -> None:
    assert model_options(["base"], ["poet"]) == {"base": "base", "poet": "poet (adapter)"}


@pytest.mark.thorough
class TestInABrowser:
    pytestmark = in_a_browser

    def test_an_adapter_is_loaded_asked_and_dropped(self, browser: Any, tmp_path: Path) -> None:
        model = save_tiny_model(tmp_path)
        folder = write_adapter(tmp_path / "poet", inspect_model(model).spec)
        with running_server(str(model), "--max-loras", "2") as server:
            with looking_at(browser, server, "/system", DESKTOP) as page:
                page.get_by_label("Name").fill("poet")
                page.get_by_label("Folder on the server").fill(str(folder))
                page.get_by_text("Load adapter").click()
                page.get_by_label("Drop poet").wait_for()
            assert [one["id"] for one in server.get("/v1/models").json()["data"]] == [NAME, "poet"]
            with looking_at(browser, server, "/", DESKTOP) as page:
                settings(page, max_tokens="3")
                page.get_by_label("Model").click()
                page.get_by_text("poet (adapter)").click()
                page.wait_for_function(_CHOSEN)
                page.reload()
                ready(page)
                page.locator(".settings").get_by_text("poet (adapter)").wait_for()
                say(page, "Sing!")
                answered(page)
                assert text_of(page, ".said.assistant .foot").startswith("poet · 3 tokens")
            with looking_at(browser, server, "/system", DESKTOP) as page:
                page.get_by_label("Drop poet").click()
                page.get_by_text("No adapter is loaded").wait_for()
