"""What the generator itself costs: it plays against a canned server in another process. Called by the CLI.

CPU seconds rather than wall-clock, so that other programs on the machine do not count; the delay is from
the server's write to our timestamp, on the clock both processes share.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cumulo.load import canned_server
from cumulo.load.answer import MeasuredAnswer
from cumulo.load.client import PATHS, Target, http_request, send
from cumulo.load.connection import Pool
from cumulo.load.player import Level, LoadPlayer
from cumulo.load.prompts import Constant
from cumulo.load.schedule import Workload, plan
from cumulo.load.summary import Spread

STREAMS = 40
GAP_S = 0.02  # 40 streams of 50 tokens per second: 2,000 tokens per second in all
RATE_TOK_S = STREAMS / GAP_S


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The generator's own figures. 'Paced' is 2,000 tokens per second, each in a packet of its own."""

    flat_out_tok_per_cpu_s: float
    flat_out_tok_s: float
    paced_tok_per_cpu_s: float
    paced_tok_s: float
    delay_s: Spread  # from the server's write to our timestamp, when paced
    request_cpu_s: float  # of a request apart from its tokens

    @property
    def cores_at_2000_tok_s(self) -> float:
        return RATE_TOK_S / self.paced_tok_per_cpu_s


@contextmanager
def canned() -> Iterator[str]:
    """The canned server's address, while it runs."""
    command = [sys.executable, canned_server.__file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()  # tells it to end
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


async def measure(seconds: float = 3.0, watch: Callable[[Level], bool] | None = None) -> SelfTest:
    """About three times `seconds` of load; `watch` is the live progress, whose cost belongs to ours."""
    target = Target(canned_server.MODEL)
    paced = replace(target, extra={"gap_s": GAP_S})
    paced_tokens = max(1, round(seconds / GAP_S))
    with canned() as url:
        pool = Pool(url)
        try:
            await _play(pool, target, 8, 64, 8, None)  # warm: code paths, connections
            flat = await _play(pool, target, 8, 512, max(8, round(seconds * 24)), watch)
            steady = await _play(pool, paced, STREAMS, paced_tokens, STREAMS, watch)
            delay = await _delay(pool, paced, paced_tokens)
            single = await _play(pool, target, 8, 1, max(8, round(seconds * 100)), watch)
        finally:
            pool.close()
    tokens_flat, tokens_steady = _tokens(flat), _tokens(steady)
    return SelfTest(
        tokens_flat / flat.cpu_s,
        tokens_flat / flat.wall_s,
        tokens_steady / steady.cpu_s,
        tokens_steady / steady.wall_s,
        delay,
        single.cpu_s / len(single.records),
    )


def _tokens(level: Level) -> int:
    return sum(record.output_tokens for record in level.records)


async def _play(
    pool: Pool,
    target: Target,
    streams: int,
    tokens: int,
    requests: int,
    watch: Callable[[Level], bool] | None,
) -> Level:
    workload = Workload(input_tokens=Constant(32), output_tokens=Constant(tokens))
    level = Level(plan(workload, streams, "self-test", conversations=requests))
    await LoadPlayer(pool, target).play(level, watch)
    return level


async def _delay(pool: Pool, target: Target, tokens: int) -> Spread:
    async def one() -> list[float]:
        answer = MeasuredAnswer(keep_text=True)
        body = target.body([{"role": "user", "content": "hello"}], tokens)
        await send(pool, http_request(pool, "POST", PATHS["chat"], "", body), answer, 600)
        written_s = map(float, answer.text.split())
        return [seen_s - sent_s for seen_s, sent_s in zip(answer.chunk_times_s, written_s, strict=True)]

    streams = await asyncio.gather(*(one() for _ in range(STREAMS)))
    spread = Spread.from_values([delay_s for stream in streams for delay_s in stream])
    assert spread is not None
    return spread
