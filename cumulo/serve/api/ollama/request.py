"""Requests of Ollama's API, and the chat requests they amount to. What is not supported is refused by name; options
of how Ollama loads a model are ignored with a warning, for they decide no answer here.
"""

import json
import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cumulo.base.quantities import parse_duration_s
from cumulo.errors import ConfigError
from cumulo.serve.api.openai.conversation import as_chat_request
from cumulo.serve.api.openai.schemas import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    ChatRequest,
    Schema,
    StopString,
    Temperature,
    TopP,
)
from cumulo.serve.bodies.strict import Strict
from cumulo.serve.errors import invalid

Entry = dict[str, Any]
_NO_LIMIT = 1 << 31  # tokens: the context ends the answer


class OllamaOptions(Strict):
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
    num_ctx: int | None = Field(None, ge=0, le=1 << 31, description="Not used: the served context applies.")
    ignores_unknown: ClassVar[bool] = True
    ignored = frozenset(
        (
            "draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat",
            "mirostat_eta", "mirostat_tau", "num_batch", "num_gpu", "num_keep", "num_thread", "numa",
            "penalize_newline", "repeat_last_n", "tfs_z", "typical_p", "use_mlock", "use_mmap", "vocab_only",
        )
    )  # fmt: skip

    def fields(self) -> Entry:
        """Of a chat request, or of a completion's."""
        names = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
        )
        limit = self.num_predict or None  # 0: as if it were left out
        return {name: getattr(self, name) for name in names} | {
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": _NO_LIMIT if limit is not None and limit < 0 else limit,
        }


class ModelCall(Strict):
    """What every request has that needs a model in memory."""

    model: str = Field(min_length=1, description="A name of /api/tags; ':latest' may be left out.")
    options: OllamaOptions | None = None
    keep_alive: float | str | None = Field(
        None,
        description="How long the model stays in memory after this request: seconds, or a text such as 5m or 24h; "
        "0: not at all; below 0: until others need its memory.",
    )
    ignores_unknown: ClassVar[bool] = True

    @property
    def keep_s(self) -> float | None:
        """None: the server's own."""
        if self.keep_alive is None:
            return None
        try:
            text = str(self.keep_alive)
            seconds = float(text) if not text.endswith(("s", "m", "h")) else _duration_s(text)
        except (ValueError, ConfigError):
            words = f"keep_alive is {str(self.keep_alive)[:40]!r}: give seconds, or a text such as 5m or 24h"
            raise invalid(words, "keep_alive", "invalid_value") from None
        return math.inf if seconds < 0 else seconds

    @property
    def run_fields(self) -> Entry:
        return self.options.fields() if self.options is not None else {}


def _duration_s(text: str) -> float:
    sign = -1 if text.startswith("-") else 1
    return sign * parse_duration_s(text.removeprefix("-"))


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

    @property
    def form(self) -> Entry | None:
        if not self.format:
            return None
        if self.format == "json":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}

    def chat_fields(self, messages: list[Entry]) -> Entry:
        return self.run_fields | {
            "model": self.model,
            "messages": messages,
            "stream": self.stream is not False,
            "response_format": self.form,
            "chat_template_kwargs": {"enable_thinking": self.think} if isinstance(self.think, bool) else None,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "logprobs": bool(self.logprobs),
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }


# -- /api/chat --------------------------------------------------------------------------------------------
class UsedFunction(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: dict[str, Any] = Field(default_factory=dict)
    ignores_unknown: ClassVar[bool] = True


class UsedTool(Strict):
    function: UsedFunction
    id: str | None = Field(None, max_length=512)
    ignores_unknown: ClassVar[bool] = True


_NO_IMAGES = {"images": "this server reads text only"}


class Said(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[UsedTool], Field(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = Field(None, description="Of a tool's result: which tool.")
    name: str | None = Field(None, description="The older name of tool_name.")
    tool_call_id: str | None = None
    ignores_unknown: ClassVar[bool] = True
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"images": ([],)}
    instead: ClassVar[dict[str, str]] = _NO_IMAGES


class Conversing(AnswerCall):
    messages: Annotated[list[Said], Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list, description="None: the model is loaded, or with keep_alive 0 unloaded."
    )
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="As in OpenAI's API."
    )
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"template": ("",)}

    def as_chat(self) -> ChatRequest:
        messages = _messages(self.messages)
        last = messages[-1]
        fields = self.chat_fields(messages) | {
            "tools": self.tools or None,
            "continue_final_message": last["role"] == "assistant" and "tool_calls" not in last,
        }
        return as_chat_request(fields, "messages")


def _messages(said: list[Said]) -> list[Entry]:
    """Ollama's results name their tool, or come in the order of the calls; OpenAI's name the call."""
    messages = list[Entry]()
    open_calls = list[tuple[str, str]]()  # name and id of those without a result
    for place, one in enumerate(said):
        entry: Entry = {"role": one.role, "content": one.content or ""}
        if one.thinking and one.role == "assistant":
            entry["reasoning_content"] = one.thinking
        if one.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": used.id or f"call_{place}_{number}",
                    "type": "function",
                    "function": {
                        "name": used.function.name,
                        "arguments": json.dumps(used.function.arguments),
                    },
                }
                for number, used in enumerate(one.tool_calls)
            ]
            open_calls += [(call["function"]["name"], call["id"]) for call in entry["tool_calls"]]
        if one.role == "tool":
            name = one.tool_name or one.name
            matching = [call for call in open_calls if name is None or call[0] == name]
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
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "suffix": ("",), "template": ("",), "context": ([],), "images": ([],), "width": (0,), "height": (0,),
        "steps": (0,),
    }  # fmt: skip
    instead: ClassVar[dict[str, str]] = _NO_IMAGES | {"context": "send the conversation to /api/chat"}

    def as_chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return as_chat_request(
            self.chat_fields([*system, {"role": "user", "content": self.prompt}]), "prompt"
        )


# -- /api/embed, /api/embeddings --------------------------------------------------------------------------
class Embedding(ModelCall):
    input: str | Annotated[list[str], Field(max_length=2048)]
    truncate: bool | None = Field(True, description="false: a text longer than the context is refused.")
    dimensions: int | None = Field(None, ge=1, le=1 << 31)


class OlderEmbedding(ModelCall):
    prompt: str
