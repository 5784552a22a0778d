"""Answers against the models of OpenAI's and Anthropic's own clients, field by field: what must be there is there
and of its type, and what may be left out is left out instead of being null."""

import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]
# Always there, and null in the APIs' own references where there is nothing to say.
NULL_THERE_TOO = (
    "choices.logprobs", "choices.logprobs.refusal", "choices.finish_reason", "choices.message.content",
    "choices.message.refusal", "stop_reason", "stop_sequence", "usage", "completed_at", "error", "instructions",
    "incomplete_details", "previous_response_id", "reasoning.effort", "reasoning.summary", "temperature", "top_p",
    "user", "tools.strict",
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
FUNCTION = {"name": "note", "description": "Take a note.", "parameters": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]
ASKED: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk, {"messages": HI}),
    ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk,
     {"messages": HI, "logprobs": True, "top_logprobs": 2, "stop": ["e"]}),
    ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk,
     {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    ("/v1/completions", Completion, None, {"prompt": "Hi", "logprobs": 1}),
    ("/v1/embeddings", CreateEmbeddingResponse, None, {"input": ["Hi"]}),
    ("/v1/messages", Message, RawMessageStreamEvent, {"messages": HI}),
    ("/v1/messages", Message, RawMessageStreamEvent,
     {"messages": HI, "tools": [{"name": "note", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}),
    ("/v1/responses", Response, ResponseStreamEvent, {"input": "Hi"}),
    ("/v1/responses", Response, ResponseStreamEvent,
     {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}),
]  # fmt: skip


def nulls(shown: Any, model: Any, path: str = "") -> Iterator[str]:
    """Fields that are null where the client's model lets them be left out."""
    if isinstance(model, pydantic.BaseModel) and isinstance(shown, dict):
        for name, field in type(model).model_fields.items():
            key = field.alias or name
            where = f"{path}.{key}" if path else key
            if key in shown and shown[key] is None and not field.is_required():
                yield where
            yield from nulls(shown.get(key), getattr(model, name), where)
    elif isinstance(model, list) and isinstance(shown, list):
        for one, typed in zip(shown, model, strict=True):
            yield from nulls(one, typed, path)


def as_published(kind: Any, shown: dict[str, Any]) -> None:
    model: Any = pydantic.TypeAdapter(kind).validate_python(shown)
    told = {
        path.removeprefix("response.").removeprefix("message.").removeprefix("delta.")
        for path in nulls(shown, model)
    }
    assert told <= set(NULL_THERE_TOO), shown


@pytest.mark.parametrize(("path", "whole", "event", "asked"), ASKED)
def test_answers_have_the_published_fields(
    server: RunningServer, path: str, whole: Any, event: Any, asked: dict[str, Any]
) -> None:
    length = {"max_output_tokens": 40} if path == "/v1/responses" else {"max_tokens": 40}
    body = {"model": MODEL, **asked} | ({} if path == "/v1/embeddings" else length | {"temperature": 0})
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    as_published(whole, answer.json())
    if event is None:
        return
    lines = server.post(path, body | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events
    for one in events:
        if one.get("type") != "ping":  # which Anthropic's client handles before it reads events
            as_published(event, one)
