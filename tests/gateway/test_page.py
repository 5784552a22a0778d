"""The gateway's page, in a real browser, in front of a server that fails on every request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.browsing import ARGUMENTS, CHROMIUM, DESKTOP, looking_at
from tests.gateway.running_gateway import OPERATOR, RunningGateway, key_file
from tests.gateway.test_operation import ASK, other_server

pytest.importorskip("playwright")
pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        running = player.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


def states(gateway: RunningGateway) -> list[str]:
    return [replica["state"] for replica in gateway.get("/v1/fleet").json()["replicas"]]


def test_the_page_shows_replicas_and_failures_and_drains_with_the_operators_key(
    browser: Any, tmp_path: Path
) -> None:
    with other_server() as (url, _):
        gateway = RunningGateway(url, "--fleet-key-file", key_file(tmp_path), "--retries", "0")
        try:
            assert gateway.post("/v1/chat/completions", ASK).status_code == 500
            totals = gateway.get("/v1/fleet").json()["totals"]
            assert totals["answered"] == 1 and totals["in_flight"] == 0
            policy = gateway.get("/").headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe-inline" not in policy
            with looking_at(browser, gateway, "/", DESKTOP) as page:
                row = page.locator("#replicas tr")
                row.get_by_text(url.removeprefix("http://")).wait_for()
                assert row.count() == 1 and row.locator("td").nth(5).inner_text() == "1"  # requests
                page.evaluate("key => sessionStorage.setItem('key', key)", OPERATOR)
                page.get_by_role("button", name="Drain").click()
                row.locator("td.draining").wait_for()
                page.get_by_role("button", name="Undrain").wait_for()
            assert states(gateway) == ["draining"]
        finally:
            gateway.end()


def test_without_the_key_the_page_asks_for_it(browser: Any, tmp_path: Path) -> None:
    with other_server() as (url, _):
        gateway = RunningGateway(url, "--fleet-key-file", key_file(tmp_path))
        context = browser.new_context(**DESKTOP)
        try:
            page = context.new_page()
            page.goto(gateway.url)
            page.get_by_role("button", name="Drain").click()
            page.get_by_label("Key").wait_for()
            assert states(gateway) == ["ready"]
            page.get_by_label("Key").fill(OPERATOR)
            page.get_by_role("button", name="Use").click()
            page.get_by_role("button", name="Drain").click()
            page.get_by_role("button", name="Undrain").wait_for()
            assert states(gateway) == ["draining"]
        finally:
            context.close()
            gateway.end()
