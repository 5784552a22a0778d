"""`response_format`, asked by the official client: the answer has the form, whatever the model is."""

import asyncio
import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model, wait_for

pytestmark = [needs_built_in_model, pytest.mark.long]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["glad", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Describe Alice, 42, as JSON."}],
    "max_tokens": 120,
    "seed": 3,
}


def in_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def content_of(answer: Any) -> str:
    assert answer.choices[0].finish_reason == "stop"
    content = answer.choices[0].message.content
    assert isinstance(content, str)
    return content


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema_is_kept_to_at_every_temperature(client: openai.OpenAI, temperature: float) -> None:
    fields = ASK | {"temperature": temperature, "response_format": in_schema(PERSON, strict=True)}
    text = content_of(client.chat.completions.create(**fields))
    jsonschema.validate(json.loads(text), PERSON)
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_the_client_parses_answers_into_pydantic_models(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=12)
        mood: Literal["glad", "sad"]

    answer = client.chat.completions.parse(**ASK, response_format=Person)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person)
    with client.chat.completions.stream(**ASK, response_format=Person) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed


def test_every_one_of_several_answers_has_the_form(client: openai.OpenAI) -> None:
    fields = ASK | {"n": 3, "temperature": 1.2, "response_format": in_schema(PERSON)}
    answer = client.chat.completions.create(**fields)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)


def test_a_json_object_is_an_object(client: openai.OpenAI) -> None:
    fields = ASK | {"temperature": 0, "max_tokens": 250}
    answer = client.chat.completions.create(**fields, response_format={"type": "json_object"})
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_regular_expressions_and_grammars_are_kept_to(client: openai.OpenAI) -> None:
    pattern = r"(red|green|blue)-[0-9]{3}"
    for form in (
        {"type": "regex", "regex": pattern},
        {"type": "grammar", "grammar": 'start: COLOUR "-" /[0-9]{3}/\nCOLOUR: "red" | "green" | "blue"'},
    ):
        text = content_of(client.chat.completions.create(**ASK, extra_body={"response_format": form}))
        assert re.fullmatch(pattern, text)


def test_log_probabilities_come_with_a_guided_answer(client: openai.OpenAI) -> None:
    fields = ASK | {"response_format": in_schema(PERSON), "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**fields)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (in_schema({"type": "frob"}), "frob"),
        (in_schema({"not": {"type": "string"}}), "not"),
        (in_schema({"$ref": "#/nowhere"}), "nowhere"),
        ({"type": "regex", "regex": "("}, "regular expression"),
        ({"type": "grammar", "grammar": "start: nothing"}, "nothing"),
    ],
)
def test_a_form_that_cannot_be_is_400_with_the_reason(
    server: RunningServer, form: Any, reason: str, stream: bool
) -> None:
    response = server.post("/v1/chat/completions", ASK | {"response_format": form, "stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "response_format" and reason in error["message"]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "yaml"}, "response_format.type"),
        ({}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": 3}}, "response_format.json_schema.name"),
        (in_schema([]), "response_format.json_schema.schema"),
        ({"type": "regex"}, "response_format.regex"),
        ({"type": "text", "regex": "x"}, "response_format.regex"),
        ({"type": "json_object", "colour": 1}, "response_format.colour"),
    ],
)
def test_a_malformed_response_format_is_named(server: RunningServer, form: Any, param: str) -> None:
    response = server.post("/v1/chat/completions", ASK | {"response_format": form})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_lone_surrogate_or_endless_nesting_in_a_form_is_400(server: RunningServer) -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"items": deep}
    for form in ({"type": "regex", "regex": "\ud800"}, in_schema({"const": "\ud800"}), in_schema(deep)):
        response = httpx.post(
            f"{server.url}/v1/chat/completions",
            content=json.dumps(ASK | {"response_format": form}),
            headers={"Content-Type": "application/json"},
            timeout=60,
        )
        assert response.status_code == 400, response.text


def test_what_a_loose_schema_cannot_enforce_is_passed_over(client: openai.OpenAI) -> None:
    schema = {"type": "string", "maxLength": 5, "format": "invented"}
    text = content_of(
        client.chat.completions.create(**ASK, response_format=in_schema(schema, strict=False))  # type: ignore[call-overload]
    )
    assert len(json.loads(text)) <= 5


def test_guided_and_free_answers_run_beside_each_other(server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        schema = PERSON | {"title": f"form {number}"}  # each is compiled anew
        fields: dict[str, Any] = ASK | {"seed": number}
        if number % 2:
            fields["response_format"] = in_schema(schema)
        answer = await client.chat.completions.create(**fields)
        return answer.choices[0].message.content or ""

    async def together() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, number) for number in range(8)))

    for number, text in enumerate(asyncio.run(together())):
        if number % 2:
            jsonschema.validate(json.loads(text), PERSON)
        else:
            assert text


def test_a_client_that_leaves_while_its_guide_is_compiled_leaves_nothing_behind(
    server: RunningServer,
) -> None:
    properties = {f"field_{index}": {"type": "string", "pattern": "[a-z]{3,9}"} for index in range(600)}
    # All are required, so that the answer is long: it is not there when a busy machine comes to ask for it.
    form = in_schema({"type": "object", "properties": properties, "required": list(properties)})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/chat/completions",
            json=ASK | {"response_format": form, "max_tokens": 4000},
            timeout=httpx.Timeout(30, read=0.02),
        )
    wait_for(lambda: idle(server), "the end of everything that runs")
    assert server.client().chat.completions.create(**(ASK | {"max_tokens": 2})).choices


def idle(server: RunningServer) -> bool:
    health = server.get("/health").json()
    return bool(health["status"] == "ok" and health["running"] == health["waiting"] == 0)
