"""The HTTP side of `cumulo bench overhead`: streams answers with the client of the load generator."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cumulo.errors import CumuloError
from cumulo.serve.load.answer import Answer
from cumulo.serve.load.client import PATHS, RequestFailed, Target, http_request, send
from cumulo.serve.load.connection import Pool
from cumulo.serve.load.http_response import Response
from cumulo.serve.load.probe import discover_model

_TIMEOUT_S = 600.0
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a round of streamed answers took, and what this client used of a processor for it."""

    output_tokens: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request's way to its first token."""

    client_s: float  # from sending to the first text, on the client's clock
    engine_s: float  # from the engine's receipt to its first token, by the request's story
    before_engine_s: float  # from the server's receipt of the request to the engine's

    @property
    def added_s(self) -> float:
        return self.client_s - self.engine_s


async def stream_all(url: str, texts: Sequence[str], output_tokens: Sequence[int], places: int) -> Streamed:
    """Answer every text, `places` at a time; the next begins as soon as one has ended."""
    pool = Pool(url)
    try:
        target = Target(await discover_model(pool, ""))
        waiting = iter(zip(texts, output_tokens, strict=True))
        answers: list[Answer] = []

        async def place() -> None:
            for text, count in waiting:
                answers.append(answer := Answer())
                await _ask(pool, _request(pool, target, text, count), answer)

        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(places):
                group.create_task(place())
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    finally:
        pool.close()
    return Streamed(sum(answer.completion_tokens or 0 for answer in answers), elapsed_s, cpu_s)


async def first_tokens_of(
    url: str, texts: Sequence[str], output_tokens: int, tell: Callable[[int], None]
) -> list[FirstToken]:
    """One request after another, with pauses in which the server is idle."""
    pool, waits = Pool(url), []
    try:
        target = Target(await discover_model(pool, ""))
        for number, text in enumerate(texts):
            tell(number)
            waits.append(await _first_token(pool, target, text, output_tokens))
            await asyncio.sleep(_PAUSE_S)
    finally:
        pool.close()
    return waits


async def _first_token(pool: Pool, target: Target, text: str, output_tokens: int) -> FirstToken:
    """Stream one answer alone and then ask the server what the engine's part in it was."""
    answer, request = Answer(), _request(pool, target, text, output_tokens)
    sent_s = asyncio.get_running_loop().time()
    response = await _ask(pool, request, answer)
    story = await _explanation(pool, response.headers["x-request-id"])
    at_ms = {event["kind"]: event["at_ms"] for event in story["events"]}
    return FirstToken(
        client_s=answer.chunk_times_s[0] - sent_s,
        engine_s=(at_ms["first_token"] - at_ms["arrived"]) / 1e3,
        before_engine_s=at_ms["arrived"] / 1e3,
    )


def _request(pool: Pool, target: Target, text: str, output_tokens: int) -> bytes:
    body = target.body([{"role": "user", "content": text}], output_tokens)
    return http_request(pool, "POST", PATHS["chat"], "", body)


async def _ask(pool: Pool, request: bytes, answer: Answer) -> Response:
    try:
        return await send(pool, request, answer, _TIMEOUT_S)
    except RequestFailed as error:
        raise CumuloError(f"the benchmark's request failed ({error.kind}): {error}") from error


async def _explanation(pool: Pool, request_id: str) -> dict[str, Any]:
    collected = bytearray()

    def on_body(response: Response, piece: bytes, now_s: float) -> None:
        collected.extend(piece)

    await pool.exchange(http_request(pool, "GET", f"/v1/requests/{request_id}/explain"), on_body)
    story: dict[str, Any] = json.loads(collected)["data"][0]
    return story
