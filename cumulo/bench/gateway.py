"""What a gateway costs: TTFT that it adds, the streams that one core holds, and memory. For `cumulo bench gateway`.

The server behind it is canned (gateway_upstream.py), so that what is measured is the gateway's own.
"""

import asyncio
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from cumulo.base.quantiles import quantile
from cumulo.base.report import Row
from cumulo.bench.gateway_upstream import MODEL
from cumulo.bench.server import ServerProcess, cpu_s, resident_mib
from cumulo.load.answer import MeasuredAnswer
from cumulo.load.client import PATHS, Target, http_request, send
from cumulo.load.connection import Pool
from cumulo.serve.http.listening import loop_factory

_KEY = "the-key-of-a-benchmark"
_PROMPT = "Tell me a long story about a cat and a dog. " * 20
_TIMEOUT_S = 600.0
_TTFT_TOKENS = 2
_TTFTS, _WARM_UPS = 2000, 100  # of each way
_STREAM_TOKENS, _GAP_S = 50, 0.2
_MUST_ADD_MS = 1.5
_LONG_S = 300.0  # shorter runs say little about its memory
_MUST_GROW = 0.05  # of its memory, from when all streams have run for a while


def measure(streams: int, minutes: float, tell: Callable[[str], None]) -> list[Row]:
    """`minutes`: how long the streams are held."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * streams + 256)), hard))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        with canned_server(_TTFT_TOKENS, 0.001) as server, _gateway(server) as gateway:
            tell("TTFT through the gateway and without it, in turns")
            rows = runner.run(_added(server, gateway))
        with canned_server(_STREAM_TOKENS, _GAP_S) as server, _gateway(server) as gateway:
            return rows + runner.run(_held(gateway, streams, minutes * 60, tell))


@contextlib.contextmanager
def canned_server(tokens: int, gap_s: float) -> Iterator[str]:
    command = [sys.executable, "-m", "cumulo.bench.gateway_upstream", str(tokens), str(gap_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


def _gateway(server: str) -> ServerProcess:
    """On one core, where the system can say so."""
    process = ServerProcess("gateway", server, "--log-level", "warning", CUMULO_FLEET_KEY=_KEY)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    return process


async def _ask(pool: Pool, tokens: int) -> tuple[float, bool]:
    """Milliseconds to the first token of an answer, and whether it had the right tokens."""
    answer, began_s = MeasuredAnswer(keep_text=True), asyncio.get_running_loop().time()
    body = Target(MODEL).body([{"role": "user", "content": _PROMPT}], tokens)
    await send(pool, http_request(pool, "POST", PATHS["chat"], "", body), answer, _TIMEOUT_S)
    right = "".join(f" {number}" for number in range(1, tokens + 1))
    return (answer.chunk_times_s[0] - began_s) * 1e3, answer.done and answer.text == right


async def _added(server: str, gateway: ServerProcess) -> list[Row]:
    direct, through = Pool(server), Pool(gateway.url)
    times: dict[Pool, list[float]] = {direct: [], through: []}
    for turn in range(_TTFTS + _WARM_UPS):
        if turn == _WARM_UPS:
            before_s = cpu_s(gateway.pid) or 0.0
        for pool in (direct, through):
            ttft_ms, _ = await _ask(pool, _TTFT_TOKENS)
            if turn >= _WARM_UPS:
                times[pool].append(ttft_ms)
    cpu_ms = ((cpu_s(gateway.pid) or 0.0) - before_s) / _TTFTS * 1e3
    (direct_50, direct_99), (through_50, through_99) = (
        [quantile(sorted(times[pool]), share) for share in (0.5, 0.99)] for pool in (direct, through)
    )
    compared = f"{through_50:.2f} ms against {direct_50:.2f} ms"
    return [
        Row("TTFT added, p50", through_50 - direct_50, "ms", "lower", must=_MUST_ADD_MS, note=compared),
        Row("TTFT added, p99", through_99 - direct_99, "ms", "lower"),
        Row("CPU time of a request", cpu_ms, "ms", "lower", note=f"with {_TTFT_TOKENS} tokens"),
    ]


async def _held(
    gateway: ServerProcess, streams: int, seconds: float, tell: Callable[[str], None]
) -> list[Row]:
    pool, end_s = Pool(gateway.url), time.monotonic() + seconds
    ttfts, done, wrong = list[float](), 0, 0

    async def client(number: int) -> None:
        nonlocal done, wrong
        await asyncio.sleep(number * _STREAM_TOKENS * _GAP_S / streams)  # they begin and end at all times
        while time.monotonic() < end_s:
            ttft_ms, good = await _ask(pool, _STREAM_TOKENS)
            ttfts.append(ttft_ms)
            done += 1
            wrong += not good

    clients = [asyncio.create_task(client(number)) for number in range(streams)]
    started_s, warm_mib, peak_mib, before_s = time.monotonic(), 0.0, 0.0, cpu_s(gateway.pid) or 0.0
    warm_s = min(60.0, seconds / 2)
    while not all(one.done() for one in clients):
        await asyncio.sleep(1)
        now_s, mib = time.monotonic() - started_s, resident_mib(gateway.pid)
        if not warm_mib and now_s > warm_s:
            warm_mib, ttfts[:] = mib, []
        peak_mib = max(peak_mib, mib) if warm_mib else 0.0
        tell(f"{streams:,} streams for {now_s:.0f} of {seconds:.0f} s: {done:,} complete, {mib:.0f} MiB")
    for one in clients:
        one.result()
    busy = ((cpu_s(gateway.pid) or 0.0) - before_s) / (time.monotonic() - started_s)
    pace = f"{streams / _GAP_S:,.0f} tokens/s; {busy * _GAP_S / streams * 1e6:.0f} µs per token"
    memory = f"{warm_mib:.0f} MiB after {warm_s:.0f} s, at most {peak_mib:.0f} MiB until {seconds:.0f} s"
    most = _MUST_GROW if seconds >= _LONG_S else None
    return [
        Row("streams held at a time", streams),
        Row("answers with a wrong, missing or doubled event", wrong, "", "lower", 0.0, note=f"of {done:,}"),
        Row("core used", busy, "", "lower", must=1.0, note=pace),
        Row("TTFT p50 under these streams", statistics.median(ttfts), "ms", "lower"),
        Row("memory growth", peak_mib / warm_mib - 1, "", "lower", must=most, note=memory),
    ]
