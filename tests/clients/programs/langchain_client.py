"""What an application with LangChain does: `python langchain_client.py URL MODEL`, results as JSON. No imports of
ours: it runs in the clients' own environment."""

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
QUESTION = "What is the capital of France?"


@tool
def temperature(city: Literal["Paris", "Rome"]) -> str:
    """The temperature in a city, in degrees Celsius."""
    return f"21 degrees in {city}"


class Person(BaseModel):
    """A person."""

    name: Literal["Ann", "Bob"]
    age: int


def tool_loop(model: ChatOpenAI) -> dict[str, object]:
    messages: list[object] = [HumanMessage("How warm is it in Paris?")]
    first = model.bind_tools([temperature], tool_choice="temperature", strict=True).invoke(messages)
    messages.append(first)
    for call in first.tool_calls:
        messages.append(ToolMessage(temperature.invoke(call["args"]), tool_call_id=call["id"]))
    last = model.bind_tools([temperature], tool_choice="none").invoke(messages)
    return {"calls": first.tool_calls, "answer": last.content}


def streaming(model: ChatOpenAI) -> dict[str, object]:
    chunks = list(model.stream(QUESTION))
    whole = model.invoke(QUESTION)
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    return {
        "pieces": len([chunk for chunk in chunks if chunk.content]),
        "joined": "".join(chunk.content for chunk in chunks),
        "whole": whole.content,
        "output_tokens": [
            sum(usage["output_tokens"] for usage in used),
            whole.usage_metadata["output_tokens"],
        ],
    }


def streamed_tool_call(model: ChatOpenAI) -> list[object]:
    whole = None
    for chunk in model.bind_tools([temperature], tool_choice="any", strict=True).stream(
        "How warm is it in Rome?"
    ):
        whole = chunk if whole is None else whole + chunk
    return whole.tool_calls


def structured(model: ChatOpenAI) -> dict[str, object]:
    question = "Ann is 42 years old."
    return {
        method: model.with_structured_output(Person, method=method, strict=True).invoke(question).model_dump()
        for method in ("json_schema", "function_calling")
    }


def embedded() -> dict[str, object]:
    # Texts as they are: counting tokens beforehand would need OpenAI's own vocabulary.
    embeddings = OpenAIEmbeddings(base_url=URL, api_key="none", model=MODEL, check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents(["the cat", "the mat", "the cat"])
    return {"same": vectors[0] == vectors[2], "different": vectors[0] != vectors[1], "size": len(vectors[0])}


chat_model = ChatOpenAI(
    base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=64, max_retries=0, stream_usage=True
)
print(
    json.dumps(
        {
            "tool_loop": tool_loop(chat_model),
            "streaming": streaming(chat_model),
            "streamed_tool_call": streamed_tool_call(chat_model),
            "structured": structured(chat_model),
            "embedded": embedded(),
        }
    )
)
