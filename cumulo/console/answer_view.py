"""AnswerView: one answer on the chat page, while it comes and when it is there. Made by ThreadView."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from cumulo.console.calls_view import CallsView, Results
from cumulo.console.chat.answer import ChatAnswer
from cumulo.console.chat.answer_text import AnswerText
from cumulo.console.words import milliseconds, rate

_ENDS = {
    "length": "stopped at max_tokens",
    "abort": "stopped",
    None: "stopped",
    "content_filter": "filtered",
}


@dataclass(frozen=True, slots=True)
class AnswerActions:
    """What the buttons below an answer do, and the served model: answers of others name theirs."""

    model_name: str
    story: Callable[[str], Any]  # given the request's id
    regenerate: Callable[[], Any]
    send_results: Callable[[Results], Any]


class AnswerView:
    def __init__(self, answer: ChatAnswer, actions: AnswerActions, *, running: bool) -> None:
        self._actions = actions
        with ui.element("article").classes("said assistant") as self._root:
            self._text = AnswerText(answer.text, answer.odds, waiting=running)
            self._calls = ui.label("").classes("streaming-calls mono")

    def grow(self, answer: ChatAnswer) -> None:
        self._text.grow(answer.text, answer.odds)
        calls = "\n".join(f"{call.name}({call.arguments}" for call in answer.calls.values())
        if calls != self._calls.text:
            self._calls.set_text(calls)

    def finish(self, answer: ChatAnswer, *, is_last: bool, results: dict[str, str] | None) -> None:
        """`results`: those of its tool calls, if the conversation went on with them."""
        self._calls.set_text("")
        text = answer.text if answer.odds else laid_out(answer.text)
        self._text.finish(text, answer.odds)
        with self._root:
            if answer.calls:
                CallsView(list(answer.calls.values()), self._actions.send_results, results)
            if answer.problem:
                ui.label(answer.problem).classes("problem")
            with ui.element("div").classes("foot"):
                ui.label(summary(answer, self._actions.model_name)).tooltip(_EXPLAINED)
                self._buttons(answer, is_last)

    def _buttons(self, answer: ChatAnswer, is_last: bool) -> None:
        if answer.text:
            copy_button(answer.text)
        if is_last:
            small_button("Regenerate", "refresh", self._actions.regenerate)
        if answer.request_id:
            small_button("Story", "timeline", lambda: self._actions.story(answer.request_id)).tooltip(
                "Shows what happened to this request: queue, prefix cache, preemptions, every token's time."
            )


_EXPLAINED = "Output tokens, time to first token (TTFT), and decode speed after the first token."


def summary(answer: ChatAnswer, served: str) -> str:
    parts = [answer.model] if answer.model and answer.model != served else []
    parts += [f"{answer.output_tokens:,} token{'' if answer.output_tokens == 1 else 's'}"]
    timed = (
        answer.ttft_s is not None and not answer.calls
    )  # a call is sent as a whole: its times tell nothing
    if answer.ttft_s is not None and timed:
        parts.append(f"TTFT {milliseconds(answer.ttft_s)}")
    if answer.decode_tok_s is not None and timed:
        parts.append(f"{rate(answer.decode_tok_s)} tokens/s")
    if answer.finish_reason not in ("stop", "tool_calls") and not answer.problem:
        parts.append(_ENDS.get(answer.finish_reason, str(answer.finish_reason)))
    return " · ".join(parts)


def laid_out(text: str) -> str:
    """As it is, unless all of it is JSON, which reads better laid out."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return f"```json\n{json.dumps(json.loads(text), indent=2, ensure_ascii=False)}\n```"
    except (ValueError, RecursionError):
        return text


def small_button(label: str, icon: str, action: Callable[[], Any] | None) -> ui.button:
    """An icon with its name for those who hear the page; the tooltip says the rest."""
    button = ui.button(icon=icon, on_click=action).props(f'flat round dense size=sm aria-label="{label}"')
    button.classes("quiet")
    if action is not None:
        with button:
            ui.tooltip(label)
    return button


def copy_button(text: str) -> None:
    button = small_button("Copy", "content_copy", None)
    button.on("click", lambda: ui.notify("Copied", position="top", timeout=900))
    button.on("click", js_handler=f"() => window.cumuloCopy({json.dumps(text)})")
    with button:
        ui.tooltip("Copy")
