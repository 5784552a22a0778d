"""AnswerView: one answer on the chat page, while it comes and when it is there. Made by ThreadView."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from cumulo.base.quantities import number
from cumulo.console.chat.answer import ChatAnswer, Odds, ShownToolCall
from cumulo.console.chat.conversation import Entry
from cumulo.console.shell import show
from cumulo.console.values import milliseconds

Results = list[dict[str, Any]]  # messages of the role `tool`, in the order of the calls


class CallsView:
    """Shows the calls; `send` is given their results when the person has entered them. `answered`: the results that
    were given already, by the calls' ids; None while they may still be given."""

    def __init__(
        self,
        calls: list[ShownToolCall],
        send: Callable[[Results], Awaitable[None]],
        answered: dict[str, str] | None = None,
    ) -> None:
        self._open = [call for call in calls if call.whole]
        self._send = send
        with ui.element("div").classes("calls"):
            for call in calls:
                with ui.element("div").classes("call"):
                    show(_laid_out(call))
                    if call.whole:
                        field = ui.textarea(f"Result of {call.name}").classes("result")
                        field.props('outlined dense autogrow rows=1 input-class="mono"')
                        if answered is not None:
                            field.set_value(answered.get(call.id, ""))
                            field.set_enabled(False)
            if self._open and answered is None:
                text = "Send result" if len(self._open) == 1 else "Send results"
                button = ui.button(text, icon="reply").on("click", self._sent, js_handler=_COLLECT)
                button.props("unelevated dense no-caps padding='2px 10px'")

    async def _sent(self, event: GenericEventArguments) -> None:
        # The texts come with the event: what was typed last may be told later than the click.
        texts = list(event.args or [])
        if len(texts) == len(self._open):
            pairs = zip(self._open, map(str, texts), strict=True)
            await self._send(
                [{"role": "tool", "tool_call_id": one.id, "content": text} for one, text in pairs]
            )


_COLLECT = (
    "(e) => emit([...e.target.closest('.calls').querySelectorAll('.result textarea')].map((t) => t.value))"
)


def _laid_out(call: ShownToolCall) -> str:
    """The name, and the arguments one per line; as they came if they are no JSON object."""
    title = f'<div class="call-name">calls <b class="mono">{escape(call.name)}</b></div>'
    if not call.whole:
        return f'{title}<pre>{escape(call.arguments)}</pre><span class="problem small">cut short</span>'
    rows = "".join(
        f'<tr><td class="mono soft">{escape(name)}</td><td class="mono">{escape(_value(value))}</td></tr>'
        for name, value in json.loads(call.arguments or "{}").items()
    )
    return f'{title}<table class="plain arguments">{rows}</table>' if rows else title


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2 if isinstance(value, (dict, list)) else None)


class AnswerText(
    Element,
    component="web/answer_text.js",
    dependencies=["web/vendor/markdown_it.mjs", "web/vendor/highlight_js.js", "web/cumulo_markdown.js"],
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


_ENDS = {"abort": "stopped", None: "stopped", "content_filter": "filtered"}


@dataclass(frozen=True, slots=True)
class AnswerActions:
    """What the buttons below an answer do, and the served model: answers of others name theirs."""

    model_name: str
    story: Callable[[str], Any]  # given the request's id
    regenerate: Callable[[], Any]
    resume: Callable[[], Any]
    choose: Callable[[Entry], Any]  # shows the branch of a version
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

    def finish(
        self,
        answer: ChatAnswer,
        entry: Entry,
        versions: list[Entry],
        *,
        is_last: bool,
        results: dict[str, str] | None,
    ) -> None:
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
                served = "" if entry.get("beside") else self._actions.model_name
                ui.label(summary(answer, served)).tooltip(_EXPLAINED)
                self._buttons(answer, entry, versions, is_last)

    def _buttons(self, answer: ChatAnswer, entry: Entry, versions: list[Entry], is_last: bool) -> None:
        version_buttons(entry, versions, self._actions.choose)
        if answer.text:
            copy_button(answer.text)
        if is_last:
            small_button("Regenerate", "refresh", self._actions.regenerate)
        if is_last and answer.text and not answer.calls and answer.finish_reason != "stop":
            resume = ui.button("Continue", on_click=self._actions.resume)
            resume.props("flat dense no-caps size=sm padding='0 6px'").classes("quiet")
        if answer.request_id:
            small_button("Story", "timeline", lambda: self._actions.story(answer.request_id)).tooltip(
                "Shows what happened to this request: queue, prefix cache, preemptions, every token's time."
            )


_EXPLAINED = "Output tokens, time to first token (TTFT), and decode speed after the first token."


def summary(answer: ChatAnswer, served: str) -> str:
    parts = [answer.model] if answer.model and answer.model != served else []
    tokens = answer.earlier_tokens + answer.output_tokens
    parts += [f"{tokens:,} token{'' if tokens == 1 else 's'}"]
    if answer.ttft_s is not None and not answer.calls:  # a call is sent as a whole: its times tell nothing
        parts.append(f"TTFT {milliseconds(answer.ttft_s)}")
        if answer.decode_tok_s is not None:
            parts.append(f"{number(answer.decode_tok_s)} tokens/s")
    if answer.finish_reason not in ("stop", "tool_calls") and not answer.problem:
        ends = _ENDS | {"length": answer.limited_by or "stopped at max_tokens"}
        parts.append(ends.get(answer.finish_reason, str(answer.finish_reason)))
    return " · ".join(parts)


def laid_out(text: str) -> str:
    """The text as it is, unless all of it is JSON, which reads better laid out."""
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


def version_buttons(entry: Entry, versions: list[Entry], choose: Callable[[Entry], Any]) -> None:
    """Which of several versions is shown, and steps to the ones before and behind it."""
    if len(versions) < 2:
        return
    place = next(place for place, one in enumerate(versions) if one is entry)
    with ui.element("span").classes("versions"):
        before, behind = versions[:place][-1:], versions[place + 1 :][:1]
        small_button("Earlier version", "chevron_left", partial(choose, *before)).set_enabled(bool(before))
        ui.label(f"{place + 1}/{len(versions)}").classes("num")
        small_button("Later version", "chevron_right", partial(choose, *behind)).set_enabled(bool(behind))


def copy_button(text: str) -> None:
    button = small_button("Copy", "content_copy", None)
    button.on("click", lambda: ui.notify("Copied", position="top", timeout=900))
    button.on("click", js_handler=f"() => window.cumuloCopy({json.dumps(text)})")
    with button:
        ui.tooltip("Copy")
