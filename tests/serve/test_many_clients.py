"""Many streaming clients at once: nobody is lost, and nobody gets another's text.

Greedy answers are compared with what the same prompt is answered alone; others must spell a word of their own,
which their guide knows and nobody else's.
"""

import asyncio
import collections
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import thorough
from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long
CLIENTS = 300 if thorough.chosen else 72
TOKENS = 12
WORDS = ("cat", "dog", "mat", "first", "second", "name", "café", "Paris", "12345", "return")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def crowded(model: Path) -> Iterator[RunningServer]:
    with running_server(str(model), "--no-console") as server:
        yield server


def question(number: int) -> dict[str, Any]:
    """What a client asks; two thirds plainly, a third with a word that must come back."""
    words = random.Random(number).choices(WORDS, k=8)
    fields: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": f"{number} {' '.join(words)}"}],
        "temperature": 0, "max_tokens": TOKENS, "seed": number,
    }  # fmt: skip
    if number % 3 == 0:
        form = {"type": "regex", "regex": f"client-{number}-[a-z]"}
        return fields | {"max_tokens": 40, "extra_body": {"response_format": form}}
    return fields | {"extra_body": {"ignore_eos": True}}


async def streamed(client: openai.AsyncOpenAI, number: int) -> str | openai.APIStatusError:
    """The text, or the error with which the server turned the client away."""
    try:
        stream = await client.chat.completions.create(**question(number), stream=True)
    except openai.APIStatusError as error:
        return error
    text, ends = "", []
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert len(ends) == 1, f"client {number}: {ends}"
    return text


def all_at_once(server: RunningServer) -> list[str | openai.APIStatusError]:
    async def together() -> list[str | openai.APIStatusError]:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=120) as http,
            openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http
            ) as client,
        ):
            return await asyncio.gather(*(streamed(client, number) for number in range(CLIENTS)))

    return asyncio.run(together())


@pytest.fixture(scope="module")
def alone(crowded: RunningServer) -> dict[int, str]:
    """What plain questions are answered when nobody else asks."""
    client = crowded.client()
    return {
        number: client.chat.completions.create(**question(number)).choices[0].message.content or ""
        for number in range(CLIENTS)
        if number % 3
    }


def check(number: int, text: str, alone: dict[int, str]) -> None:
    if number % 3 == 0:
        assert text.startswith(f"client-{number}-") and len(text) == len(f"client-{number}-x"), text
    else:
        assert text == alone[number], f"client {number}"


def nothing_is_left(server: RunningServer) -> bool:
    health = server.get("/health").json()
    return (
        health["running"] == health["waiting"] == health["restarts"] == 0
        and server.sample("cumulo:kv_cache_usage_perc") == 0
    )


def test_all_clients_get_their_own_answer(crowded: RunningServer, alone: dict[int, str]) -> None:
    assert len(set(alone.values())) > 0.95 * len(alone)  # else a mixed-up answer might not show
    for number, answer in enumerate(all_at_once(crowded)):
        assert isinstance(answer, str), f"client {number}: {answer}"
        check(number, answer, alone)
    wait_for(lambda: nothing_is_left(crowded), "an idle server", crowded)


def test_those_for_whom_there_is_no_room_are_told_when_to_come_again(
    model: Path, alone: dict[int, str]
) -> None:
    options = ("--no-console", "--max-running", "12", "--max-queue", "24")
    with running_server(str(model), *options) as server, ThreadPoolExecutor() as threads:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)  # however fast it is, it does not keep up with them
        try:
            answers = threads.submit(all_at_once, server)
            wait_for(
                lambda: server.sample("cumulo:http_responses_total", status="429"), "somebody refused", server
            )
        finally:
            os.kill(engine, signal.SIGCONT)
        kinds: collections.Counter[str] = collections.Counter()
        for number, answer in enumerate(answers.result()):
            if isinstance(answer, str):
                check(number, answer, alone)
                kinds["answered"] += 1
            else:
                assert answer.status_code == 429 and answer.code == "queue_full", answer
                assert int(answer.response.headers["Retry-After"]) >= 1
                kinds["turned away"] += 1
        assert sum(kinds.values()) == CLIENTS
        assert kinds["answered"] >= 36 and kinds["turned away"] >= 1, kinds
        wait_for(lambda: nothing_is_left(server), "an idle server", server)
