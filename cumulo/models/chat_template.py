"""ChatTemplate: a model's own jinja2 template that turns messages into a prompt. Used by `Tokenizer`.

What goes wrong in a template is the model's fault (it is no valid template, or tries what it must not) or the
messages' (it refuses them); the errors say which.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from cumulo.errors import InvalidRequest, ModelError
from cumulo.models.template_sandbox import TemplateRefusal, budget, template_environment
from cumulo.models.template_skeleton import Skeletons, contents_are_opaque

Message = Mapping[str, Any]


class ChatTemplate:
    """Compiled on first use: a broken template must not keep a model from plain generation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})  # the template's variables bos_token, eos_token, ...
        self._compiled: jinja2.Template | None = None
        self._skeletons: Skeletons | None = None  # of a template that never looks at contents

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        checked = _checked(messages)
        try:
            if self._skeletons is not None and not tools and not variables:
                filled = self._skeletons.fill(checked, add_generation_prompt)
                if filled is not None:
                    return filled
            return self._run(checked, add_generation_prompt, tools, variables)
        except (InvalidRequest, ModelError):
            raise
        except SecurityError as error:
            raise ModelError(
                f"the model's chat template was stopped: {error}; give another one with --chat-template"
            ) from error
        except TemplateRefusal as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise ModelError(
                "the model's chat template recurses or grows without end; give another with --chat-template"
            ) from error
        except Exception as error:  # any Python error the template's own operations can raise
            raise InvalidRequest(
                f"the model's chat template fails on these messages ({type(error).__name__}: {error}); "
                "check roles and contents, or give another template with --chat-template"
            ) from error

    def _run(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        values = {
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        with budget():
            return self._compile().render({**self.special_tokens, **(variables or {}), **values})

    def _compile(self) -> jinja2.Template:
        if self._compiled is None:
            try:
                self._compiled = template_environment().from_string(self.source)
                if contents_are_opaque(self.source):
                    self._skeletons = Skeletons(self._run)
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"the model's chat template is not valid jinja2 (line {error.lineno}: {error.message}); "
                    "give another one with --chat-template"
                ) from error
        return self._compiled


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain dictionaries; contents given as a list of text parts become one text."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise InvalidRequest("messages is empty; give at least one {'role': 'user', 'content': ...}")
    result = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}] has no role; write {{'role': 'user', 'content': ...}}")
        plain = dict(message)
        content = plain.get("content")
        if isinstance(content, (list, tuple)) and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            plain["content"] = "\n".join(part["text"] for part in content)
        elif content is not None and not isinstance(content, (str, list, tuple)):
            raise InvalidRequest(f"messages[{index}].content must be text, got {type(content).__name__}")
        result.append(plain)
    return result
