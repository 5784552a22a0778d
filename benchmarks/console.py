"""What open console pages cost: `python benchmarks/console.py --json FILE` (needs chromium and playwright).

A saturated server is watched by no page and by five Live pages in turn; then an idle one by one page for a minute.
The browser runs at the lowest priority: where people use the console it is on another machine.
"""

import argparse
import asyncio
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from cumulo.base import report
from cumulo.base.report import Row

PAGES = 5
CLIENTS = 16
SETTLE_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Server:
    """`cumulo serve` on a free port, with the engine's process found among its children."""

    def __init__(self, threads: int) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="cumulo-console-")  # noqa: SIM115
        command = [sys.executable, "-m", "cumulo.cli", "serve", "--port", "0", "--kv-memory-gib", "1"]
        self.process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"COLUMNS": "300"},
        )
        self.url = ""
        while not self.url:
            time.sleep(0.2)
            if self.process.poll() is not None:
                raise SystemExit(Path(self._log.name).read_text())
            found = re.search(r"listening on (http://\S+);", Path(self._log.name).read_text())
            self.url = found[1] if found else ""
        while self._status() != 200:
            time.sleep(0.2)
        self.engine_pid = next(
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and _parent(entry) == self.process.pid and b"engine" in _command(entry)
        )

    def _status(self) -> int:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready").status_code
        return 0

    def steps(self) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return float(re.search(r"^cumulo:step_duration_seconds_count\S* (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def _parent(entry: Path) -> int:
    with suppress(OSError):
        return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def _command(entry: Path) -> bytes:
    with suppress(OSError):
        return (entry / "cmdline").read_bytes()
    return b""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextmanager
def load(url: str) -> Iterator[None]:
    """So many clients that always have an answer under way."""
    over = threading.Event()

    async def client(http: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": "SmolLM2-135M-Instruct", "stream": True, "max_tokens": 400, "ignore_eos": True, "seed": number,
            "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
        }  # fmt: skip
        while not over.is_set():
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    if over.is_set():
                        return

    async def everybody() -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=CLIENTS)) as http:
            await asyncio.gather(*(client(http, number) for number in range(CLIENTS)))

    thread = threading.Thread(target=lambda: asyncio.run(everybody()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def pages(browser: Any, url: str, count: int) -> Iterator[None]:
    context = browser.new_context()
    try:
        for _ in range(count):
            page = context.new_page()
            page.goto(f"{url}/live", timeout=60_000)
            page.get_by_text("Memory ledger").wait_for(timeout=60_000)
        time.sleep(SETTLE_S)
        yield
    finally:
        context.close()


def window(server: Server, seconds: float) -> dict[str, float]:
    """Rates over a stretch of time: steps, and CPU seconds of both processes."""
    steps, engine, api, began_s = (
        server.steps(),
        cpu_s(server.engine_pid),
        cpu_s(server.process.pid),
        time.monotonic(),
    )
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    done = server.steps() - steps
    engine_s, api_s = cpu_s(server.engine_pid) - engine, cpu_s(server.process.pid) - api
    return {
        "steps_s": done / took_s,
        "engine_ms_step": engine_s / max(1, done) * 1e3,
        "api_s_min": api_s / took_s * 60,
    }


def measure(server: Server, browser: Any, rounds: int, seconds: float, idle_s: float) -> list[Row]:
    seen: dict[int, list[dict[str, float]]] = {0: [], PAGES: []}
    with load(server.url):
        time.sleep(4 * SETTLE_S)
        for number in range(rounds):
            for count in (0, PAGES) if number % 2 else (PAGES, 0):
                with pages(browser, server.url, count):
                    seen[count].append(window(server, seconds))
    time.sleep(SETTLE_S)
    with pages(browser, server.url, 0):
        alone = window(server, idle_s)["api_s_min"]
    with pages(browser, server.url, 1):
        watched = window(server, idle_s)["api_s_min"]

    def median(count: int, name: str) -> float:
        return statistics.median(one[name] for one in seen[count])

    def ratio(name: str) -> float:
        return statistics.median(b[name] / a[name] for a, b in zip(seen[0], seen[PAGES], strict=True))

    note = f"median of {rounds} pairs of {seconds:g} s"
    return [
        Row("steps, no page", median(0, "steps_s"), "steps/s", note=f"{CLIENTS} clients"),
        Row(f"steps, {PAGES} Live pages", median(PAGES, "steps_s"), "steps/s"),
        Row(
            f"steps, {PAGES} pages / none",
            ratio("steps_s"),
            "×",
            note=f"{note}; the browser shares the cores",
        ),
        Row("engine CPU per step, no page", median(0, "engine_ms_step"), "ms", "lower"),
        Row(
            f"engine CPU per step, {PAGES} pages / none",
            ratio("engine_ms_step"),
            "×",
            "lower",
            must=1.05,
            note=note,
        ),
        Row("API CPU at saturation, no page", median(0, "api_s_min"), "s/min", "lower"),
        Row(f"API CPU at saturation, {PAGES} Live pages", median(PAGES, "api_s_min"), "s/min", "lower"),
        Row("API CPU, idle, no page", alone, "s/min", "lower"),
        Row("API CPU, idle, one Live page", watched, "s/min", "lower", must=3.0, note=f"over {idle_s:g} s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window under load")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--niceness", type=int, default=19, help="of the browser; 0 on a busy machine")
    chosen = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium was found; install one (Debian: apt install chromium)")
    server = Server(chosen.threads)
    os.nice(chosen.niceness)  # after the server was started: the browser and the clients inherit it
    try:
        with sync_playwright() as player:
            browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            rows = measure(server, browser, chosen.rounds, chosen.seconds, chosen.idle_seconds)
            browser.close()
    finally:
        server.close()
    from rich import print as show

    show(report.table("console", rows))
    report.write_json(chosen.json, rows)


if __name__ == "__main__":
    main()
