"""`cumulo bench overhead`: what serving costs over the engine alone, both measured in one run.

Throughput: the same conversations through `LLM.generate` and, streamed, through a `cumulo serve` of its own, in
turns. Latency: one request at a time; what the client waited for its first token, less what the request's own story
says the engine took.
"""

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cumulo.base.reference_text import reference_text
from cumulo.base.report import Row
from cumulo.bench.sides import MAX_SEQUENCES, FreshPieces, SideProcess
from cumulo.bench.turns import Tell, median_ratio, spread, take_turns
from cumulo.errors import CumuloError
from cumulo.load.answer import MeasuredAnswer
from cumulo.load.client import PATHS, RequestFailed, Target, discover_model, http_request, send
from cumulo.load.connection import Pool, Response
from cumulo.load.prompts import Lengths

PROMPT_CHARACTERS = 240  # about 64 tokens of English
FIRST_CHARACTERS = 120  # of a request asked for its first token: a question of about 30 tokens
FIRST_TOKENS = 8  # output of a request that is asked for its first token: others are being made behind it
WARM_UPS = 2
REST_S = 0.2
_PAUSE_S = 0.05
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request's way to its first token."""

    client_s: float  # from sending to the first text, on the client's clock
    engine_s: float  # from the engine's receipt to its first token, by the request's story


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
    tell: Tell,
) -> list[Row]:
    """All rows. `requests` are the conversations of a round, with answers of `output_tokens`; `first_tokens`
    the requests made one at a time."""
    from cumulo.models.files.hub import resolve

    pieces = FreshPieces(reference_text())
    work = [RoundWork.drawn(pieces, number, requests, output_tokens) for number in range(rounds + 1)]
    words = [
        "serve",
        *([model] if model else []),
        "--threads",
        str(threads),
        "--max-running",
        str(MAX_SEQUENCES),
    ]
    tell("loading the engine")
    with SideProcess("cumulo", model, resolve(model).path, threads) as engine:
        engine.load()
        tell("starting the server")
        with ServerProcess(*words) as server:
            played = take_turns(
                {
                    "LLM.generate": lambda number: _generate(engine, work[number]),
                    "HTTP": lambda number: _http(server, work[number]),
                },
                rounds,
                tell,
                rest_s=REST_S,
            )
            tell("first tokens")
            questions = pieces.next_pieces(WARM_UPS + first_tokens, FIRST_CHARACTERS)
            waits = asyncio.run(_first_tokens(server.url, questions))[WARM_UPS:]
    return rows(played["LLM.generate"], played["HTTP"], waits)


def _generate(engine: SideProcess, work: RoundWork) -> Round:
    tokens, seconds, cpu = engine.ask("answer", work.texts, work.output_tokens)
    return _checked(work, Round(tokens, seconds, {"LLM.generate": cpu}))


def _http(server: "ServerProcess", work: RoundWork) -> Round:
    processes = {"the API process": server.pid, "the engine's process": server.engine_pid}
    before = {name: _cpu_s(pid) for name, pid in processes.items()}
    made = asyncio.run(_stream_all(server.url, work))
    for name, pid in processes.items():
        start_s, end_s = before[name], _cpu_s(pid)
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
    """Answer every text, MAX_SEQUENCES at a time; the next begins as soon as one has ended."""
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
            for _ in range(MAX_SEQUENCES):
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
        waits.append(FirstToken(answer.chunk_times_s[0] - sent_s, engine_s))
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
    own, http = ([one.tok_s for one in side] for side in (generated, streamed))
    added_ms = sorted(1e3 * (wait.client_s - wait.engine_s) for wait in waits)
    client_ms = statistics.median(1e3 * wait.client_s for wait in waits)
    name = f"{MAX_SEQUENCES} at once:"
    made = [
        Row(f"{name} streamed over HTTP / LLM.generate", median_ratio(http, own), "×", must=0.9, aim=0.97),
        Row(f"{name} streamed over HTTP", statistics.median(http), "tokens/s", note=spread(http)),
        Row(f"{name} LLM.generate", statistics.median(own), "tokens/s", note=spread(own)),
        Row(
            "first token: added to the engine's time, p50", statistics.median(added_ms), "ms", "lower",
            must=2.0, aim=1.0, note=f"{len(waits)} short questions, one at a time",
        ),
        Row("first token: added, p95", added_ms[int(0.95 * (len(added_ms) - 1))], "ms", "lower"),
        Row("first token: as the client sees it, p50", client_ms, "ms", "lower"),
    ]  # fmt: skip
    for side in (streamed, generated):
        for process in side[0].cpu_s:
            per_token_us = statistics.median(1e6 * one.cpu_s[process] / one.tokens for one in side)
            made.append(Row(f"processor time per token: {process}", per_token_us, "µs", "lower"))
    return made


_START_S = 900.0


class ServerProcess:
    """The process of `cumulo WORDS` and, below it, the engine's. Leaving the `with` stops both."""

    def __init__(self, *words: str) -> None:
        # A file, not a pipe: nobody reads while the server writes.
        self._log = tempfile.NamedTemporaryFile(prefix="cumulo-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "cumulo.cli", *words, "--port", "0"]
        environment = os.environ | {"COLUMNS": "200"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        self.pid, self.url = self._process.pid, ""

    def __enter__(self) -> Self:
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine_pid(self) -> int | None:
        below = [
            int(pid)
            for file in Path(f"/proc/{self.pid}/task").glob("*/children")
            for pid in file.read_text().split()
        ]
        return next((pid for pid in below if b"engine_process" in _proc(pid, "cmdline")), None)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise CumuloError(f"the server ended before it was ready:\n{self._log_tail()}")
            if found := re.search(r"is ready at (http://\S+)/v1", self._log_tail()):
                self.url = found[1]
                return
            time.sleep(0.05)
        raise CumuloError(f"the server was not ready within {_START_S:g} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return Path(self._log.name).read_text("utf-8", "replace")[-4000:]


def _cpu_s(pid: int | None) -> float | None:
    """Processor seconds that all threads of a process have used; None where the system does not tell."""
    fields = _proc(pid, "stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None


def _proc(pid: int | None, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
