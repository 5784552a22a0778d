"""SettingsPanel: model, system prompt and sampling next to a conversation. An empty field shows the value that
applies."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nicegui import ui
from pydantic import TypeAdapter, ValidationError

from cumulo.console.chat.answer_view import small_button
from cumulo.console.shell import asked
from cumulo.engine.decide.params import SamplingParams
from cumulo.serve.api.openai.asked_form import MAX_TOOLS, Tool

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


class SettingsProblem(ValueError):
    """A setting cannot be used; the message says which and what to change."""


class ToolsProblem(SettingsProblem):
    """The text is no list of tools."""


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
        """Their part of a request."""
        try:
            tools = read_tools(str(self._text.value or ""))
        except ToolsProblem as problem:
            raise SettingsProblem(f"The tools cannot be used: {problem}") from None
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


BUILT_IN = {
    "Assistant": "You are a helpful assistant. Answer clearly, and say so when you do not know.",
    "Short answers": "Answer in at most two sentences. No introduction, no repetition of the question.",
    "Programmer": "You are a programmer. Give working code in a fenced block, then explain it briefly.",
    "Editor": "Correct spelling and grammar of the text you are given. Return only the corrected text.",
    "Translator": "Translate the text you are given into English. Return only the translation.",
    "Summary": "Summarise the text you are given in three bullet points.",
}
MOST_OWN = 50
_LONGEST_NAME, _LONGEST_PROMPT = 40, 20_000


def read_own(stored: Any) -> dict[str, str]:
    """The person's own presets as the browser kept them; what is none is left out."""
    if not isinstance(stored, dict):
        return {}
    fits = [
        (name, prompt)
        for name, prompt in stored.items()
        if isinstance(prompt, str) and 0 < len(name) <= _LONGEST_NAME and len(prompt) <= _LONGEST_PROMPT
    ]
    return dict(fits[:MOST_OWN])


class Presets:
    """The system prompt's field and the choice above it. `keep` stores the own ones, `changed` the field."""

    def __init__(self, keep: Callable[[dict[str, str]], None], changed: Callable[[], None]) -> None:
        self._keep, self._changed = keep, changed
        self._own: dict[str, str] = {}
        self._edited: str | None = None  # the own preset whose text was changed since it was chosen
        with ui.element("div").classes("preset-row"):
            self._choice = ui.select(list(BUILT_IN), label="Preset", clearable=True, on_change=self._chosen)
            self._choice.props("outlined dense options-dense")
            small_button("Save as preset", "bookmark_add", self._save)
            self._delete = small_button("Delete preset", "delete_outline", self._remove)
        self._delete.set_visibility(False)
        self._prompt = ui.textarea("System prompt", on_change=self._typed).props("outlined dense autogrow")

    @property
    def prompt(self) -> str:
        return str(self._prompt.value or "").strip()

    def restore(self, own: dict[str, str], prompt: str) -> None:
        self._own = own
        named = next((name for name, text in (BUILT_IN | own).items() if text == prompt), None)
        self._prompt.set_value(prompt)
        self._choice.set_options([*BUILT_IN, *own], value=named)

    def _chosen(self) -> None:
        name = self._choice.value
        self._delete.set_visibility(name in self._own)
        if name is not None:
            self._edited = None
            self._prompt.set_value((BUILT_IN | self._own).get(name, self.prompt))
        elif self.prompt in (BUILT_IN | self._own).values():  # the choice was cleared, and with it its text
            self._prompt.set_value("")

    def _typed(self) -> None:
        """A text that is no longer the preset's is not shown under its name."""
        name = self._choice.value
        if name is not None and self._prompt.value != (BUILT_IN | self._own).get(name):
            self._edited = name if name in self._own else None
            self._choice.set_value(None)
        self._changed()

    async def _save(self) -> None:
        if not self.prompt:
            ui.notify("Write a system prompt first.", position="top")
            return
        name = await asked("Name of the preset", "Save", self._edited or "", _LONGEST_NAME)
        if name in BUILT_IN:
            ui.notify(f"“{name}” is a built-in preset; choose another name.", position="top")
        elif name is not None:
            self._store(self._own | {name: self.prompt}, name)

    def _remove(self) -> None:
        self._store({name: prompt for name, prompt in self._own.items() if name != self._choice.value}, None)

    def _store(self, own: dict[str, str], chosen: str | None) -> None:
        self._own = read_own(own)
        self._choice.set_options([*BUILT_IN, *self._own], value=chosen)
        self._keep(self._own)


_WHOLE = ("top_k", "max_tokens", "seed")
_FIELDS = (  # name, label, least, most, step, tooltip
    ("temperature", "Temperature", 0, 2, 0.1, "0 always takes the most likely token; higher values vary more."),
    ("top_p", "Top-p", 0.01, 1, 0.05, "Samples from the smallest set of tokens whose probability reaches p."),
    ("top_k", "Top-k", 0, 1000, 1, "Samples from the k most likely tokens; 0 is all of them."),
    ("min_p", "Min-p", 0, 1, 0.01, "Drops tokens less likely than this share of the most likely one."),
    ("repetition_penalty", "Repetition penalty", 0.01, 100, 0.05, "Above 1 makes repeated tokens less likely."),
    ("max_tokens", "Max tokens", 1, 1 << 20, 1, "The answer ends after this many tokens at the latest."),
    ("seed", "Seed", 0, (1 << 53) - 1, 1, "The same seed and settings give the same answer again."),
)  # fmt: skip
_ANSWER_TOKENS = 512  # of an answer here, unless the person asks for more


