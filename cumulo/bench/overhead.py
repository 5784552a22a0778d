"""`cumulo bench overhead`: what serving costs over the engine alone, both measured in one run.

Throughput: the same conversations through `LLM.generate` and, streamed, through a `cumulo serve` of its own, in
rounds whose order alternates; a ratio is the median of the rounds' ratios. Latency: one request at a time; what
the client waited for its first token, less what the request's own story says the engine took.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumulo.base.reference_text import reference_text
from cumulo.base.report import Row
from cumulo.bench.server import ServerProcess, cpu_s
from cumulo.bench.worker import FreshPieces, SideProcess
from cumulo.errors import CumuloError
from cumulo.load.answer import MeasuredAnswer
from cumulo.load.client import PATHS, RequestFailed, Target, discover_model, http_request, send
from cumulo.load.connection import Pool, Response
from cumulo.load.prompts import Lengths

PLACES = 16  # requests at once
PROMPT_CHARACTERS = 240  # about 64 tokens of English
FIRST_CHARACTERS = 120  # of a request asked for its first token: a question of about 30 tokens
FIRST_TOKENS = 8  # output of a request that is asked for its first token: others are being made behind it
WARM_UPS = 2
REST_S = 0.2  # lets the threads of the side before go to sleep
_PAUSE_S = 0.05
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request's way to its first token."""

    client_s: float  # from sending to the first text, on the client's clock
    engine_s: float  # from the engine's receipt to its first token, by the request's story
    before_engine_s: float  # from the server's receipt of the request to the engine's

    @property
    def added_s(self) -> float:
        return self.client_s - self.engine_s


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What both sides are asked in a round: answers of different lengths, which do not end in the same step."""

    texts: Sequence[str]
    output_tokens: list[int]

    @classmethod
    def drawn(cls, pieces: FreshPieces, seed: int, requests: int, output_tokens: Lengths) -> "RoundWork":
        draw = random.Random(seed)
        texts = pieces.next_pieces(requests, PROMPT_CHARACTERS)
        return cls(texts, [output_tokens.draw(draw) for _ in range(requests)])


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

    pieces = FreshPieces(reference_text())
    done, total = 2, 2 + 2 * (rounds + 1) + first_tokens
    words = ["serve", *([model] if model else []), "--threads", str(threads), "--max-running", str(PLACES)]
    tell("loading the engine", 0, total)
    worker = SideProcess("generate", model, resolve(model).path, threads, places=PLACES)
    try:
        worker.ask("load")
        tell("starting the server", 1, total)
        with ServerProcess(*words) as server:
            sides = {
                "LLM.generate": lambda work: _generate(worker, work),
                "HTTP": lambda work: _http(server, work),
            }
            played: dict[str, list[Round]] = {name: [] for name in sides}
            for number in range(rounds + 1):  # round 0 warms up
                work = RoundWork.drawn(pieces, number, requests if number else PLACES, output_tokens)
                for name in sides if number % 2 else reversed(sides):
                    label = "warming up" if number == 0 else f"round {number} of {rounds}"
                    tell(f"{label}: {name}", done, total)
                    time.sleep(REST_S)
                    result = sides[name](work)
                    if number:
                        played[name].append(result)
                    done += 1
            questions = pieces.next_pieces(WARM_UPS + first_tokens, FIRST_CHARACTERS)
            tell("first tokens", done, total)
            waits = asyncio.run(_first_tokens(server.url, questions))[WARM_UPS:]
    finally:
        worker.close()
    return rows(played["LLM.generate"], played["HTTP"], waits)


def _generate(worker: SideProcess, work: RoundWork) -> Round:
    made = worker.ask("answer", texts=work.texts, output_tokens=work.output_tokens)
    return _checked(work, Round(made["output_tokens"], made["seconds"], {"LLM.generate": made["cpu_s"]}))


def _http(server: ServerProcess, work: RoundWork) -> Round:
    processes = {"the API process": server.pid, "the engine's process": server.engine_pid}
    before = {name: cpu_s(pid) for name, pid in processes.items()}
    made = asyncio.run(_stream_all(server.url, work))
    for name, pid in processes.items():
        start_s, end_s = before[name], cpu_s(pid)
        if start_s is not None and end_s is not None:
            made.cpu_s[name] = end_s - start_s
    return _checked(work, made)


def _checked(work: RoundWork, made: Round) -> Round:
    if made.tokens != sum(work.output_tokens):
        raise CumuloError(
            f"{made.tokens} tokens came where {sum(work.output_tokens)} were asked for: the sides did not do "
            "the same work (is the context of this model too short?)"
        )
    return made


async def _stream_all(url: str, work: RoundWork) -> Round:
    """Answer every text, PLACES at a time; the next begins as soon as one has ended."""
    pool = Pool(url)
    target = Target(await discover_model(pool, ""))
    waiting = iter(zip(work.texts, work.output_tokens, strict=True))
    answers: list[MeasuredAnswer] = []

    async def place() -> None:
        for text, count in waiting:
            answers.append(answer := MeasuredAnswer())
            await _ask(pool, target, text, count, answer)

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(PLACES):
                group.create_task(place())
    finally:
        pool.close()
    tokens = sum(answer.completion_tokens or 0 for answer in answers)
    return Round(tokens, time.perf_counter() - began_s, {"the client": time.process_time() - began_cpu_s})


async def _first_tokens(url: str, texts: Sequence[str]) -> list[FirstToken]:
    """One request after another, with pauses in which the server is idle; what the client takes counts, too."""
    pool, waits = Pool(url), []
    target = Target(await discover_model(pool, ""))
    for text in texts:
        answer, story = MeasuredAnswer(), list[bytes]()
        sent_s = asyncio.get_running_loop().time()
        response = await _ask(pool, target, text, FIRST_TOKENS, answer)
        path = f"/v1/requests/{response.headers['x-request-id']}/explain"
        explain = http_request(pool, "GET", path)
        await pool.exchange(explain, lambda _, piece, now_s, story=story: story.append(piece))  # type: ignore[misc]
        events = json.loads(b"".join(story))["data"][0]["events"]
        at_ms = {event["kind"]: event["at_ms"] for event in events}
        engine_s = (at_ms["first_token"] - at_ms["arrived"]) / 1e3
        waits.append(FirstToken(answer.chunk_times_s[0] - sent_s, engine_s, at_ms["arrived"] / 1e3))
        await asyncio.sleep(_PAUSE_S)
    pool.close()
    return waits


async def _ask(pool: Pool, target: Target, text: str, output_tokens: int, answer: MeasuredAnswer) -> Response:
    body = target.body([{"role": "user", "content": text}], output_tokens)
    try:
        return await send(pool, http_request(pool, "POST", PATHS["chat"], "", body), answer, _TIMEOUT_S)
    except RequestFailed as error:
        raise CumuloError(f"the benchmark's request failed ({error.kind}): {error}") from error


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
