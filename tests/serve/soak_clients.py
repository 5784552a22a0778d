"""The visitors of a soak: what each kind asks, how it leaves, and what it must see meanwhile. Used by soak.py.

Each returns how it went in a word, or raises Hurt when the server did what it must not.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema

from tests.serve.tiny_model import NAME

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROBES = tuple(f"Answer number {number}, please." for number in range(24))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "register", "parameters": PERSON}}
# A grammar with so many readings that its guide gives up in the middle of the answer.
HOPELESS = {"type": "grammar", "grammar": 'start: a\na: "" | /[a-z]/ | a a | a a a'}


class Hurt(Exception):
    """The server broke its word."""


@dataclass(frozen=True, slots=True)
class Visit:
    http: httpx.AsyncClient
    chance: random.Random
    expected: dict[str, str]  # what a probe's prompt is answered alone

    def chat(self, tokens: int | None = None, **more: Any) -> dict[str, Any]:
        words = " ".join(
            self.chance.choices(("cat", "dog", "sat", "naïve", "3", "{"), k=self.chance.randint(1, 60))
        )
        limit = tokens if tokens is not None else self.chance.randint(1, 80)
        return {"model": NAME, "messages": [{"role": "user", "content": words}], "max_tokens": limit, **more}

    async def ask(self, path: str, body: Any) -> httpx.Response | None:
        """A sound request: answered, or turned away with a time to come again (None)."""
        response = await self.http.post(path, json=body)
        return await self.turned_away(response, body)

    async def turned_away(self, response: httpx.Response, body: Any) -> httpx.Response | None:
        if response.status_code == 429:
            if int(response.headers.get("Retry-After", 0)) < 1:
                raise Hurt("429 without Retry-After")
            await asyncio.sleep(0.2)  # less than it was told, so that the server stays full
            return None
        if response.status_code != 200:
            raise Hurt(f"{response.status_code} {response.text[:300]} for {json.dumps(body)[:300]}")
        return response

    async def refused(self, path: str, statuses: tuple[int, ...], **request: Any) -> str:
        response = await self.http.post(path, **request)
        if response.status_code == 429:
            return "turned away"
        if response.status_code not in statuses or not response.json()["error"]["message"]:
            raise Hurt(f"{response.status_code} {response.text[:300]}")
        return "refused"

    async def greedy(self, prompt: str) -> str:
        """The answer to a probe; empty if turned away."""
        body = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        response = await self.ask(TEXT, body)
        return response.json()["choices"][0]["text"] if response is not None else ""


Play = Callable[[Visit], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Kind:
    weight: int
    play: Play


CLIENTS: dict[str, Kind] = {}


def weights() -> list[int]:
    return [kind.weight for kind in CLIENTS.values()]


def visitor(weight: int) -> Callable[[Play], Play]:
    def enter(play: Play) -> Play:
        CLIENTS[play.__name__] = Kind(weight, play)
        return play

    return enter


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# -- those who stay ----------------------------------------------------------------------------------------
@visitor(6)
async def probe(visit: Visit) -> str:
    prompt = visit.chance.choice(PROBES)
    answer = await visit.greedy(prompt)
    if not answer:
        return "turned away"
    if answer != visit.expected[prompt]:
        raise Hurt(f"{prompt!r} was answered {answer!r}, alone {visit.expected[prompt]!r}")
    return "answered"


@visitor(6)
async def reads_a_stream(visit: Visit) -> str:
    body = visit.chat(stream=True, stream_options={"include_usage": True})
    response = await visit.ask(CHAT, body)
    if response is None:
        return "turned away"
    events = _events(response.text)
    if not response.text.endswith("data: [DONE]\n\n") or any("error" in event for event in events):
        raise Hurt(f"a stream ended with {response.text[-300:]!r}")
    return "answered"


@visitor(3)
async def wants_several_answers(visit: Visit) -> str:
    count = visit.chance.randint(2, 6)
    response = await visit.ask(CHAT, visit.chat(n=count, logprobs=True, top_logprobs=3))
    if response is None:
        return "turned away"
    if len(response.json()["choices"]) != count:
        raise Hurt(f"{count} answers were wanted: {response.text[:300]}")
    return "answered"


@visitor(2)
async def sends_several_prompts(visit: Visit) -> str:
    body = {
        "model": NAME,
        "prompt": ["the cat", "a dog", "def add("],
        "max_tokens": 20,
        "echo": True,
        "logprobs": 1,
    }
    response = await visit.ask(TEXT, body)
    return "answered" if response is not None else "turned away"


@visitor(2)
async def speaks_responses(visit: Visit) -> str:
    body = {"model": NAME, "input": "the dog", "max_output_tokens": 30, "stream": visit.chance.random() < 0.5}
    response = await visit.ask(RESPONSES, body)
    return "answered" if response is not None else "turned away"


@visitor(4)
async def wants_a_form(visit: Visit) -> str:
    """One schema for all, or one of its own."""
    schema = PERSON if visit.chance.random() < 0.7 else PERSON | {"title": str(visit.chance.random())}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    response = await visit.ask(CHAT, visit.chat(200, response_format=form))
    if response is None:
        return "turned away"
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    return "answered"


@visitor(3)
async def demands_a_call(visit: Visit) -> str:
    body = visit.chat(
        200,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=visit.chance.random() < 0.5,
    )
    response = await visit.ask(CHAT, body)
    if response is None:
        return "turned away"
    if not body["stream"]:
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            jsonschema.validate(
                json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), PERSON
            )
    return "answered"


# -- those who leave ---------------------------------------------------------------------------------------
@visitor(6)
async def hangs_up_while_answered(visit: Visit) -> str:
    body = visit.chat(300, stream=True, ignore_eos=True, n=visit.chance.choice((1, 1, 3)))
    chunks = visit.chance.randint(1, 20)
    async with visit.http.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            await visit.turned_away(response, body)
            return "turned away"
        async for _ in response.aiter_bytes():
            chunks -= 1
            if not chunks:
                return "left"
    return "answered"


@visitor(5)
async def hangs_up_while_waiting(visit: Visit) -> str:
    """Whether it is queued, computed or compiled by then is up to chance."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"title": str(visit.chance.random())}},
    }
    more: dict[str, Any] = visit.chance.choice(({}, {"stream": True}, {"response_format": form}))
    patience_s = visit.chance.choice((0.001, 0.01, 0.05, 0.3))
    with contextlib.suppress(httpx.ReadTimeout, httpx.WriteTimeout, httpx.ConnectTimeout, httpx.PoolTimeout):
        await visit.http.post(CHAT, json=visit.chat(400, **more), timeout=httpx.Timeout(10, read=patience_s))
        return "answered"
    return "left"


