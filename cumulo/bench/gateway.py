"""What a gateway costs: TTFT that it adds, the streams that one core holds, and memory. For `cumulo bench gateway`.

The server behind it is canned (gateway_upstream.py), so that what is measured is the gateway's own.
"""

import asyncio
import contextlib
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cumulo.base.quantiles import quantile
from cumulo.base.report import Row
from cumulo.bench.gateway_upstream import MODEL
from cumulo.errors import CumuloError
from cumulo.load.answer import EventReader
from cumulo.load.connection import Pool, Response
from cumulo.serve.http.listening import loop_factory

_KEY = "the-key-of-a-benchmark"
_PROMPT = b"Tell me a long story about a cat and a dog. " * 20
_BODY = b'{"model":"%b","stream":true,"messages":[{"role":"user","content":"%b"}]}' % (
    MODEL.encode(),
    _PROMPT,
)
_TTFT_TOKENS = 2
_TTFTS = 2000  # of each way
_STREAM_TOKENS, _GAP_S = 50, 0.2
_MUST_ADD_MS = 1.5
_LONG_S = 300.0  # shorter runs say little about its memory
_MUST_GROW = 0.05  # of its memory, from when all streams have run for a while


def measure(streams: int, minutes: float, tell: Callable[[str], None]) -> list[Row]:
    """`minutes`: how long the streams are held."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * streams + 256)), hard))
    with canned_server(_TTFT_TOKENS, 0.001) as server, _gateway(server) as (url, pid):
        tell("TTFT through the gateway and without it, in turns")
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            rows = runner.run(_added(server, url, pid))
    with (
        canned_server(_STREAM_TOKENS, _GAP_S) as server,
        _gateway(server) as (url, pid),
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return rows + runner.run(_held(url, pid, streams, minutes * 60, tell))


# -- processes ------------------------------------------------------------------------------------------------
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


@contextlib.contextmanager
def _gateway(server: str) -> Iterator[tuple[str, int]]:
    """On one core, where the system can say so."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cumulo.cli", "gateway", server, "--port", "0", "--log-level", "warning"],
            stdout=log, stderr=log, env=os.environ | {"CUMULO_FLEET_KEY": _KEY, "COLUMNS": "200"},
        )  # fmt: skip
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
            for _ in range(600):
                found = re.search(r"listening on (\S+);", Path(log.name).read_text())
                if found or process.poll() is not None:
                    break
                time.sleep(0.05)
            if not found:
                raise CumuloError(f"the gateway did not start: {Path(log.name).read_text()}")
            yield found[1], process.pid
        finally:
            process.terminate()
            process.wait()


# -- TTFT -----------------------------------------------------------------------------------------------------
async def _ask(pool: Pool, tokens: int) -> tuple[float, bool]:
    """Seconds to the first event of an answer, and whether it had the right events."""
    first_s, good, count, reader = 0.0, True, 0, EventReader()

    def on_body(_: Response, piece: bytes, now_s: float) -> None:
        nonlocal first_s, good, count
        first_s = first_s or time.perf_counter()
        for event in reader.feed(piece):
            count += 1
            good &= event == b"[DONE]" if count > tokens else b'" %d"' % count in event

    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {pool.host_header}\r\nContent-Type: application/json\r\n"
    began_s = time.perf_counter()
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
    response = await pool.exchange(request, on_body)
    if response.status != 200:
        raise CumuloError(f"{pool.url} answered {response.status}")
    return first_s - began_s, good and count == tokens + 1


async def _added(server: str, gateway: str, pid: int) -> list[Row]:
    direct, through = Pool(server), Pool(gateway)
    times: dict[Pool, list[float]] = {direct: [], through: []}
    cpu_s = 0.0
    for turn in range(_TTFTS + 100):
        if turn == 100:
            cpu_s = _cpu_s(pid)
        for pool in (direct, through):
            ttft_s, _ = await _ask(pool, _TTFT_TOKENS)
            if turn >= 100:
                times[pool].append(ttft_s * 1e3)
    cpu_ms = (_cpu_s(pid) - cpu_s) / _TTFTS * 1e3
    direct_ms, through_ms = (sorted(times[pool]) for pool in (direct, through))
    added = {share: quantile(through_ms, share) - quantile(direct_ms, share) for share in (0.5, 0.99)}
    return [
        Row("TTFT added, p50", round(added[0.5], 3), "ms", "lower", must=_MUST_ADD_MS,
            note=f"{quantile(through_ms, 0.5):.2f} ms against {quantile(direct_ms, 0.5):.2f} ms"),
        Row("TTFT added, p99", round(added[0.99], 3), "ms", "lower"),
        Row("CPU time of a request", round(cpu_ms, 3), "ms", "lower", note=f"with {_TTFT_TOKENS} tokens"),
    ]  # fmt: skip


# -- many streams ---------------------------------------------------------------------------------------------
async def _held(url: str, pid: int, streams: int, seconds: float, tell: Callable[[str], None]) -> list[Row]:
    pool, end_s = Pool(url), time.monotonic() + seconds
    ttfts, done, wrong = list[float](), 0, 0

    async def client(number: int) -> None:
        nonlocal done, wrong
        await asyncio.sleep(number * _STREAM_TOKENS * _GAP_S / streams)  # they begin and end at all times
        while time.monotonic() < end_s:
            ttft_s, good = await _ask(pool, _STREAM_TOKENS)
            ttfts.append(ttft_s * 1e3)
            done += 1
            wrong += not good

    clients = [asyncio.create_task(client(number)) for number in range(streams)]
    started_s, warm_mib, peak_mib, cpu = time.monotonic(), 0.0, 0.0, _cpu_s(pid)
    warm_s = min(60.0, seconds / 2)
    while not all(one.done() for one in clients):
        await asyncio.sleep(1)
        now_s, mib = time.monotonic() - started_s, _resident_mib(pid)
        if not warm_mib and now_s > warm_s:
            warm_mib, ttfts[:] = mib, []
        peak_mib = max(peak_mib, mib) if warm_mib else 0.0
        tell(f"{streams:,} streams for {now_s:.0f} of {seconds:.0f} s: {done:,} complete, {mib:.0f} MiB")
    for one in clients:
        one.result()
    busy = (_cpu_s(pid) - cpu) / (time.monotonic() - started_s)
    return [
        Row("streams held at a time", streams, ""),
        Row("answers with a wrong, missing or doubled event", wrong, "", "lower", must=0.0, note=f"of {done:,}"),
        Row("core used", round(busy, 3), "", "lower", must=1.0,
            note=f"{streams / _GAP_S:,.0f} tokens/s; {busy * _GAP_S / streams * 1e6:.0f} µs per token"),
        Row("TTFT p50 under these streams", round(statistics.median(ttfts), 2), "ms", "lower"),
        Row("memory growth", round(peak_mib / warm_mib - 1, 4), "", "lower",
            must=_MUST_GROW if seconds >= _LONG_S else None,
            note=f"{warm_mib:.0f} MiB after {warm_s:.0f} s, at most {peak_mib:.0f} MiB until {seconds:.0f} s"),
    ]  # fmt: skip


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
