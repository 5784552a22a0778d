"""Makes docs/images/console-chat.png and console-live.png in a real browser. Run it on an otherwise idle machine:

.venv/bin/cumulo serve --port 8123
.venv/bin/python docs/record_console.py http://127.0.0.1:8123
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
QUESTIONS = ("What is the capital of France?", "Write a Python function that reverses a string.")
_ANSWERED = "document.querySelectorAll('.said.assistant .foot').length == 1"


def ask(page: Any, text: str) -> None:
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")
    page.wait_for_function(_ANSWERED)


def main(url: str) -> None:
    with sync_playwright() as player:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(
            viewport={"width": 1440, "height": 900}, color_scheme="light", reduced_motion="reduce"
        )
        page = context.new_page()
        page.goto(url)
        page.locator("ul.chats > *").first.wait_for(state="attached")
        ask(page, QUESTIONS[0])
        page.get_by_text("New chat").first.click()
        page.wait_for_function("document.querySelectorAll('.said').length == 0")
        page.get_by_text("Token probabilities").first.click()
        ask(page, QUESTIONS[1])
        page.mouse.move(700, 700)
        page.wait_for_timeout(1000)  # the tooltip goes
        page.screenshot(path=IMAGES / "console-chat.png")
        page.goto(f"{url}/live")
        page.get_by_text("Memory ledger").wait_for()
        page.wait_for_timeout(2000)  # the charts are drawn once a second
        page.screenshot(path=IMAGES / "console-live.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