def effective(recommended: Mapping[str, Any]) -> dict[str, str]:
    """What applies where a field is left empty: the model's recommendation, else the API's default."""
    defaults = SamplingParams()
    shown = {
        name: f"{recommended.get(name, getattr(defaults, name)):g}"
        for name, *_ in _FIELDS
        if name not in ("max_tokens", "seed")
    }
    return shown | {"max_tokens": f"{_ANSWER_TOKENS}", "seed": "random"}


def model_options(models: Sequence[str], adapters: Sequence[str]) -> dict[str, str]:
    """What a person chooses from, by the names that requests have."""
    return {name: name for name in models} | {name: f"{name} (adapter)" for name in adapters}


def _outside(least: float, most: float, value: float | None) -> str | None:
    return None if value is None or least <= value <= most else f"{least:g} to {most:g}"


class SettingsPanel:
    def __init__(self, keep: Callable[[str, Any], None], close: Callable[[], Any]) -> None:
        """`keep` stores presets and settings in the browser."""
        self._keep, self._restoring = keep, False
        # What two models that are compared both take where a field is empty: what applies to the first.
        self._alike: dict[str, float] = {}
        with ui.element("div").classes("panel-head"):
            ui.html("<h2>Settings</h2>", sanitize=False)
            small_button("Close settings", "close", close).classes("only-phone")
        self._model = ui.select([], label="Model", on_change=self._chosen)
        self._model.props("outlined dense options-dense").set_enabled(False)
        self._wanted_model: str | None = None  # that was chosen, also while the server does not list it
        self._beside = ui.select([], label="Compare with", on_change=self._chosen, clearable=True)
        self._beside.props("outlined dense options-dense").set_visibility(False)
        self._beside.tooltip("Two models answer each message side by side.")
        self._presets = Presets(lambda own: keep("presets", own), self._changed)
        self._numbers: dict[str, ui.number] = {}
        with ui.element("div").classes("numbers"):
            for name, label, least, most, step, tooltip in _FIELDS:
                # No min and max of the field: it would replace what is typed by them without a word.
                check = partial(_outside, least, most)
                field = ui.number(label, step=step, on_change=self._changed, validation=check)
                field.props("outlined dense stack-label hide-bottom-space").tooltip(tooltip)
                self._numbers[name] = field
        self._json = ui.switch("JSON output", on_change=self._changed)
        self._json.tooltip('Sends response_format {"type": "json_object"}: the answer is one JSON object.')
        self._odds = ui.switch("Token probabilities", on_change=self._changed)
        self._odds.tooltip("Underlines unlikely tokens; rest the pointer on one to see the alternatives.")
        self._tools = ToolsBox()
        ui.label("Grey values apply where a field is empty.").classes("soft small")

    def show_models(self, models: Sequence[str], adapters: Sequence[str]) -> None:
        """The models and the first one's adapters, which come and go."""
        options = model_options(models, adapters)
        kept = self._wanted_model if self._wanted_model in options else models[0]
        if (options, kept) == (self._model.options, self._model.value):
            return
        self._restoring = True
        self._model.set_options(options, value=kept)
        beside = self._beside.value if self._beside.value in options else None
        self._beside.set_options(options, value=beside)
        self._restoring = False
        self._model.set_enabled(len(options) > 1)
        self._beside.set_visibility(len(options) > 1)

    @property
    def model(self) -> str | None:
        chosen: str | None = self._model.value
        return chosen

    @property
    def system(self) -> str:
        return self._presets.prompt

    @property
    def beside(self) -> str | None:
        """The model whose answer is shown next to that of the chosen one."""
        return self._beside.value if self._beside.value != self._model.value else None

    def show_effective(self, recommended: Mapping[str, Any]) -> None:
        shown = effective(recommended)
        self._alike = {name: float(shown[name]) for name in shown.keys() - {"max_tokens", "seed"}}
        for name, value in shown.items():
            self._numbers[name].props(f'placeholder="{value}"')

    def restore(self, presets: Any, settings: Any) -> None:
        """What the browser kept; what it cannot have kept is ignored."""
        settings = settings if isinstance(settings, dict) else {}
        self._restoring = True
        model, system = settings.get("model"), settings.get("system")
        self._wanted_model = self._wanted_model or (model if isinstance(model, str) else None)
        self._presets.restore(read_own(presets), system if isinstance(system, str) else "")
        for name, field in self._numbers.items():
            value = settings.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and field.value is None:
                field.set_value(value)
        self._json.set_value(settings.get("json") is True or self._json.value)
        self._odds.set_value(settings.get("odds") is True or self._odds.value)
        self._restoring = False

    def _chosen(self) -> None:
        if not self._restoring:
            self._wanted_model = self._model.value
            self._changed()

    def _changed(self) -> None:
        if self._restoring:
            return
        settings: dict[str, Any] = {name: field.value for name, field in self._numbers.items()}
        settings |= {"model": self._wanted_model, "system": self._presets.prompt}
        settings |= {"json": self._json.value, "odds": self._odds.value}
        self._keep("settings", settings)

    def request(self, model: str) -> dict[str, Any]:
        """The body of /v1/chat/completions without its messages. SettingsProblem if a field cannot be used."""
        body: dict[str, Any] = {"model": self._model.value or model, "stream": True, "max_tokens": _ANSWER_TOKENS,
                                "stream_options": {"include_usage": True}}  # fmt: skip
        for name, label, least, most, *_ in _FIELDS:
            value = self._numbers[name].value
            if bounds := _outside(least, most, value):
                raise SettingsProblem(f"{label} is {value:g}, but must be {bounds}.")
            if value is None and self.beside is not None:
                value = self._alike.get(name)
            if value is not None:
                body[name] = int(value) if name in _WHOLE else float(value)
        if self._json.value:
            body["response_format"] = {"type": "json_object"}
        if self._odds.value:
            body["logprobs"], body["top_logprobs"] = True, 5
        return body | self._tools.fields()
