"""ChatTemplate: a model's own jinja2 template that turns messages into a prompt. Used by `Tokenizer`.

What goes wrong in a template is the model's fault (it is no valid template, or tries what it must not) or the
messages' (it refuses them); the errors say which. Templates run in killable workers (`template_worker`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cumulo.errors import InvalidRequest, ModelError
from cumulo.models.text.template_worker import MAX_SOURCE_CHARACTERS, OTHER, Stopped, render_apart

Message = Mapping[str, Any]

_MOST_STOPS = 2  # of small conversations; after these the template is not run again
_SMALL_CHARACTERS = 100_000


class ChatTemplate:
    """Compiled on first use: a broken template must not keep a model from plain generation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._stops = 0
        self._verdict: str | None = None  # why it is not run any more
        if len(source) > MAX_SOURCE_CHARACTERS:
            self._verdict = (
                f"the model's chat template has {len(source):,} characters; at most {MAX_SOURCE_CHARACTERS:,} are "
                f"accepted: {OTHER}"
            )
            source = ""  # whoever reads it in this process takes no time
        self.source = source
        self.special_tokens = dict(special_tokens or {})  # the template's variables bos_token, eos_token, ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        checked = _checked(messages)
        if self._verdict is not None:
            raise ModelError(self._verdict)
        values = {
            **variables,
            "messages": checked,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_apart(self.source, self.special_tokens, values)
        except Stopped as error:
            self._count_stop(str(error), checked, tools)
            raise

    def _count_stop(self, why: str, messages: list[dict[str, Any]], tools: Any) -> None:
        """A template that cannot even do small conversations will never do: others need not wait for it again.
        One that is slow for large ones only is not judged by them."""
        if sum(len(str(message.get("content"))) for message in messages) < _SMALL_CHARACTERS and (
            not tools or len(str(tools)) < _SMALL_CHARACTERS
        ):
            self._stops += 1
        if self._stops >= _MOST_STOPS:
            self._verdict = f"{why} (it was stopped {self._stops} times and is not run again)"


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain dictionaries; contents given as a list of text parts become one text."""
    if type(messages) is not list and (  # abstract classes are slow to ask
        isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence)
    ):
        raise InvalidRequest("messages must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise InvalidRequest("messages is empty; give at least one {'role': 'user', 'content': ...}")
    result = []
    for index, message in enumerate(messages):
        is_mapping = type(message) is dict or isinstance(message, Mapping)
        if not is_mapping or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}] has no role; write {{'role': 'user', 'content': ...}}")
        plain = dict(message)
        content = plain.get("content")
        if type(content) is str:
            pass
        elif isinstance(content, (list, tuple)) and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            plain["content"] = "\n".join(part["text"] for part in content)
        elif content is not None and not isinstance(content, (str, list, tuple)):
            raise InvalidRequest(f"messages[{index}].content must be text, got {type(content).__name__}")
        result.append(plain)
    return result
