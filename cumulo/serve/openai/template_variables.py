"""Further variables for a model's chat template: `chat_template_kwargs` and `reasoning_effort`. Used by chat
completions and /tokenize.
"""

import re
from collections.abc import Mapping
from typing import Any

from cumulo.serve.errors import invalid
from cumulo.serve.model_text import ModelText

# What the request says in fields of its own, and what a template's functions are called.
_RESERVED = {
    "messages": "messages", "tools": "tools", "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message", "reasoning_effort": "reasoning_effort",
}  # fmt: skip
_NOT_A_VARIABLE = frozenset(
    (
        "self",
        "documents",
        "chat_template",
        "tokenize",
        "raise_exception",
        "strftime_now",
        "range",
        "namespace",
    )
)
_NO_THOUGHTS = ("none", "minimal")


def template_variables(
    given: Mapping[str, Any] | None, reasoning_effort: str | None, text: ModelText
) -> dict[str, Any]:
    """Raises ApiError for names that are not free: special tokens, too, are the model's and not the caller's."""
    variables = dict(given or {})
    for name in variables:
        param = f"chat_template_kwargs.{name[:64]}"
        if name in _RESERVED and not (name == "reasoning_effort" and reasoning_effort is None):
            raise invalid(f"chat_template_kwargs cannot set {name}: use the field {_RESERVED[name]}", param)
        if name in _NOT_A_VARIABLE or name in text.tokenizer.special_texts or not name.isidentifier():
            raise invalid(
                f"chat_template_kwargs cannot set {name[:64]!r}: it is no free variable of a chat template",
                param,
            )
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
        if reasoning_effort in _NO_THOUGHTS and _names(text, "enable_thinking"):
            variables.setdefault("enable_thinking", False)
    return variables


def _names(text: ModelText, variable: str) -> bool:
    template = text.tokenizer.chat_template
    return template is not None and re.search(rf"\b{variable}\b", template.source) is not None
