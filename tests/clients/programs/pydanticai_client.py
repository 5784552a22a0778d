"""What an application with Pydantic AI does, by both of its ways to a model: `python pydanticai_client.py URL
MODEL`, results as JSON. No imports of ours: it runs in the clients' own environment."""

import asyncio
import json
import sys
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:3]
SETTINGS = {"temperature": 0.0, "max_tokens": 64}


class Person(BaseModel, extra="forbid"):
    name: Literal["Ann", "Bob"]
    age: int


class Answer(BaseModel, extra="forbid"):
    degrees: Literal[20, 21, 22]


async def tool_loop(model: object) -> dict[str, object]:
    """The model must call a tool in every step: first the temperature, then the one that ends the run."""
    agent: Agent[None, Answer] = Agent(model, output_type=ToolOutput(Answer), model_settings=SETTINGS)
    called: list[dict[str, object]] = []

    async def only_once(context: object, tool: object) -> object:
        return None if called else tool

    @agent.tool_plain(prepare=only_once)
    def temperature(city: Literal["Paris", "Rome"]) -> str:
        """The temperature in a city, in degrees Celsius."""
        called.append({"name": "temperature", "args": {"city": city}})
        return f"21 degrees in {city}"

    answer = (await agent.run("Call the tool temperature: how warm is it in Paris?")).output
    return {"calls": called, "answer": str(answer.degrees)}


async def streaming(model: object) -> dict[str, object]:
    agent = Agent(model, model_settings=SETTINGS)
    question = "What is the capital of France?"
    async with agent.run_stream(question) as run:
        deltas = [delta async for delta in run.stream_text(delta=True, debounce_by=None)]
        used = run.usage
    whole = await agent.run(question)
    return {
        "pieces": len(deltas),
        "joined": "".join(deltas),
        "whole": whole.output,
        "output_tokens": [_tokens(used), _tokens(whole.usage)],
    }


def _tokens(usage: object) -> int:
    return (usage() if callable(usage) else usage).output_tokens


async def structured(model: object) -> dict[str, object]:
    ways = {"native": NativeOutput(Person), "tool": ToolOutput(Person)}
    agents = {way: Agent(model, output_type=form, model_settings=SETTINGS) for way, form in ways.items()}
    return {
        way: (await agent.run("Ann is 42 years old.")).output.model_dump() for way, agent in agents.items()
    }


async def main() -> None:
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    provider = OpenAIProvider(openai_client=client)
    for name, kind in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        model = kind(MODEL, provider=provider)
        results[name] = {
            "tool_loop": await tool_loop(model),
            "streaming": await streaming(model),
            "structured": await structured(model),
        }


results: dict[str, object] = {}
asyncio.run(main())
print(json.dumps(results))
