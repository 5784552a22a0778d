"""What an application with LlamaIndex does: `python llamaindex_client.py URL MODEL`, results as JSON. No imports of
ours: it runs in the clients' own environment."""

import json
import sys
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
llm = OpenAILike(
    api_base=URL, api_key="none", model=MODEL, is_chat_model=True, is_function_calling_model=True, temperature=0,
    max_tokens=64, max_retries=0, context_window=2048,
)  # fmt: skip


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: Literal["Ann", "Bob"]
    age: int


def temperature(city: Literal["Paris", "Rome"]) -> str:
    """The temperature in a city, in degrees Celsius."""
    return f"21 degrees in {city}"


TOOL = FunctionTool.from_defaults(fn=temperature)


def tool_loop() -> dict[str, object]:
    question = ChatMessage(role="user", content="How warm is it in Paris?")
    first = llm.chat_with_tools(
        [TOOL], chat_history=[question], tool_required=True, allow_parallel_tool_calls=False
    )
    calls = llm.get_tool_calls_from_response(first)
    history = [question, first.message]
    for call in calls:
        result = TOOL(**call.tool_kwargs).content
        history.append(
            ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id})
        )
    last = llm.chat(history)
    return {
        "calls": [{"name": call.tool_name, "args": call.tool_kwargs} for call in calls],
        "answer": last.message.content,
    }


def streaming() -> dict[str, object]:
    question = [ChatMessage(role="user", content="What is the capital of France?")]
    deltas = [chunk.delta for chunk in llm.stream_chat(question)]
    return {
        "pieces": len([delta for delta in deltas if delta]),
        "joined": "".join(delta for delta in deltas if delta),
        "whole": llm.chat(question).message.content,
    }


def structured() -> dict[str, object]:
    prompt = PromptTemplate("{text}")
    return {
        "structured_predict": llm.structured_predict(Person, prompt, text="Ann is 42 years old.").model_dump()
    }


def completed() -> str:
    return llm.complete("What is the capital of France?").text


print(
    json.dumps(
        {
            "tool_loop": tool_loop(),
            "streaming": streaming(),
            "structured": structured(),
            "completed": completed(),
        }
    )
)
