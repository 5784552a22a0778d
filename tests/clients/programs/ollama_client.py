"""Ollama's own client against the server: python ollama_client.py URL MODEL. Prints one line of JSON."""

import json
import sys
from typing import Any

import ollama

url, model = sys.argv[1].removesuffix("/v1"), sys.argv[2]
client = ollama.Client(host=url)
found: dict[str, Any] = {}

# -- what there is
(listed,) = client.list().models
found["listed"] = [
    listed.model,
    listed.details.family,
    listed.details.quantization_level,
    int(listed.size or 0),
]
shown = client.show(model)
found["shown"] = [
    shown.details.format,
    sorted(shown.capabilities or []),
    shown.modelinfo["llama.context_length"],
]
found["template"] = "<|im_start|>" in (shown.template or "")
(running,) = client.ps().models
found["running"] = [running.model, running.context_length, running.expires_at is not None]

# -- chat
question = [{"role": "user", "content": "What is the capital of France?"}]
options = {"temperature": 0, "num_predict": 24, "seed": 1, "num_ctx": 4096, "top_k": 40, "num_thread": 2}
whole = client.chat(model, question, options=options)
found["chat"] = whole.message.content
found["counts"] = [whole.prompt_eval_count, whole.eval_count, whole.done_reason]
found["durations"] = [
    whole.total_duration,
    whole.load_duration,
    whole.prompt_eval_duration,
    whole.eval_duration,
]
chunks = list(client.chat(listed.model, question, options=options, stream=True))
found["streamed"] = "".join(chunk.message.content or "" for chunk in chunks)
found["chunks"] = [len(chunks), [chunk.done for chunk in chunks][-2:], chunks[-1].eval_count]
cut = client.chat(model, question, options={"num_predict": 2, "stop": ["never"]})
found["cut"] = [cut.eval_count, cut.done_reason]
spoken = client.chat(
    model, question, options={"temperature": 0, "num_predict": 2}, logprobs=True, top_logprobs=2
)
found["logprobs"] = [len(spoken.logprobs), len(spoken.logprobs[0].top_logprobs)]


# -- form and tools
city = {"type": "string", "maxLength": 12}
schema = {
    "type": "object",
    "properties": {"city": city, "large": {"type": "boolean"}},
    "required": ["city", "large"],
}
schema["additionalProperties"] = False
formed = client.chat(model, question, format=schema, options={"temperature": 0, "num_predict": 100})
found["formed"] = json.loads(formed.message.content)


def temperature(city: str) -> int:
    """Get the temperature in a city.

    Args:
        city: The name of the city
    """
    return len(city)


def turn(city: str, degrees: int) -> list[dict[str, Any]]:
    used = {"function": {"name": "temperature", "arguments": {"city": city}}}
    return [
        {"role": "user", "content": f"How warm is it in {city}?"},
        {"role": "assistant", "tool_calls": [used]},
        {"role": "tool", "tool_name": "temperature", "content": str(degrees)},
        {"role": "assistant", "content": f"It is {degrees} degrees in {city}."},
    ]


# So small a model calls a tool once it has seen it done.
asked = [*turn("Rome", 25), *turn("Oslo", 3), *turn("Madrid", 30)]
asked.append({"role": "user", "content": "How warm is it in Paris?"})
few = {"temperature": 0, "num_predict": 60}
called = client.chat(model, asked, tools=[temperature], options=few).message
found["called"] = [(one.function.name, dict(one.function.arguments)) for one in called.tool_calls or []]
streamed = [
    chunk.message for chunk in client.chat(model, asked, tools=[temperature], options=few, stream=True)
]
calls = [one for message in streamed for one in message.tool_calls or []]
found["called_streaming"] = [(one.function.name, dict(one.function.arguments)) for one in calls]
result = {"role": "tool", "tool_name": "temperature", "content": "21"}
found["after"] = client.chat(
    model, [*asked, called, result], tools=[temperature], options=few
).message.content

# -- generate
made = client.generate(model, "What is the capital of France?", system="Answer in one word.", options=options)
found["generated"] = made.response
pieces = list(client.generate(model, "The capital of France is", raw=True, stream=True, options=options))
found["raw"] = "".join(piece.response or "" for piece in pieces)
found["loaded"] = client.generate(model).done_reason

# -- embeddings
vectors = client.embed(model, ["Paris", "Rome"])
found["embedded"] = [len(vectors.embeddings), len(vectors.embeddings[0]), vectors.prompt_eval_count]
found["same"] = max(
    abs(one - other)
    for one, other in zip(client.embeddings(model, "Paris").embedding, vectors.embeddings[0], strict=True)
)

# -- errors
refused = {}
for name, action in {
    "unknown": lambda: client.chat("nobody/nothing", question),
    "image": lambda: client.generate(model, "What is this?", images=[b"GIF89a"]),
    "keep_alive": lambda: client.generate(model, "Hi", keep_alive="soon"),
    "bad": lambda: client.chat(model, question, options={"temperature": 9.0}),
    "streamed": lambda: list(client.chat("nobody", question, stream=True)),
}.items():
    try:
        action()
    except ollama.ResponseError as error:
        refused[name] = [error.status_code, error.error]
found["refused"] = refused
print(json.dumps(found))
