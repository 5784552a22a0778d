"""CallsView: the tool calls of an answer on the chat page, each with a place to type in what the tool returned."""

import json
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from cumulo.console.chat.tool_call import ShownToolCall
from cumulo.console.shell import show

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
                        field = ui.textarea(f"Result of {call.name}").props(
                            'outlined dense autogrow rows=1 input-class="mono"'
                        )
                        field.classes("result")
                        if answered is not None:
                            field.set_value(answered.get(call.id, ""))
                            field.set_enabled(False)
            if self._open and answered is None:
                text = "Send result" if len(self._open) == 1 else "Send results"
                ui.button(text, icon="reply").props("unelevated dense no-caps padding='2px 10px'").on(
                    "click", self._sent, js_handler=_COLLECT
                )

    async def _sent(self, event: GenericEventArguments) -> None:
        # The texts come with the event: what was typed last may be told later than the click.
        texts = list(event.args or [])
        if len(texts) == len(self._open):
            await self._send(
                [
                    {"role": "tool", "tool_call_id": call.id, "content": str(text)}
                    for call, text in zip(self._open, texts, strict=True)
                ]
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
