"""ToolsBox: where one enters the tools a model may call, as JSON. Part of the chat page's controls."""

import json
from typing import Any

from nicegui import ui
from pydantic import TypeAdapter, ValidationError

from cumulo.serve.api.openai.schemas import MAX_TOOLS, Tool

_TOOLS = TypeAdapter(list[Tool])
_CHOICES = {"auto": "Model decides", "required": "Must call one", "none": "May not call"}
_NAMED = "named:"
EXAMPLE = """[{
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string"}},
      "required": ["city"],
      "additionalProperties": false
    }
  }
}]"""


class ToolsProblem(ValueError):
    """The text is no list of tools; the message says what to change."""


def read_tools(text: str) -> list[dict[str, Any]]:
    """A list of tools as the API takes them. One tool without the list, and functions without their wrapping, are
    understood; no text is no tools."""
    if not text.strip():
        return []
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolsProblem(f"not JSON: {error}") from None
    tools = given if isinstance(given, list) else [given]
    if len(tools) > MAX_TOOLS:
        raise ToolsProblem(f"{len(tools)} tools; at most {MAX_TOOLS} are taken")
    wrapped: list[Any] = [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "name" in tool and "function" not in tool
        else tool
        for tool in tools
    ]
    try:
        _TOOLS.validate_python(wrapped)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ToolsProblem(f"{place}: {first['msg']}" if place else str(first["msg"])) from None
    names = [tool["function"]["name"] for tool in wrapped]
    for name in names:
        if names.count(name) > 1:
            raise ToolsProblem(f"two tools are named {name!r}")
    return wrapped


class ToolsBox:
    def __init__(self) -> None:
        with ui.expansion("Tools").classes("tools-box").props("dense"):
            self._text = (
                ui.textarea("Tools (JSON)", validation=_complaint)
                .props('outlined dense autogrow input-class="mono" spellcheck=false')
                .without_auto_validation()
                .on_value_change(self._changed)
            )
            self._choice = ui.select(_CHOICES, value="auto", label="Calls").props("outlined dense")
            self._choice.set_enabled(False)
            ui.button("Example", on_click=lambda: self._text.set_value(EXAMPLE)).props(
                "outline dense no-caps padding='2px 10px'"
            ).classes("quiet")

    def fields(self) -> dict[str, Any]:
        """Their part of a request. ToolsProblem if what was entered is none."""
        tools = read_tools(str(self._text.value or ""))
        if not tools:
            return {}
        chosen = str(self._choice.value)
        named = {"type": "function", "function": {"name": chosen.removeprefix(_NAMED)}}
        return {"tools": tools, "tool_choice": named if chosen.startswith(_NAMED) else chosen}

    def _changed(self) -> None:
        """Once the text is a list of tools, one of them may be chosen."""
        names: list[str] = []
        if self._text.validate():
            names = [tool["function"]["name"] for tool in read_tools(str(self._text.value or ""))]
        options = _CHOICES | {_NAMED + name: f"Must call {name}" for name in names}
        kept = self._choice.value if self._choice.value in options else "auto"
        self._choice.set_options(options, value=kept)
        self._choice.set_enabled(bool(names))


def _complaint(text: str | None) -> str | None:
    try:
        read_tools(text or "")
    except ToolsProblem as problem:
        return str(problem)
    return None
