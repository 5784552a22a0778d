"""What an application with litellm does: `python litellm_client.py URL MODEL`, results as JSON. No imports of ours:
it runs in the clients' own environment."""

import json
import sys

import litellm

URL, MODEL = sys.argv[1:3]
litellm.telemetry = False
COMMON = {
    "model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 64,
    "num_retries": 0,
}  # fmt: skip
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city, in degrees Celsius.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tool_loop() -> dict[str, object]:
    messages: list[object] = [{"role": "user", "content": "How warm is it in Paris?"}]
    chosen = {"type": "function", "function": {"name": "temperature"}}
    first = (
        litellm.completion(**COMMON, messages=messages, tools=[TOOL], tool_choice=chosen).choices[0].message
    )
    # Sent back as litellm gives it, with the fields it adds for other providers.
    message = {**first.model_dump(), "provider_specific_fields": {"refusal": None}}
    messages.append(message)
    for call in first.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"21 degrees in {city}"})
    last = litellm.completion(**COMMON, messages=messages, tools=[TOOL], tool_choice="none")
    return {
        "calls": [
            {"name": call.function.name, "args": json.loads(call.function.arguments)}
            for call in first.tool_calls
        ],
        "answer": last.choices[0].message.content,
    }


def streaming() -> dict[str, object]:
    options = {"include_usage": True}
    chunks = list(litellm.completion(**COMMON, messages=QUESTION, stream=True, stream_options=options))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    whole = litellm.completion(**COMMON, messages=QUESTION)
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    return {
        "pieces": len([text for text in texts if text]),
        "joined": "".join(text for text in texts if text),
        "whole": whole.choices[0].message.content,
        "output_tokens": [rebuilt.usage.completion_tokens, whole.usage.completion_tokens],
    }


def structured() -> dict[str, object]:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    question = [{"role": "user", "content": "Ann is 42 years old."}]
    answer = litellm.completion(**COMMON, messages=question, response_format=form)
    return {"json_schema": json.loads(answer.choices[0].message.content)}


def cached_parts() -> str:
    """Parts of a message with Anthropic's marks for caching, which litellm passes on."""
    part = {"type": "text", "text": "What is the capital of France?", "cache_control": {"type": "ephemeral"}}
    answer = litellm.completion(**COMMON, messages=[{"role": "user", "content": [part]}])
    return answer.choices[0].message.content


def embedded() -> dict[str, object]:
    answer = litellm.embedding(
        model=f"openai/{MODEL}", api_base=URL, api_key="none", input=["the cat", "the mat", "the cat"],
        encoding_format="float",
    )  # fmt: skip
    vectors = [item["embedding"] for item in answer.data]
    return {"same": vectors[0] == vectors[2], "different": vectors[0] != vectors[1], "size": len(vectors[0])}


def reranked() -> list[int]:
    """Through litellm's client for servers with vLLM's /rerank."""
    answer = litellm.rerank(
        model=f"hosted_vllm/{MODEL}", api_base=URL.removesuffix("/v1"), api_key="none", query="the cat",
        documents=["a dog in the garden", "the cat", "12345"], top_n=2,
    )  # fmt: skip
    return [result["index"] for result in answer.results]


print(
    json.dumps(
        {
            "tool_loop": tool_loop(),
            "streaming": streaming(),
            "structured": structured(),
            "cached_parts": cached_parts(),
            "embedded": embedded(),
            "reranked": reranked(),
        }
    )
)
