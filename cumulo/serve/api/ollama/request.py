"""Requests of Ollama's API, and the chat and completion requests they amount to. What is not supported is refused
by name; options of how Ollama loads models are ignored with a warning, for they decide no answer here.
"""

import json
import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cumulo.base.quantities import parse_duration_s
from cumulo.errors import ConfigError
from cumulo.serve.api.openai.asked_form import MAX_CALLS, MAX_STOP_STRINGS, MAX_TOOLS, Schema, StopString
from cumulo.serve.api.openai.conversation import as_chat_request
from cumulo.serve.api.openai.schemas import MAX_MESSAGES, ChatRequest, CompletionRequest, Temperature, TopP
from cumulo.serve.bodies.strict import Strict
from cumulo.serve.errors import invalid

Entry = dict[str, Any]
_NO_LIMIT = 1 << 31  # tokens: the context ends the answer


class Lenient(Strict):
    """Ollama's clients send more than is known here."""

    ignores_unknown: ClassVar[bool] = True


class OllamaOptions(Lenient):
    num_predict: int | None = Field(
        None, ge=-2, le=1 << 31, description="Below 0: up to the end of the context."
    )
    temperature: Temperature | None = None
    top_k: int | None = Field(None, ge=0, le=1 << 31)
    top_p: TopP | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    ignored = frozenset(
        ("draft_num_predict", "main_gpu")
    )  # they are not misspelt, though others are like them

    def fields(self) -> Entry:
        """Of a chat request, or of a completion's."""
        fields = self.model_dump()
        limit = fields.pop("num_predict") or None  # 0: as if it were left out
        fields["max_tokens"] = _NO_LIMIT if limit is not None and limit < 0 else limit
        return fields | {"repetition_penalty": fields.pop("repeat_penalty")}


class ModelCall(Lenient):
    """What every request has that needs a model in memory."""

    model: str = Field(min_length=1, description="A name of /api/tags; ':latest' may be left out.")
    options: OllamaOptions | None = None
    keep_alive: float | str | None = Field(
        None,
        description="How long the model stays in memory after this request: seconds, or a text such as 5m or 24h; "
        "0: not at all; below 0: until others need its memory.",
    )

    @property
    def keep_s(self) -> float | None:
        """None: the server's own."""
        if self.keep_alive is None:
            return None
        text = str(self.keep_alive)[:40]
        try:
            seconds = parse_duration_s(text.removeprefix("-"), "keep_alive", "look like 5m, 24h or 0")
        except ConfigError as error:
            raise invalid(str(error), "keep_alive", "invalid_value") from None
        return math.inf if text.startswith("-") else seconds


class AnswerCall(ModelCall):
    stream: bool | None = Field(True, description="Send the answer as lines of JSON while it is made.")
    format: Literal["", "json"] | Schema | None = Field(
        None, description="json, or the schema of the answer."
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="Thoughts come apart from the answer; false asks the model not to think."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "suffix": ("",), "template": ("",), "context": ([],), "images": ([],),
    }  # fmt: skip
    instead: ClassVar[dict[str, str]] = {
        "images": "this server reads text only",
        "context": "send the conversation to /api/chat",
    }

    def shared_fields(self) -> Entry:
        """What a chat request and a completion request have in common."""
        form: Entry | None = {"type": "json_object"} if self.format else None
        if isinstance(self.format, dict) and self.format:
            form = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        fields = self.options.fields() if self.options is not None else {}
        return fields | {"model": self.model, "stream": self.stream is not False, "response_format": form}

    def chat_of(self, messages: list[Entry], param: str, **more: Any) -> ChatRequest:
        fields = self.shared_fields() | more | {
            "messages": messages,
            "chat_template_kwargs": {"enable_thinking": self.think} if isinstance(self.think, bool) else None,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "logprobs": bool(self.logprobs),
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }  # fmt: skip
        return as_chat_request(fields, param)


# -- /api/chat --------------------------------------------------------------------------------------------
class UsedFunction(Lenient):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: dict[str, Any] = Field(default_factory=dict)


class UsedTool(Lenient):
    function: UsedFunction
    id: str | None = Field(None, max_length=512)


class Said(Lenient):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[UsedTool], Field(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = Field(None, description="Of a tool's result: which tool.")
    name: str | None = Field(None, description="The older name of tool_name.")
    tool_call_id: str | None = None
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"images": ([],)}
    instead = AnswerCall.instead


class Conversing(AnswerCall):
    messages: Annotated[list[Said], Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list, description="None: the model is loaded, or with keep_alive 0 unloaded."
    )
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="As in OpenAI's API."
    )

    def as_chat(self) -> ChatRequest:
        last = self.messages[-1]
        continued = last.role == "assistant" and not last.tool_calls
        return self.chat_of(
            _messages(self.messages), "messages", tools=self.tools or None, continue_final_message=continued
        )


def _messages(said: list[Said]) -> list[Entry]:
    """Ollama's results name their tool, or come in the order of the calls; OpenAI's name the call."""
    messages = list[Entry]()
    open_calls = list[tuple[str, str]]()  # name and id of those without a result
    for place, one in enumerate(said):
        entry: Entry = {"role": one.role, "content": one.content or ""}
        if one.thinking and one.role == "assistant":
            entry["reasoning_content"] = one.thinking
        for number, used in enumerate(one.tool_calls or ()):
            call = {"name": used.function.name, "arguments": json.dumps(used.function.arguments)}
            call_id = used.id or f"call_{place}_{number}"
            entry.setdefault("tool_calls", []).append({"id": call_id, "function": call})
            open_calls.append((used.function.name, call_id))
        if one.role == "tool":
            name = one.tool_name or one.name
            matching = [call for call in open_calls if name in (None, call[0])]
            if one.tool_call_id is None and matching:
                open_calls.remove(matching[0])
            entry["tool_call_id"] = one.tool_call_id or (matching[0][1] if matching else f"call_{place}")
        messages.append(entry)
    return messages


# -- /api/generate ----------------------------------------------------------------------------------------
class Generating(AnswerCall):
    prompt: str = Field("", description="Empty: the model is loaded, or with keep_alive 0 unloaded.")
    system: str | None = None
    raw: bool | None = Field(
        None, description="true: the prompt is sent to the model without its chat template."
    )

    def as_chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat_of([*system, {"role": "user", "content": self.prompt}], "prompt")

    def as_completion(self) -> CompletionRequest:
        if self.system:
            raise invalid("raw leaves out the chat template: put system into the prompt", "system")
        fields = self.shared_fields()
        fields |= {"prompt": self.prompt, "max_tokens": fields.get("max_tokens") or _NO_LIMIT}
        return CompletionRequest(**fields, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


# -- /api/embed, /api/embeddings --------------------------------------------------------------------------
class Embedding(ModelCall):
    input: str | Annotated[list[str], Field(max_length=2048)]
    truncate: bool | None = Field(True, description="false: a text longer than the context is refused.")
    dimensions: int | None = Field(None, ge=1, le=1 << 31)


class OlderEmbedding(ModelCall):
    prompt: str
