"""An honest client and a health check in a process of their own, to measure what an attack does to others.

    with Probe(server, key=honest_key) as probe:
        quiet = probe.figures()
        during = probe.figures(lambda: flood(server))
        print(quiet, during, sep="\\n")

The probe runs in a separate process, so that the attacker's own work in this one does not delay its clock. By hand:
`python -m tests.serve.attack_probe URL MODEL PID [KEY]` prints a line of JSON per request until its input ends.
"""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests import processes
from tests.serve.running_server import MODEL, RunningServer

_HEALTH_EVERY_S = 0.02
_PATIENCE_S = 120.0  # for one answer, and for the probe to collect what it was asked for: more is a hang


@dataclass(frozen=True, slots=True)
class Figures:
    """What an honest client and a health check saw in one stretch of time."""

    requests: int
    failures: tuple[str, ...]  # honest requests that got no answer of status 200
    ttft_p50_ms: float
    ttft_p99_ms: float
    slowest_id: str  # of the honest request whose first token came latest
    health_checks: int
    health_worst_ms: float
    health_worst_cpu_s: float  # what the API process computed between a health check and its answer, at most
    memory_before_mib: float  # of the API process
    memory_peak_mib: float
    memory_after_mib: float

    def __str__(self) -> str:
        return (
            f"{self.requests} honest requests ({len(self.failures)} failed), TTFT p50 {self.ttft_p50_ms:.1f} ms, "
            f"p99 {self.ttft_p99_ms:.1f} ms; {self.health_checks} health checks, slowest "
            f"{self.health_worst_ms:.1f} ms; API process {self.memory_before_mib:.0f} MiB before, "
            f"{self.memory_peak_mib:.0f} MiB at most, {self.memory_after_mib:.0f} MiB after"
        )


@dataclass(frozen=True, slots=True)
class _Sample:
    kind: str  # "ttft" or "health"
    began_s: float
    took_s: float
    problem: str | None
    request_id: str
    cpu_s: float  # of the API process meanwhile
    memory_mib: float


class Probe:
    """`model`: what the server calls its model. `key`: the honest client's API key, where keys are asked for."""

    def __init__(
        self, server: RunningServer, key: str | None = None, model: str = MODEL, at_least: int = 30
    ) -> None:
        self._server, self._at_least = server, at_least
        self._samples: list[_Sample] = []
        self._changed = threading.Condition()
        heard, says = os.pipe()
        told, self._tell = os.pipe()
        self._said = os.fdopen(heard)
        with os.fdopen(says, "w") as stdout, os.fdopen(told) as stdin:
            self._process = processes.start_module(
                "tests.serve.attack_probe", server.url, model, str(server.process.pid), *([key] if key else []),
                stdout=stdout, stdin=stdin,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Probe":
        self._wait_for(time.monotonic(), 3)  # the first requests of a server are slower
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._tell)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def figures(self, attack: Callable[[], Any] | None = None) -> Figures:
        """What the honest client sees while `attack` runs, again and again until enough requests have been seen;
        without an attack, what it sees undisturbed."""
        began_s = time.monotonic()
        memory_before_mib = _memory_mib(self._server.process.pid)
        if attack is None:
            self._wait_for(began_s, self._at_least)
        else:
            attack()
            while len(self._since(began_s, "ttft")) < self._at_least:
                attack()
                if time.monotonic() - began_s > _PATIENCE_S:
                    raise AssertionError("the honest client is not answered during the attack")
        # What began during the attack counts, however late it ends.
        self._wait_for(time.monotonic(), 1)
        ttft = self._since(began_s, "ttft")
        health = self._since(began_s, "health")
        times_ms = sorted(sample.took_s * 1e3 for sample in ttft)
        return Figures(
            requests=len(ttft),
            failures=tuple(sample.problem for sample in ttft + health if sample.problem is not None),
            ttft_p50_ms=times_ms[len(times_ms) // 2],
            ttft_p99_ms=times_ms[min(len(times_ms) - 1, int(len(times_ms) * 0.99))],
            slowest_id=max(ttft, key=lambda sample: sample.took_s).request_id,
            health_checks=len(health),
            health_worst_ms=max(sample.took_s for sample in health) * 1e3,
            health_worst_cpu_s=max(sample.cpu_s for sample in health),
            memory_before_mib=memory_before_mib,
            memory_peak_mib=max(sample.memory_mib for sample in ttft + health),
            memory_after_mib=_memory_mib(self._server.process.pid),
        )

    def _since(self, began_s: float, kind: str) -> list[_Sample]:
        with self._changed:
            return [s for s in self._samples if s.kind == kind and s.began_s + s.took_s >= began_s]

    def _wait_for(self, began_s: float, requests: int) -> None:
        def enough() -> bool:
            kinds = [s.kind for s in self._samples if s.began_s >= began_s]
            return kinds.count("ttft") >= requests and kinds.count("health") >= 1

        with self._changed:
            if not self._changed.wait_for(enough, _PATIENCE_S):
                raise AssertionError(
                    f"the honest client got fewer than {requests} answers\n{self._server.log}"
                )

    def _read(self) -> None:
        for line in self._said:
            said = json.loads(line)
            sample = _Sample(*said, _memory_mib(self._server.process.pid))
            with self._changed:
                self._samples.append(sample)
                self._changed.notify_all()


def _memory_mib(pid: int) -> float:
    """What a process holds in memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _cpu_s(pid: int) -> float:
    """What a process has computed so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the other process ----------------------------------------------------------------------------------------
def _ask(
    url: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[str | None, str]:
    """Wait for the answer's first line: what went wrong, if anything, and the request's id."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_PATIENCE_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        first = answer.readline()
        if answer.status != 200 or not first:
            return f"{method} {path}: {answer.status} {(first + answer.read())[:300]!r}", ""
        streamed = first.startswith(b"data: {")
        return None, json.loads(first.removeprefix(b"data: "))["id"] if streamed else ""
    except OSError as error:
        return f"{method} {path}: {error!r}", ""
    finally:
        connection.close()


def _probe(url: str, model: str, pid: int, key: str | None) -> None:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    ended, lock = threading.Event(), threading.Lock()

    def sample(kind: str, method: str, path: str, body: bytes | None, head: dict[str, str]) -> None:
        began_s, cpu_s = time.monotonic(), _cpu_s(pid)
        problem, request_id = _ask(url, method, path, body, head)
        took_s, cpu_s = time.monotonic() - began_s, _cpu_s(pid) - cpu_s
        with lock:
            print(json.dumps([kind, began_s, took_s, problem, request_id, cpu_s]), flush=True)

    def health() -> None:
        while not ended.wait(_HEALTH_EVERY_S):
            sample("health", "GET", "/health", None, {})

    def ttft() -> None:
        count = 0
        while not ended.is_set():
            count += 1
            messages = [{"role": "user", "content": f"Question {count}: what is it?"}]
            body = {"model": model, "messages": messages, "max_tokens": 2, "stream": True, "temperature": 0}
            sample("ttft", "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)

    threads = [threading.Thread(target=health), threading.Thread(target=ttft)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join(10)


if __name__ == "__main__":
    _probe(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
