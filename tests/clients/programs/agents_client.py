"""What an application with the OpenAI Agents SDK does, by both of its ways to a model: `python agents_client.py URL
MODEL`, results as JSON. No imports of ours: it runs in the clients' own environment."""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
set_tracing_disabled(True)
called: list[str] = []


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int


@function_tool
def temperature(city: Literal["Paris", "Rome"]) -> str:
    """The temperature in a city, in degrees Celsius."""
    called.append(city)
    return f"21 degrees in {city}"


def agent(model: object, **more: object) -> Agent:
    settings = ModelSettings(
        temperature=0, max_tokens=64, tool_choice="required" if "tools" in more else None
    )
    return Agent(name="Ann", instructions="Be brief.", model=model, model_settings=settings, **more)


async def tool_loop(model: object) -> dict[str, object]:
    called.clear()
    run = await Runner.run(agent(model, tools=[temperature]), "How warm is it in Paris?", max_turns=4)
    return {
        "calls": [{"name": "temperature", "args": {"city": city}} for city in called],
        "answer": run.final_output,
    }


async def streaming(model: object) -> dict[str, object]:
    run = Runner.run_streamed(agent(model), "What is the capital of France?")
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return {"pieces": len(deltas), "joined": "".join(deltas), "whole": run.final_output}


async def structured(model: object) -> dict[str, object]:
    run = await Runner.run(agent(model, output_type=Person), "Ann is 42 years old.")
    return run.final_output.model_dump()


async def main() -> None:
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    for name, model in (
        ("chat", OpenAIChatCompletionsModel(MODEL, client)),
        ("responses", OpenAIResponsesModel(MODEL, client)),
    ):
        results[name] = {
            "tool_loop": await tool_loop(model),
            "streaming": await streaming(model),
            "structured": await structured(model),
        }


results: dict[str, object] = {}
asyncio.run(main())
print(json.dumps(results))
