"""Autoscaling live next to its rehearsal: a real server with `--autoscale` under a slice of a recorded trace, or of
a drawn one, and the same arrivals in virtual time with the same rule. Prints replica-seconds and SLO attainment of
both, and the sizes that the fleet had.

    python benchmarks/autoscale_live.py MODEL --trace azure_llm_2023_code.csv.gz --from 820 --to 1060 --every 2
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from cumulo.base.report import Row, table, write_json
from cumulo.cli.shared.plan_options import TrafficOptions
from cumulo.cli.shared.terminal import out
from cumulo.engine.decide.routing import router
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.run import Arrival
from cumulo.errors import CumuloError
from cumulo.fleet.decide.autoscale_settings import parse_autoscale
from cumulo.fleet.decide.scaling import ReplicaSpeed
from cumulo.fleet.simulate.autoscaled_fleet import AutoscaledFleet, ScaledRun
from cumulo.plan.serve.replica import Replica
from cumulo.spec.catalog import shipped
from cumulo.spec.slo import Slo

PROMPT, OUTPUT = "Once upon a time the cat sat", 16
PHASES = ((10.0, 0.5), (25.0, 4.0), (30.0, 0.5))  # seconds, requests per second
RULE = "1..3,interval=1s,start-up=6s,cooldown=8s,prompt-tok-s=1000000,output-tok-s=32,ttft=10s"


def trace(seed: int = 3) -> list[float]:
    rng, times, begin_s = random.Random(seed), [], 0.0
    for length_s, rate in PHASES:
        time_s = begin_s
        while (time_s := time_s + rng.expovariate(rate)) < begin_s + length_s:
            times.append(time_s)
        begin_s += length_s
    return [*times, begin_s]


def recorded(path: Path, from_s: float, to_s: float, every: int) -> list[float]:
    """When every n-th request of the slice came; the last arrival is its end, so that silence counts."""
    arrivals = TrafficOptions(trace=path).traffic().arrivals
    times = [one.arrived_s - from_s for one in arrivals if from_s <= one.arrived_s < to_s]
    return [*times[::every], to_s - from_s]


def live(model: str, times: list[float]) -> dict[str, Any]:
    command = [sys.executable, "-m", "cumulo", "serve", model, "--port", "0", "--threads", "1", "--no-console",
               "--kv-memory-gib", "0.2", "--replicas", "1", "--autoscale", RULE]  # fmt: skip
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = _address(Path(log.name), server)
            before_s = float(_report(url)["replica_s"])  # of loading the model
            answered = _play(url, times)
            report = _report(url)
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    return report | {"answered": answered, "replica_s": float(report["replica_s"]) - before_s}


def _report(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/fleet", timeout=60) as response:
        report: dict[str, Any] = json.load(response)["autoscale"]
    return report


def _address(log: Path, server: subprocess.Popen[bytes]) -> str:
    while server.poll() is None:
        text = log.read_text("utf-8")
        found = re.search(r"is ready at (http://\S+)/v1", text)
        if found is not None:
            return found[1]
        time.sleep(0.2)
    raise SystemExit(log.read_text("utf-8"))


def _play(url: str, times: list[float]) -> int:
    done: list[int] = []
    body = json.dumps(
        {"model": _name(url), "prompt": PROMPT, "max_tokens": OUTPUT, "ignore_eos": True}
    ).encode()

    def ask() -> None:
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            done.append(response.status)

    begin_s, threads = time.monotonic(), []
    for time_s in times:
        time.sleep(max(0.0, begin_s + time_s - time.monotonic()))
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return sum(status == 200 for status in done)


def _name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        return str(json.load(response)["data"][0]["id"])


def rehearsed(times: list[float], start_up_s: float) -> ScaledRun:
    """Replicas as fast as the tiny model's: the rule is told how much work a request is, in both."""
    catalog = shipped(None)
    cluster = catalog.cluster(1, "h200")
    replica = Replica(catalog.model("qwen3-0.6b"), cluster.node, cluster.fabric, max_context=2048)
    settings = parse_autoscale(RULE)
    slo = settings.slo or Slo(ttft_s=10.0)
    rule = settings.rule(ReplicaSpeed(1.0, 1.0), start_up_s, slo)
    fleet = AutoscaledFleet(
        lambda role: SimulatedEngine(replica.scheduler(), replica.cost()),
        lambda: router("prefix-aware"),
        rule,
        slo,
        start_up_s,
    )
    return fleet.serve([Arrival(time_s, 8, OUTPUT) for time_s in times])


def _sizes(run: ScaledRun) -> list[int]:
    sizes: list[int] = []
    for look in run.looks:
        if not sizes or sizes[-1] != look.wanted:
            sizes.append(look.wanted)
    return sizes


def _show_sizes(requests: int, run: ScaledRun) -> None:
    out.print(f"{requests} requests, sizes {_sizes(run)}, {sum(run.replica_s.values()):.0f} replica-seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--from", type=float, default=0.0, dest="from_s", help="Begin of the slice, in seconds."
    )
    parser.add_argument("--to", type=float, default=300.0, dest="to_s", help="End of the slice, in seconds.")
    parser.add_argument("--every", type=int, default=1, help="Every n-th request of the slice is replayed.")
    parser.add_argument("--only-rehearse", type=float, help="No server: with this start-up time in seconds.")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    times = trace()
    if chosen.trace is not None:
        times = recorded(chosen.trace, chosen.from_s, chosen.to_s, max(1, chosen.every))
        if len(times) < 2:
            raise SystemExit(f"{chosen.trace} has no request between {chosen.from_s:g} and {chosen.to_s:g} s")
    if chosen.only_rehearse is not None:
        _show_sizes(len(times), rehearsed(times, chosen.only_rehearse))
        return
    seen = live(chosen.model, times)
    start_ups = [float(one) for one in seen["start_ups_s"]] or [5.0]
    run = rehearsed(times, sum(start_ups) / len(start_ups))
    live_s, rehearsed_s = float(str(seen["replica_s"])), sum(run.replica_s.values())
    sizes = [one["after"] for one in seen["events"]]
    rows = [
        Row("live: replica-seconds", live_s, "s", note=f"sizes {[1, *sizes]}"),
        Row("rehearsal: replica-seconds", rehearsed_s, "s", note=f"sizes {_sizes(run)}"),
        Row("live: difference", 100 * abs(live_s / rehearsed_s - 1), "%", "lower", must=10.0),
        Row("live: SLO attainment", 100 * float(str(seen["slo_attainment"])), "%"),
        Row("rehearsal: SLO attainment", 100 * run.attainment, "%"),
        Row("live: requests lost", len(times) - int(str(seen["answered"])), "", "lower"),
        Row("live: mean start-up", sum(start_ups) / len(start_ups), "s"),
    ]
    write_json(chosen.json, rows)
    out.print(table("autoscaling, live and rehearsed", rows))


if __name__ == "__main__":
    try:
        main()
    except CumuloError as error:
        raise SystemExit(str(error)) from None
