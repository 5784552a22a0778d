"""What an application with instructor does: `python instructor_client.py URL MODEL`, results as JSON. No imports of
ours: it runs in the clients' own environment."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]


class Person(BaseModel, extra="forbid"):
    name: Literal["Ann", "Bob"]
    age: int


class Temperature(BaseModel, extra="forbid"):
    """The temperature in a city, in degrees Celsius."""

    city: Literal["Paris", "Rome"]


class Reading(BaseModel, extra="forbid"):
    """A temperature that was read."""

    degrees: Literal[20, 21, 22]


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)


def ask(mode: instructor.Mode, model: type[BaseModel], text: str) -> dict[str, object]:
    answer = client(mode).chat.completions.create(
        model=MODEL, response_model=model, messages=[{"role": "user", "content": text}], temperature=0,
        max_tokens=64, max_retries=0,
    )  # fmt: skip
    return answer.model_dump()


def tool_loop() -> dict[str, object]:
    """The model's call is an object here; its result goes into the next question."""
    call = ask(instructor.Mode.TOOLS, Temperature, "How warm is it in Paris?")
    text = f"It is 21 degrees in {call['city']}. How warm is it?"
    reading = ask(instructor.Mode.TOOLS, Reading, text)
    return {"calls": [{"name": "Temperature", "args": call}], "answer": str(reading["degrees"])}


def by_responses() -> dict[str, object]:
    answer = client(instructor.Mode.RESPONSES_TOOLS).responses.create(
        model=MODEL, response_model=Person, input="Ann is 42 years old.", temperature=0, max_output_tokens=64,
        max_retries=0,
    )  # fmt: skip
    return answer.model_dump()


def streaming(mode: instructor.Mode) -> dict[str, object]:
    question = [{"role": "user", "content": "Ann is 42 years old."}]
    partials = list(
        client(mode).chat.completions.create_partial(
            model=MODEL, response_model=Person, messages=question, temperature=0, max_tokens=64
        )
    )
    return {"pieces": len(partials), "last": partials[-1].model_dump()}


MODES = {
    "json_schema": instructor.Mode.JSON_SCHEMA,
    "tools": instructor.Mode.TOOLS,
    "tools_strict": instructor.Mode.TOOLS_STRICT,
    "json": instructor.Mode.JSON,
}
print(
    json.dumps(
        {
            "tool_loop": tool_loop(),
            "structured": {name: ask(mode, Person, "Ann is 42 years old.") for name, mode in MODES.items()},
            "responses": by_responses(),
            "partial": {name: streaming(mode) for name, mode in MODES.items()},
        }
    )
)
