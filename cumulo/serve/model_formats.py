"""ModelFormats: how the served model is told of tools, calls them, and thinks. Read off its chat template once."""

from dataclasses import dataclass
from typing import Any

from cumulo.errors import CumuloError
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.serve.formats import ToolFormat, detect_reasoning, detect_tool_format, hides_markers
from cumulo.serve.formats.detect import special_token
from cumulo.serve.formats.reasoning import CLOSE, OPEN

_PROBE = "probe_of_the_template"


@dataclass(frozen=True, slots=True)
class ModelFormats:
    tools: ToolFormat
    template_shows_tools: bool  # False: a system message describes them, and conversations are rewritten
    tool_markers_special: bool  # markers that are special tokens vanish unless the answer shows those
    thinks: bool  # <think> ... </think> comes before its answers
    thought_markers_special: bool

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> "ModelFormats":
        template = tokenizer.chat_template.source if tokenizer.chat_template is not None else None
        own = detect_tool_format(template)
        native = own is not None and _shows_tools(tokenizer)
        tools = own if own is not None and native else "hermes"
        return cls(
            tools=tools,
            template_shows_tools=native,
            tool_markers_special=hides_markers(tools, tokenizer),
            thinks=detect_reasoning(template),
            thought_markers_special=any(special_token(text, tokenizer) is not None for text in (OPEN, CLOSE)),
        )


def _shows_tools(tokenizer: Tokenizer) -> bool:
    """Tried out, not guessed: a template may name `tools` and never write them."""
    tool: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _PROBE,
            "description": "",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    try:
        return _PROBE in tokenizer.apply_chat_template([{"role": "user", "content": ""}], True, [tool])
    except CumuloError:
        return False
