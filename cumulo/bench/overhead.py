"""`cumulo bench overhead`: what serving costs over the engine alone, both measured in one run.

Throughput: the same conversations through `LLM.generate` and, streamed, through a `cumulo serve` of its own, in
rounds whose order alternates; a ratio is the median of the rounds' ratios. Latency: one request at a time; what
the client waited for its first token, less what the request's own story says the engine took.
"""

import asyncio
import json
import random
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumulo.base.reference_text import reference_text
from cumulo.base.report import Row
from cumulo.bench.server import ServerProcess
from cumulo.bench.worker import SideProcess
from cumulo.errors import CumuloError
from cumulo.load.answer import MeasuredAnswer
from cumulo.load.client import PATHS, RequestFailed, Target, discover_model, error_text, http_request, send
from cumulo.load.connection import OnBody, Pool, Response
from cumulo.load.prompts import Lengths

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


PLACES = 16  # requests at once
PROMPT_CHARACTERS = 240  # about 64 tokens of English
FIRST_CHARACTERS = 120  # of a request asked for its first token: a question of about 30 tokens
FIRST_TOKENS = 8  # output of a request that is asked for its first token: others are being made behind it
WARM_UPS = 2
REST_S = 0.2  # lets the threads of the side before go to sleep


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What both sides are asked to do in a round."""

    texts: list[str]
    output_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Round:
    """One side's share of a round."""

    tokens: int
    seconds: float
    cpu_s: dict[str, float]  # by process

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


def measure(
    model: str | None,
    threads: int,
    rounds: int,
    requests: int,
    output_tokens: Lengths,
    first_tokens: int,
    tell: Callable[[str, int, int], None],
) -> list[Row]:
    """All rows. `requests` are the conversations of a round, with answers of `output_tokens`; `first_tokens`
    the requests made one at a time."""
    from cumulo.models.files.hub import resolve

    source = resolve(model)
    texts = _Texts()
    total = 2 + 2 * (rounds + 1) + first_tokens
    options = ("--threads", str(threads), "--max-running", str(PLACES))
    tell("loading the engine", 0, total)
    worker = SideProcess("generate", model, source.path, threads, places=PLACES)
    try:
        worker.ask("load")
        tell("starting the server", 1, total)
        with ServerProcess(model, options) as server:
            sides = {
                "generate": lambda work: _generate(worker, work),
                "http": lambda work: _http(server, work),
            }
            played: dict[str, list[Round]] = {name: [] for name in sides}
            done = 2
            for number in range(rounds + 1):  # round 0 warms up
                work = texts.work(number, requests if number else PLACES, output_tokens)
                for name in sides if number % 2 else reversed(sides):
                    label = "warming up" if number == 0 else f"round {number} of {rounds}"
                    tell(f"{label}: {'LLM.generate' if name == 'generate' else 'HTTP'}", done, total)
                    time.sleep(REST_S)
                    result = sides[name](work)
                    if number:
                        played[name].append(result)
                    done += 1
            waits = _first_tokens(
                server, texts, first_tokens, lambda made: tell("first tokens", done + made, total)
            )
    finally:
        worker.close()
    return rows(played["generate"], played["http"], waits)


def _generate(worker: SideProcess, work: RoundWork) -> Round:
    made = worker.ask("answer", texts=work.texts, output_tokens=work.output_tokens)
    _check(work, made["output_tokens"])
    return Round(made["output_tokens"], made["seconds"], {"LLM.generate": made["cpu_s"]})


def _http(server: ServerProcess, work: RoundWork) -> Round:
    before = server.cpu_s, server.engine_cpu_s
    made: Streamed = asyncio.run(stream_all(server.url, work.texts, work.output_tokens, PLACES))
    after = server.cpu_s, server.engine_cpu_s
    _check(work, made.output_tokens)
    cpu_s = {"the client": made.cpu_s}
    for name, start_s, end_s in zip(("the API process", "the engine's process"), before, after, strict=True):
        if start_s is not None and end_s is not None:
            cpu_s[name] = end_s - start_s
    return Round(made.output_tokens, made.seconds, cpu_s)


def _check(work: RoundWork, output_tokens: int) -> None:
    if output_tokens != sum(work.output_tokens):
        raise CumuloError(
            f"{output_tokens} tokens came where {sum(work.output_tokens)} were asked for: the sides did not do "
            "the same work (is the context of this model too short?)"
        )


def _first_tokens(
    server: ServerProcess, texts: "_Texts", count: int, tell: Callable[[int], None]
) -> list[FirstToken]:
    questions = texts.next_texts(WARM_UPS + count, FIRST_CHARACTERS)
    made = first_tokens_of(server.url, questions, FIRST_TOKENS, tell)
    return made[WARM_UPS:]


def rows(generated: Sequence[Round], streamed: Sequence[Round], waits: Sequence[FirstToken]) -> list[Row]:
    ratios = [http.tok_s / alone.tok_s for http, alone in zip(streamed, generated, strict=True)]
    added_ms = sorted(wait.added_s * 1e3 for wait in waits)
    made = [
        Row(
            f"{PLACES} at once: streamed over HTTP / LLM.generate", statistics.median(ratios), "×",
            must=0.9, aim=0.97, note=f"{min(ratios):.3g} to {max(ratios):.3g} in {len(ratios)} rounds",
        ),
        Row(f"{PLACES} at once: streamed over HTTP", _median_rate(streamed), "tokens/s"),
        Row(f"{PLACES} at once: LLM.generate", _median_rate(generated), "tokens/s"),
        Row(
            "first token: added to the engine's time, p50", statistics.median(added_ms), "ms", "lower",
            must=2.0, aim=1.0, note=f"{len(waits)} short questions, one at a time",
        ),
        Row("first token: added, p95", added_ms[int(0.95 * (len(added_ms) - 1))], "ms", "lower"),
        Row(
            "first token: of it, from the server's receipt to the engine's",
            statistics.median(wait.before_engine_s * 1e3 for wait in waits), "ms", "lower",
        ),
        Row(
            "first token: as the client sees it, p50",
            statistics.median(wait.client_s * 1e3 for wait in waits), "ms", "lower",
        ),
    ]  # fmt: skip
    for side in (streamed, generated):
        for process in side[0].cpu_s:
            per_token_us = [1e6 * played.cpu_s[process] / played.tokens for played in side]
            made.append(
                Row(f"processor time per token: {process}", statistics.median(per_token_us), "µs", "lower")
            )
    return made


def _median_rate(side: Sequence[Round]) -> float:
    return statistics.median(played.tok_s for played in side)


class _Texts:
    """Consecutive pieces of real text: never the same one twice, so nothing is found in a prefix cache."""

    def __init__(self) -> None:
        self._text, self._position = reference_text(), 0

    def next_texts(self, count: int, characters: int = PROMPT_CHARACTERS) -> list[str]:
        end = self._position + count * characters
        if end > len(self._text):
            raise CumuloError(f"the benchmark's text ends after {len(self._text):,} characters: ask for less")
        starts = range(self._position, end, characters)
        self._position = end
        return [self._text[start : start + characters] for start in starts]

    def work(self, seed: int, requests: int, output_tokens: Lengths) -> RoundWork:
        """Answers of different lengths: they do not all end in the same step."""
        draw = random.Random(seed)
        return RoundWork(self.next_texts(requests), [output_tokens.draw(draw) for _ in range(requests)])
