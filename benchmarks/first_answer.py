"""How long a newcomer waits: `python benchmarks/first_answer.py --json FILE`.

Starts `cumulo serve` as `make run` does, asks README's question as soon as the server is ready, and stops it. Next
to it: importing torch alone, which no server that uses torch can be quicker than. CPU seconds are those of the
server's processes; on a machine that others use they say more than the clock.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from cumulo.base import report
from cumulo.base.report import Row

QUESTION = "Why is the sky blue?"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Trial:
    """One start. Times are since the process was started."""

    ready_s: float
    first_token_s: float
    answer_s: float
    ready_cpu_s: float
    answer_cpu_s: float
    tokens: int


def cpu_s(root: int) -> float:
    """CPU seconds of a process and of all below it."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents[int(entry.name)] = int(fields[1])
                used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(pid, 0.0) for pid in family)


def is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready").status_code == 200
    return False


def start_and_ask(seed: int) -> Trial:
    with tempfile.NamedTemporaryFile(prefix="cumulo-first-answer-") as log:
        began_s = time.monotonic()
        server = subprocess.Popen(
            [sys.executable, "-m", "cumulo.cli", "serve", "--port", "0"], stdout=log, stderr=log,
            env=os.environ | {"COLUMNS": "300"},
        )  # fmt: skip
        try:
            url = ""
            while not url:
                if server.poll() is not None:
                    raise SystemExit(Path(log.name).read_text())
                found = re.search(r"listening on (http://\S+);", Path(log.name).read_text())
                url = found[1] if found else ""
                time.sleep(0.02)
            while not is_ready(url):
                time.sleep(0.05)
            ready_s, ready_cpu_s = time.monotonic() - began_s, cpu_s(server.pid)
            first_token_s, tokens = 0.0, 0
            body = {
                "model": "SmolLM2-135M-Instruct", "stream": True, "stream_options": {"include_usage": True},
                "seed": seed, "messages": [{"role": "user", "content": QUESTION}],
            }  # fmt: skip
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if not first_token_s and any(
                        choice["delta"].get("content") for choice in event["choices"]
                    ):
                        first_token_s = time.monotonic() - began_s
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
            return Trial(
                ready_s, first_token_s, time.monotonic() - began_s, ready_cpu_s, cpu_s(server.pid), tokens
            )
        finally:
            server.terminate()
            server.wait(60)


def import_torch() -> tuple[float, float]:
    """Wall and CPU seconds."""
    before, began_s = os.times(), time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return time.monotonic() - began_s, cpu


def measure(rounds: int) -> list[Row]:
    torch = [import_torch() for _ in range(rounds)]
    trials = [start_and_ask(seed) for seed in range(1, rounds + 1)]

    def row(name: str, values: list[float], must: float | None = None) -> Row:
        return Row(
            name, statistics.median(values), "s", "lower", must=must,
            note=f"median of {rounds}: {min(values):.1f} to {max(values):.1f} s",
        )  # fmt: skip

    return [
        row("import torch alone", [wall for wall, _ in torch]),
        row("import torch alone, CPU", [cpu for _, cpu in torch]),
        row("process start to ready", [trial.ready_s for trial in trials]),
        row("process start to ready, CPU", [trial.ready_cpu_s for trial in trials]),
        row("ready to first token", [trial.first_token_s - trial.ready_s for trial in trials]),
        row("process start to first token", [trial.first_token_s for trial in trials]),
        row("process start to the whole answer", [trial.answer_s for trial in trials], must=8.0),
        row("process start to the whole answer, CPU", [trial.answer_cpu_s for trial in trials]),
        Row("tokens of the answer", statistics.median(trial.tokens for trial in trials), "tokens", "lower"),
        Row("load average", os.getloadavg()[0], "", "lower", note=f"{report.available_cores()} cores"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    rows = measure(chosen.rounds)
    from rich import print as show

    show(report.table("first answer", rows))
    report.write_json(chosen.json, rows)


if __name__ == "__main__":
    main()
