"""One server for all tests of the console, and a browser for each file of them.

Playwright keeps an event loop in the thread that started it, so the browser must be gone before other files run.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.console.browsing import ARGUMENTS, CHROMIUM
from tests.serve.running_server import RunningServer, running_server


@pytest.fixture(scope="package")
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