# -- those who ask wrongly ---------------------------------------------------------------------------------
@visitor(2)
async def sends_too_long_a_prompt(visit: Visit) -> str:
    length = visit.chance.choice((600, 5_000, 200_000))
    return await visit.refused(TEXT, (400,), json={"model": NAME, "prompt": "dog " * length})


@visitor(2)
async def sends_no_json(visit: Visit) -> str:
    body = visit.chance.choice(
        (b"", b"{", b"[" * 5000, b"\xff\xfe", b'{"model": 1e999}', b"null", b'{"prompt": "')
    )
    path = visit.chance.choice((CHAT, TEXT, RESPONSES, "/tokenize"))
    return await visit.refused(path, (400,), content=body, headers={"Content-Type": "application/json"})


@visitor(2)
async def sends_nonsense(visit: Visit) -> str:
    change = visit.chance.choice(
        (
            {"temperature": -1}, {"n": 0}, {"frobnicate": 1}, {"stop": ["x"] * 1000}, {"messages": []},
            {"model": "no"}, {"tools": [TOOL, TOOL]}, {"logit_bias": {"x": 1}},
            {"response_format": {"type": "regex", "regex": "(" * 50}},
            {"response_format": {"type": "grammar", "grammar": "start: nothing"}},
        )
    )  # fmt: skip
    return await visit.refused(CHAT, (400, 404), json=visit.chat() | change)


@visitor(1)
async def sends_too_much(visit: Visit) -> str:
    return await visit.refused(TEXT, (413,), content=b"x" * (5 << 20))


@visitor(1)
async def has_a_hopeless_grammar(visit: Visit) -> str:
    """Refused in the middle of its answer, unless luck ends the answer before."""
    response = await visit.http.post(CHAT, json=visit.chat(300, response_format=HOPELESS, min_tokens=200))
    if response.status_code == 429:
        return "turned away"
    if response.status_code == 400 and response.json()["error"]["param"] == "response_format":
        return "refused"
    if response.status_code != 200:
        raise Hurt(f"{response.status_code} {response.text[:300]}")
    return "answered"


# -- those who look on -------------------------------------------------------------------------------------
@visitor(3)
async def looks_on(visit: Visit) -> str:
    path = visit.chance.choice(("/health", "/ready", "/metrics", "/v1/models", "/openapi.json"))
    response = await visit.http.get(path)
    if response.status_code != 200:
        raise Hurt(f"{path}: {response.status_code} {response.text[:300]}")
    return "answered"
