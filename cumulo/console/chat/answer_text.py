"""AnswerText: the text of an answer as an element that draws Markdown in the browser. Used by AnswerView.

The browser does the drawing (web/cumulo_markdown.js), so a streamed answer costs this process one short message per
redraw: the characters that are new.
"""

from typing import Any

from nicegui.element import Element

from cumulo.console.chat.answer import Odds


class AnswerText(
    Element,
    component="web/answer_text.js",
    dependencies=["web/cumulo_highlight.js", "web/cumulo_markdown.js"],
):
    def __init__(self, text: str = "", odds: list[Odds] | None = None, *, waiting: bool = False) -> None:
        super().__init__()
        self._props["text"], self._props["tokens"], self._props["waiting"] = text, list(odds or ()), waiting
        self.on("behind", self.update)

    def grow(self, text: str, odds: list[Odds]) -> None:
        """Show more of the same text. What was shown before is not sent again."""
        shown: str = self._props["text"]
        tokens: list[Any] = self._props["tokens"]
        if len(text) == len(shown) and len(odds) == len(tokens):
            return
        self.run_method("append", len(shown), text[len(shown) :], len(tokens), odds[len(tokens) :])
        # Kept whole, unsent: a page that missed something is sent all of it.
        with self._props.suspend_updates():
            self._props["text"], self._props["tokens"] = text, list(odds)

    def finish(self, text: str, odds: list[Odds]) -> None:
        self._props["text"], self._props["tokens"], self._props["waiting"] = text, list(odds), False
        self.update()
