"""Knobs: model, system prompt and sampling next to a conversation. An empty field shows the value that applies."""

from collections.abc import Callable, Mapping
from typing import Any

from nicegui import ui

from cumulo.console.answer_view import small_button
from cumulo.console.chat.presets import Presets, read_own
from cumulo.console.tools_box import ToolsBox
from cumulo.engine.decide.params import SamplingParams

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


def model_options(models: list[dict[str, Any]]) -> dict[str, str]:
    """Models as /v1/models lists them, by id; adapters are those that name a parent."""
    return {
        str(model["id"]): f"{model['id']} (adapter)" if model.get("parent") else str(model["id"])
        for model in models
    }


class Knobs:
    def __init__(self, keep: Callable[[str, Any], None], close: Callable[[], Any]) -> None:
        """`keep` stores presets and settings in the browser."""
        self._keep, self._restoring = keep, False
        with ui.element("div").classes("panel-head"):
            ui.html("<h2>Settings</h2>", sanitize=False)
            small_button("Close settings", "close", close).classes("only-phone")
        self._model = ui.select([], label="Model", on_change=self._chosen)
        self._model.props("outlined dense options-dense").set_enabled(False)
        self._wanted_model: str | None = (
            None  # the one that was chosen, also while the server does not list it
        )
        self._presets = Presets(lambda own: keep("presets", own), self._changed)
        self._numbers: dict[str, ui.number] = {}
        with ui.element("div").classes("numbers"):
            for name, label, least, most, step, tooltip in _FIELDS:
                field = ui.number(label, min=least, max=most, step=step, on_change=self._changed)
                field.props("outlined dense stack-label").tooltip(tooltip)
                self._numbers[name] = field
        self._json = ui.switch("JSON output", on_change=self._changed)
        self._json.tooltip('Sends response_format {"type": "json_object"}: the answer is one JSON object.')
        self._odds = ui.switch("Token probabilities", on_change=self._changed)
        self._odds.tooltip("Underlines unlikely tokens; rest the pointer on one to see the alternatives.")
        self._tools = ToolsBox()
        ui.label("Grey values apply where a field is empty.").classes("soft small")

    def show_models(self, models: list[dict[str, Any]]) -> None:
        options = model_options(models)
        kept = self._wanted_model if self._wanted_model in options else next(iter(options), None)
        self._restoring = True
        self._model.set_options(options, value=kept)
        self._restoring = False
        self._model.set_enabled(len(options) > 1)

    def show_effective(self, recommended: Mapping[str, Any]) -> None:
        for name, value in effective(recommended).items():
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

    def request(self, model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of /v1/chat/completions for this conversation. ToolsProblem if the tools are none."""
        system = self._presets.prompt
        first = [{"role": "system", "content": system}] if system else []
        body: dict[str, Any] = {
            "model": self._model.value or model,
            "messages": [*first, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": _ANSWER_TOKENS,
        }
        for name, field in self._numbers.items():
            if field.value is not None:
                body[name] = int(field.value) if name in _WHOLE else float(field.value)
        if self._json.value:
            body["response_format"] = {"type": "json_object"}
        if self._odds.value:
            body["logprobs"], body["top_logprobs"] = True, 5
        return body | self._tools.fields()
