"""Makes the pictures of docs/console.md and README in a real browser, with servers and a home of its own.
Run it on an otherwise idle machine, in the root of the checkout:

.venv/bin/python docs/record_console.py

Names make only those pictures: `... docs/record_console.py tools jobs`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
CUMULO = str(Path(sys.executable).with_name("cumulo"))
MODEL = "SmolLM2-135M-Instruct"
DESKTOP = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light", "reduced_motion": "reduce"}
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "reduced_motion": "reduce"}
_TRAINS = (
    "[...document.querySelectorAll('tr')].some((row) => /running.*\\b[1-9]\\d* of 40/s.test(row.innerText))"
)
_ANSWERED = "document.querySelectorAll('.said.assistant .foot').length == 1"


def complete(url: str, prompt: str, max_tokens: int) -> None:
    body = json.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    ).encode()
    urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})).read()


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """The address of a server that is ready."""
    with tempfile.NamedTemporaryFile("w") as log:
        server = subprocess.Popen([CUMULO, "serve", "--port", "0", *options], stdout=log, stderr=log)
        try:
            while (found := re.search(r"is ready at (http://[^/]+)/", Path(log.name).read_text())) is None:
                if server.poll() is not None:
                    sys.exit(Path(log.name).read_text())
                time.sleep(0.2)
            yield found[1]
        finally:
            server.terminate()
            server.wait()


def ask(page: Any, text: str) -> None:
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")
    page.wait_for_function(_ANSWERED)


def new_chat(page: Any) -> None:
    page.get_by_text("New chat").first.click()
    page.wait_for_function("document.querySelectorAll('.said').length == 0")


def take(page: Any, name: str, full_page: bool = False) -> None:
    page.mouse.move(700, 700)
    page.wait_for_timeout(1000)  # the tooltip goes
    page.screenshot(path=IMAGES / f"console-{name}.png", full_page=full_page)


def new_page(browser: Any, screen: dict[str, Any]) -> Any:
    page = browser.new_context(**screen).new_page()
    page.set_default_timeout(300_000)
    return page


def opened(browser: Any, url: str, screen: dict[str, Any]) -> Any:
    page = new_page(browser, screen)
    page.goto(url)
    page.locator("ul.chats > *").first.wait_for(state="attached")
    page.get_by_label("Seed", exact=True).fill("1", force=True)  # the same answers every time
    return page


def chat_and_live(browser: Any, url: str) -> None:
    page = opened(browser, url, DESKTOP)
    ask(page, "What is the capital of France?")
    new_chat(page)
    page.get_by_text("Token probabilities").first.click()
    ask(page, "Write a Python function that reverses a string.")
    take(page, "chat")
    page.get_by_label("Story", exact=True).click()
    page.locator(".story-panel ol.events").wait_for()
    take(page, "story")
    page.goto(f"{url}/live")
    page.get_by_text("Memory ledger").wait_for()
    with ThreadPoolExecutor(12) as clients:  # a load to look at
        for number in range(24):
            clients.submit(complete, url, f"Chapter {number}. Once upon a time", 120 + 20 * (number % 5))
            page.wait_for_timeout(1000)  # the charts are drawn once a second
        take(page, "live", full_page=True)


def tools(browser: Any, url: str) -> None:
    page = opened(browser, url, DESKTOP)
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Example").press("Enter")
    page.wait_for_timeout(1000)  # the tools are read, and the choice below knows their names
    page.get_by_label("Calls").click()
    page.get_by_role("option", name="Must call get_weather").click()
    ask(page, "What is the weather in Paris?")
    page.get_by_label("Result of get_weather").fill('{"sky": "clear", "celsius": 21}')
    take(page, "tools")


def phone(browser: Any, url: str) -> None:
    page = opened(browser, url, PHONE)
    ask(page, "Give me three tips for saving water at home.")
    take(page, "phone")


def jobs(browser: Any, url: str) -> None:
    """One job that is done, one that runs, and one that waits for it."""
    launch = [CUMULO, "launch", "examples/job-train.yaml"]
    subprocess.run([*launch, "--wait"], check=True)
    page = new_page(browser, DESKTOP)
    page.goto(f"{url}/jobs")
    names = [
        subprocess.run([*launch, "--key", key], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        for key in ("second", "third")
    ]
    try:
        page.wait_for_function(_TRAINS)
        take(page, "jobs", full_page=True)
    finally:
        for name in reversed(names):  # the waiting one first
            subprocess.run([CUMULO, "cancel", name], check=True)


def fleet(browser: Any, url: str) -> None:
    page = new_page(browser, DESKTOP)
    page.goto(f"{url}/fleet")
    page.get_by_text("3 of 3").wait_for()  # the server is ready when the first replica is
    for number in range(12):  # three documents, each asked about four times
        document = f"Document {number % 3}. " + f"It speaks of number {number % 3}. " * 12
        complete(url, f"{document}Question {number}?", 8)
    page.get_by_text("Routing decisions").wait_for()
    page.wait_for_timeout(1500)  # the page is refreshed once a second
    take(page, "fleet")


RECORDERS = {chat_and_live: (), tools: (), phone: (), jobs: (), fleet: ("--replicas", "3")}


def main(*wanted: str) -> None:
    chosen = [record for record in RECORDERS if not wanted or record.__name__ in wanted]
    with sync_playwright() as player:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for options in dict.fromkeys(RECORDERS[record] for record in chosen):
            with serving(*options) as url:
                for record in chosen:
                    if RECORDERS[record] == options:
                        print(record.__name__, flush=True)
                        record(browser, url)
                        for context in browser.contexts:
                            context.close()
        browser.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers and jobs end, too
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:  # jobs are kept there
        os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        os.environ["HOME"] = home
        main(*sys.argv[1:])
