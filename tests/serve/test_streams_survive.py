"""Streams whose engine is killed in mid-answer go on with the very tokens they would have had: none lost, none
doubled, none other. Real processes, real signals."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from tests import thorough
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long
TOKENS = 200
CHAT: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Say a lot."}],
    "stream": True,
}
LONG: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
WORDS: dict[str, Any] = {"type": "array", "items": {"enum": ["word", "other"]}, "minItems": 40}
TOOL = {"type": "function", "function": {"name": "note", "parameters": {
    "type": "object", "properties": {"words": WORDS}, "required": ["words"],
}}}  # fmt: skip
# What is asked; every answer is determined: greedy, or drawn from a seed.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/chat/completions", CHAT | LONG | {"temperature": 0}),
    "seeded": ("/v1/chat/completions", CHAT | LONG | {"temperature": 1.2, "seed": 7}),
    "penalties": (
        "/v1/chat/completions",
        CHAT | LONG | {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    ),
    "logprobs": (
        "/v1/chat/completions",
        CHAT | LONG | {"temperature": 0.5, "seed": 1, "logprobs": True, "top_logprobs": 3},
    ),
    "usage": (
        "/v1/chat/completions",
        CHAT | LONG | {"temperature": 0, "stream_options": {"include_usage": True}, "return_token_ids": True},
    ),
    "stop strings": (
        "/v1/chat/completions",
        CHAT | {"max_tokens": TOKENS, "temperature": 1.0, "seed": 9, "stop": ["never said zzzz"]},
    ),
    "guided": (
        "/v1/chat/completions",
        CHAT | {"max_tokens": 400, "temperature": 0.7, "seed": 5,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WORDS}}},
    ),
    "tools": (
        "/v1/chat/completions",
        CHAT | {"max_tokens": 400, "temperature": 0.7, "seed": 5, "tools": [TOOL], "tool_choice": "required"},
    ),
    "completions": (
        "/v1/completions", {"model": NAME, "prompt": "Once", "stream": True, "seed": 2, "temperature": 1} | LONG,
    ),
    "samples": (  # of which the first ends early, by its stop token
        "/v1/completions",
        {"model": NAME, "prompt": "Once", "stream": True, "n": 3, "seed": 4, "temperature": 1.1,
         "max_tokens": TOKENS, "stop_token_ids": list(range(10, 14)), "ignore_eos": True, "return_token_ids": True},
    ),
    "responses": (
        "/v1/responses",
        {"model": NAME, "input": "Hi", "stream": True, "temperature": 0, "max_output_tokens": TOKENS},
    ),
    "messages": (
        "/v1/messages",
        {"model": NAME, "messages": CHAT["messages"], "stream": True, "temperature": 0, "max_tokens": TOKENS},
    ),
}  # fmt: skip
CHANGING = {"id", "created", "created_at", "completed_at", "item_id", "response_id"}  # of each answer its own


@cache
def _http() -> httpx.Client:
    """One for all: a client takes longer to make than the tiny model to answer. Every stream has a connection."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(limits=limits, timeout=120)


class Stream(Thread):
    """One client: everything its stream said, and whether it has begun to speak."""

    def __init__(
        self,
        server: RunningServer,
        path: str,
        body: dict[str, Any],
        key: str = "none",
        on_speech: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._url, self._body, self._key, self._on_speech = server.url + path, body, key, on_speech
        self.events: list[Any] = []
        self.speaks = Event()
        self.start()

    def run(self) -> None:
        key = {"Authorization": f"Bearer {self._key}"}
        with _http().stream("POST", self._url, json=self._body, headers=key) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line if line == "data: [DONE]" else json.loads(line[6:]))
                if len(self.events) > 6 and not self.speaks.is_set():
                    self.speaks.set()
                    self._on_speech()
        self.speaks.set()


def said(events: list[Any]) -> list[Any]:
    """All that was said, however it was cut into events: texts that follow one another are joined."""
    joined: list[Any] = []
    for event in sorted(events, key=sample_of):
        for path, value in leaves(event):
            if path and path[-1] in CHANGING:
                continue
            if (
                joined
                and joined[-1][0] == path
                and isinstance(value, str)
                and path[-1]
                in (
                    "content",
                    "text",
                    "arguments",
                    "delta",
                    "partial_json",
                )
            ):
                joined[-1][1] += value
            elif path and path[-1] in ("content", "text", "arguments", "delta", "partial_json", "index"):
                joined.append([path, value])
            elif path and path[-1] in (
                "token",
                "logprob",
                "finish_reason",
                "completion_tokens",
                "output_tokens",
            ):
                joined.append([path, round(value, 4) if isinstance(value, float) else value])
    texts = {}
    for path, value in joined:
        texts.setdefault((*path, type(value).__name__), []).append(value)
    return [
        (
            key,
            "".join(values)
            if key[-1] == "str" and key[-2] != "finish_reason"
            else [v for v in values if v is not None],
        )
        for key, values in texts.items()
        if key[-2] != "index"
    ]


def sample_of(event: Any) -> int:
    """Which of several samples it is about; events of others come in between."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return int(choices[0]["index"]) if choices else 99 if choices == [] or isinstance(event, str) else 0


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, path)
    else:
        yield path, value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model: Path = save_tiny_model(tmp_path_factory.mktemp("models"))
    with running_server(str(model), "--no-console") as running:
        yield running


def begin_and_kill(server: RunningServer) -> dict[str, Stream]:
    """Streams of all kinds, and the engine's end when the last of them has begun to speak: they do not for long."""
    engine, silent = server.engine_pid(), list(KINDS)

    def hear() -> None:
        if silent.pop() == next(iter(KINDS)):  # the last one left
            os.kill(engine, signal.SIGKILL)

    return {name: Stream(server, *asked, on_speech=hear) for name, asked in KINDS.items()}


def test_killed_engines_change_no_stream(server: RunningServer) -> None:
    undisturbed = {name: Stream(server, *asked) for name, asked in KINDS.items()}
    for stream in undisturbed.values():
        stream.join()
    wanted, kills = 2 if thorough.chosen else 1, 0
    while wanted:
        streams = begin_and_kill(server)
        kills += 1
        for name, stream in streams.items():
            stream.join()
            assert said(stream.events) == said(undisturbed[name].events), name
        ids = [stream.events[0]["id"] for stream in streams.values() if "id" in stream.events[0]]
        told = [server.get(f"/v1/requests/{one}/explain").json()["data"][0] for one in ids]
        # Where it did not come in mid-answer, because this process had to wait for its turn, it says nothing.
        wanted -= sum(one["retried_after_engine_restart"] for one in told) >= 3
        assert kills < 10

        def replaced(kills: int = kills) -> bool:
            return server.sample("cumulo:engine_restarts") == kills and server.status("/ready") == 200

        wait_for(replaced, "the next engine", server)
