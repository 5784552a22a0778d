"""CallsView: the tool calls of an answer on the chat page, each with a place to type in what the tool returned."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from cumulo.console.shell import show

Results = list[dict[str, Any]]  # messages of the role `tool`, in the order of the calls


@dataclass(slots=True)
class Call:
    """Collected from the pieces of a stream."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def take(self, piece: dict[str, Any]) -> None:
        self.id += piece.get("id") or ""
        function = piece.get("function") or {}
        self.name += function.get("name") or ""
        self.arguments += function.get("arguments") or ""

    @property
    def whole(self) -> bool:
        """Whether its arguments can be sent back; an answer that was cut may end in the middle of them."""
        try:
            return isinstance(json.loads(self.arguments or "{}"), dict)
        except ValueError:
            return False

    def message_part(self) -> dict[str, Any]:
        """As an assistant message of the API holds it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments or "{}"},
        }


class CallsView:
    """Shows the calls; `send` is given their results when the person has entered them."""

    def __init__(self, calls: list[Call], send: Callable[[Results], Awaitable[None]]) -> None:
        self._answered = [call for call in calls if call.whole]
        self._send = send
        self._fields: list[ui.textarea] = []
        with ui.element("div").classes("calls") as self._root:
            for call in calls:
                with ui.element("div").classes("call"):
                    show(_laid_out(call))
                    if call.whole:
                        self._fields.append(
                            ui.textarea(f"Result of {call.name}")
                            .props('outlined dense autogrow rows=1 input-class="mono"')
                            .classes("result")
                        )
            self._button: ui.button | None = None
            if self._fields:
                text = "Send result" if len(self._fields) == 1 else "Send results"
                self._button = (
                    ui.button(text, icon="reply")
                    .props("unelevated dense no-caps size=sm")
                    .on("click", self._sent, js_handler=_COLLECT)
                )

    def close(self) -> None:
        """What was entered stays to be read, but the conversation has gone on."""
        for field in self._fields:
            field.set_enabled(False)
        if self._button is not None:
            self._button.set_visibility(False)

    async def _sent(self, event: GenericEventArguments) -> None:
        # The texts come with the event: what was typed last may be told later than the click.
        texts = list(event.args or [])
        if len(texts) == len(self._answered):
            await self._send(
                [
                    {"role": "tool", "tool_call_id": call.id, "content": str(text)}
                    for call, text in zip(self._answered, texts, strict=True)
                ]
            )


_COLLECT = (
    "(e) => emit([...e.target.closest('.calls').querySelectorAll('.result textarea')].map((t) => t.value))"
)


def _laid_out(call: Call) -> str:
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
