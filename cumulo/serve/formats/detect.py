"""Which formats a model uses, read off its chat template. Called when a model is loaded and per answer."""

from collections.abc import Collection
from typing import Literal

from cumulo.models.text.tokenizer import Tokenizer
from cumulo.serve.formats import hermes, llama3, mistral, reasoning
from cumulo.serve.formats.events import ToolCallParser

# mistral: a JSON list after the marker; mistral_args: the newer name[ARGS]{...}
ToolFormat = Literal["hermes", "llama3", "mistral", "mistral_args"]

_MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3": (llama3.TAG,),
    "mistral": (mistral.MARKER,),
    "mistral_args": (mistral.MARKER, "[ARGS]", "[CALL_ID]"),
}


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """The format in which a model with this chat template was trained to call tools; None: in none we know."""
    if template is None:
        return None
    if hermes.OPEN in template:
        return "hermes"
    if mistral.MARKER in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if llama3.TAG in template or ("<|start_header_id|>" in template and "tools" in template):
        return "llama3"
    return None


def tool_call_parser(tool_format: ToolFormat, tool_names: Collection[str] = ()) -> ToolCallParser:
    """A parser for one answer. `tool_names`: the tools the request offers."""
    if tool_format == "hermes":
        return hermes.HermesParser(tool_names)
    if tool_format == "llama3":
        return llama3.Llama3Parser(tool_names)
    return mistral.MistralParser(tool_names)


def hides_markers(tool_format: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Whether the format's markers are special tokens of this model: then the answer must be decoded with
    `skip_special_tokens=False`, or a parser sees none."""
    return any(special_token(marker, tokenizer) is not None for marker in _MARKERS[tool_format])


def special_token(text: str, tokenizer: Tokenizer) -> int | None:
    """The special token that stands for this text, if there is one."""
    tokens = tokenizer.encode(text)
    return tokens[0] if len(tokens) == 1 and tokens[0] in tokenizer.special_ids else None


def detect_reasoning(template: str | None) -> bool:
    """Whether a model with this chat template thinks between <think> and </think>."""
    return template is not None and reasoning.CLOSE in template


def opens_reasoning(prompt: str) -> bool:
    """Whether the template has written the opening tag already, so that the answer begins as reasoning."""
    return prompt.rstrip().endswith(reasoning.OPEN)
