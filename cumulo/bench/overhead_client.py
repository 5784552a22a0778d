"""The HTTP side of `cumulo bench overhead`: streams answers with the client of the load generator."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumulo.errors import CumuloError
from cumulo.load.answer import MeasuredAnswer
from cumulo.load.client import PATHS, RequestFailed, Target, discover_model, error_text, http_request, send
from cumulo.load.connection import OnBody, Pool, Response

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
        answers: list[MeasuredAnswer] = []

        async def place() -> None:
            for text, count in waiting:
                answers.append(answer := MeasuredAnswer())
                await _ask(pool, _request(pool, target, text, count), answer)

        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(places):
                group.create_task(place())
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    finally:
        pool.close()
    return Streamed(sum(answer.completion_tokens or 0 for answer in answers), elapsed_s, cpu_s)


def first_tokens_of(
    url: str, texts: Sequence[str], output_tokens: int, tell: Callable[[int], None]
) -> list[FirstToken]:
    """One request after another, with pauses in which the server is idle.

    Over a plain blocking socket: whatever the client itself takes counts as the server's.
    """
    pool, waits = Pool(url), []
    target = Target(asyncio.run(discover_model(Pool(url), "")))
    with socket.create_connection((pool.host, pool.port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, text in enumerate(texts):
            tell(number)
            waits.append(_first_token(connection, pool, _request(pool, target, text, output_tokens)))
            time.sleep(_PAUSE_S)
    return waits


def _first_token(connection: socket.socket, pool: Pool, request: bytes) -> FirstToken:
    """Stream one answer alone and then ask the server what the engine's part in it was."""
    answer = MeasuredAnswer()
    sent_s = time.perf_counter()
    response = _exchange(connection, request, answer.receive)
    if response.status != 200:
        raise CumuloError(f"the benchmark's request failed: {error_text(bytes(answer.body))}")
    path, story = f"/v1/requests/{response.headers['x-request-id']}/explain", bytearray()
    _exchange(connection, http_request(pool, "GET", path), lambda _, piece, now_s: story.extend(piece))
    at_ms = {event["kind"]: event["at_ms"] for event in json.loads(story)["data"][0]["events"]}
    return FirstToken(
        client_s=answer.chunk_times_s[0] - sent_s,
        engine_s=(at_ms["first_token"] - at_ms["arrived"]) / 1e3,
        before_engine_s=at_ms["arrived"] / 1e3,
    )


def _exchange(connection: socket.socket, request: bytes, on_body: OnBody) -> Response:
    response = Response()
    connection.sendall(request)
    while not response.complete:
        data, now_s = connection.recv(1 << 16), time.perf_counter()
        if not data:
            raise CumuloError("the server closed the connection in the middle of the benchmark")
        for piece in response.feed(data):
            on_body(response, piece, now_s)
    return response


def _request(pool: Pool, target: Target, text: str, output_tokens: int) -> bytes:
    body = target.body([{"role": "user", "content": text}], output_tokens)
    return http_request(pool, "POST", PATHS["chat"], "", body)


async def _ask(pool: Pool, request: bytes, answer: MeasuredAnswer) -> Response:
    try:
        return await send(pool, request, answer, _TIMEOUT_S)
    except RequestFailed as error:
        raise CumuloError(f"the benchmark's request failed ({error.kind}): {error}") from error
