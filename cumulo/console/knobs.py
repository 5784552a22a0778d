"""Knobs: the sampling controls beside a conversation. What is left empty takes the model's own recommendation."""

from collections.abc import Callable, Mapping
from typing import Any

from nicegui import ui

from cumulo.console.tools_box import ToolsBox


class Knobs:
    def __init__(self, recommended: Mapping[str, Any], close: Callable[[], Any]) -> None:
        # Where nothing is recommended, as `cumulo chat`: OpenAI's default of 1 is wild for a small model.
        temperature = None if "temperature" in recommended else 0.2
        with ui.element("div").classes("row items-center justify-between no-wrap"):
            ui.html("<h2>Sampling</h2>", sanitize=False)
            ui.button(icon="close", on_click=close).props('flat round dense aria-label="Close"').classes(
                "only-phone quiet"
            )
        self._system = ui.textarea("System message").props("outlined dense autogrow")
        self._numbers = {
            "temperature": _number("Temperature", 0, 2, 0.1, temperature),
            "top_p": _number("Top-p", 0.01, 1, 0.05),
            "top_k": _number("Top-k", 0, 1000, 1),
            "min_p": _number("Min-p", 0, 1, 0.01),
            "repetition_penalty": _number("Repetition penalty", 0.01, 100, 0.05),
            "max_tokens": _number("Most tokens", 1, 1 << 20, 1, 512),
            "seed": _number("Seed", 0, (1 << 53) - 1, 1),
        }
        self._json = ui.switch("Answer in JSON")
        self._odds = ui.switch("Token probabilities")
        self._tools = ToolsBox()
        ui.label("Empty fields take what the model's authors recommend.").classes("soft small")

    def request(self, model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of /v1/chat/completions for this conversation. ToolsProblem if the tools are none."""
        system = (self._system.value or "").strip()
        first = [{"role": "system", "content": system}] if system else []
        body: dict[str, Any] = {
            "model": model,
            "messages": [*first, *filter(_says_something, messages)],  # not what failed
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name, field in self._numbers.items():
            if field.value is not None:
                whole = name in ("top_k", "max_tokens", "seed")
                body[name] = int(field.value) if whole else float(field.value)
        if self._json.value:
            body["response_format"] = {"type": "json_object"}
        if self._odds.value:
            body["logprobs"], body["top_logprobs"] = True, 5
        return body | self._tools.fields()


def _says_something(message: dict[str, Any]) -> bool:
    return bool(message["content"] or message.get("tool_calls") or message["role"] == "tool")


def _number(label: str, least: float, most: float, step: float, value: float | None = None) -> ui.number:
    return ui.number(label, min=least, max=most, step=step, value=value).props("outlined dense clearable")
