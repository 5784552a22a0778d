"""AnswerView: one answer on the chat page, while it comes and when it is there. Fed with the API's events."""

import json
import math
import time
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

from nicegui import ui

from cumulo.console.calls_view import Call, CallsView, Results
from cumulo.console.shell import show

_FEW_WORDS = {"stop": "", "length": "reached the most tokens", None: "stopped"}


class AnswerView:
    """Plain text while it streams, which costs little; at the end Markdown, JSON, or tokens with their odds."""

    def __init__(self, with_odds: bool, send_results: Callable[[Results], Awaitable[None]]) -> None:
        self.text = ""
        self._with_odds, self._send_results = with_odds, send_results
        self._tokens: list[dict[str, Any]] = []
        self._calls: dict[int, Call] = {}
        self._calls_view: CallsView | None = None
        self._id = ""
        self._output_tokens = 0
        self._finish_reason: str | None = None
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        with ui.element("div").classes("said assistant") as self._root:
            self._streaming = ui.label("").classes("streaming waiting")

    def take(self, event: dict[str, Any]) -> None:
        self._id = event.get("id", self._id)
        if event.get("usage"):
            self._output_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            delta = choice["delta"]
            piece = delta.get("content") or ""
            if (piece or delta.get("tool_calls")) and self._first_s is None:
                self._first_s = time.monotonic()
            self.text += piece
            self._output_tokens += 1
            self._finish_reason = choice["finish_reason"]
            for call in delta.get("tool_calls") or ():
                self._calls.setdefault(call["index"], Call()).take(call)
            if choice.get("logprobs"):
                self._tokens.extend(choice["logprobs"]["content"])

    def draw(self) -> None:
        calls = "\n".join(f"{call.name}({call.arguments}" for call in self._calls.values())
        self._streaming.set_text(f"{self.text}\n{calls}".strip() if calls else self.text)

    def message(self) -> dict[str, Any]:
        """The answer as the conversation's next message. Calls that were cut cannot be said again."""
        calls = [call.message_part() for call in self._calls.values() if call.whole]
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        return said | {"tool_calls": calls} if calls else said

    def close(self) -> None:
        """The conversation goes on: results of its calls are no longer taken."""
        if self._calls_view is not None:
            self._calls_view.close()

    def fail(self, message: str) -> None:
        self._end()
        with self._root:
            ui.label(message).classes("problem")

    def finish(self) -> None:
        self._end()
        with self._root:
            show(self._foot(), "foot")

    def _end(self) -> None:
        self._streaming.delete()
        with self._root:
            if self._with_odds and self._tokens:
                show("".join(map(_token, _whole_characters(self._tokens))))
            elif self.text.strip():
                ui.markdown(_markdown(self.text), extras=["fenced-code-blocks", "tables", "cuddled-lists"])
            if self._calls:
                self._calls_view = CallsView(list(self._calls.values()), self._send_results)

    def _foot(self) -> str:
        now_s = time.monotonic()
        parts = [f"{self._output_tokens} tokens"]
        if self._first_s is not None:
            parts.append(f"first after {(self._first_s - self._began_s) * 1e3:,.0f} ms")
            if self._output_tokens > 1 and now_s > self._first_s:
                parts.append(f"{(self._output_tokens - 1) / (now_s - self._first_s):.1f} tokens/s")
        if self._finish_reason not in ("stop", "tool_calls"):
            parts.append(_FEW_WORDS.get(self._finish_reason, str(self._finish_reason)))
        link = f' · <a href="/requests/{escape(self._id)}">its story</a>' if self._id else ""
        return escape(" · ".join(parts)) + link


def _markdown(text: str) -> str:
    """As it is, unless all of it is JSON, which reads better laid out."""
    pretty = _pretty(text)
    return text if pretty is text else f"```json\n{pretty}\n```"


def _pretty(text: str) -> str:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text


def _whole_characters(tokens: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Tokens in groups that spell whole characters: some characters take several tokens."""
    groups: list[list[dict[str, Any]]] = []
    pending: list[dict[str, Any]] = []
    for entry in tokens:
        pending.append(entry)
        if _spelling(pending) is not None or len(pending) == 4:  # no character has more bytes than that
            groups.append(pending)
            pending = []
    return [*groups, pending] if pending else groups


def _spelling(group: list[dict[str, Any]]) -> str | None:
    try:
        return b"".join(bytes(entry["bytes"]) for entry in group).decode()
    except UnicodeDecodeError:
        return None


def _token(group: list[dict[str, Any]]) -> str:
    """Underlined the more the less likely it was; the alternatives come up when the pointer rests on it."""
    spelling = _spelling(group)
    text = spelling if spelling is not None else "".join(entry["token"] for entry in group)
    share = min(math.exp(entry["logprob"]) for entry in group)
    surprise = f"border-color: color-mix(in srgb, #c08a3e {100 * (1 - share):.0f}%, transparent)"
    title = "\n\n".join(map(_odds, group))
    return f'<span class="token" title="{escape(title)}" style="{surprise}">{escape(text)}</span>'


def _odds(entry: dict[str, Any]) -> str:
    others = "\n".join(f"{math.exp(o['logprob']):6.1%}  {o['token']!r}" for o in entry["top_logprobs"])
    return f"{math.exp(entry['logprob']):.1%} likely (log-probability {entry['logprob']:.2f})\n{others}"
