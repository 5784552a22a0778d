"""Kills the engine of a server with SIGKILL and watches it come back. Used by test_kill, and to measure:

python -m tests.serve.kill --times 5
"""

import argparse
import json
import os
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from cumulo.base.report import machine
from tests.serve.running_server import MODEL, RunningServer, running_server, wait_for

MUST_BE_BACK_S = 15.0


@dataclass(frozen=True, slots=True)
class Recovery:
    unhealthy_s: float  # from the kill until /health said so
    ready_s: float  # from the kill until /ready was good again
    start_cpu_s: float  # what the new engine computed until then: the same on a busy machine


def kill_engine(server: RunningServer) -> Recovery:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        pid = server.engine_pid()
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: http.get("/health").status_code == 503, "a bad /health", server)
        unhealthy_s = time.monotonic() - began_s
        wait_for(lambda: http.get("/ready").status_code == 200, "a new engine", server, 120)
        ready_s = time.monotonic() - began_s
        times = Path(f"/proc/{server.engine_pid()}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return Recovery(unhealthy_s, ready_s, sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))


def _keep_busy(server: RunningServer, stop: list[bool]) -> None:
    """One client that streams, and comes again whatever happens to it."""
    body = {
        "model": MODEL, "prompt": "Once upon a time", "max_tokens": 500, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    while not stop:
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                for _ in response.iter_lines():
                    if stop:
                        return
        except httpx.HTTPError:
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args()
    stop: list[bool] = []
    found = []
    with running_server() as server:
        clients = [Thread(target=_keep_busy, args=(server, stop)) for _ in range(chosen.clients)]
        for client in clients:
            client.start()
        try:
            for _ in range(chosen.times):
                busy = min(chosen.clients, 4)
                wait_for(
                    lambda busy=busy: server.sample("cumulo:num_requests_running") >= busy, "load", server
                )
                found.append(kill_engine(server))
                seen = found[-1]
                print(
                    f"/health bad after {seen.unhealthy_s:.2f} s, ready after {seen.ready_s:.2f} s "
                    f"({seen.start_cpu_s:.2f} s of processor time)"
                )
        finally:
            stop.append(True)
            for client in clients:
                client.join()
    slowest_s = max(recovery.ready_s for recovery in found)
    rows: list[dict[str, Any]] = [
        {"name": "kill -9: until /health is bad", "unit": "s", "better": "lower",
         "value": round(statistics.median(recovery.unhealthy_s for recovery in found), 3)},
        {"name": "kill -9: until ready again, slowest", "unit": "s", "better": "lower",
         "value": round(slowest_s, 2), "must": MUST_BE_BACK_S, "ok": slowest_s <= MUST_BE_BACK_S},
        {"name": "kill -9: processor time of a start", "unit": "s", "better": "lower",
         "value": round(statistics.median(recovery.start_cpu_s for recovery in found), 2)},
    ]  # fmt: skip
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    raise SystemExit(0 if slowest_s <= MUST_BE_BACK_S else 1)


if __name__ == "__main__":
    main()
