"""Fits the twelve numbers of each device generation in cumulo/plan/data/collectives.yaml to what ships as measured.

    python benchmarks/fit_network.py                   # fit, and say how well rows are predicted that were held out
    python benchmarks/fit_network.py --json report.json
    python benchmarks/fit_network.py --leave-out       # each run of several nodes, by what others' cards reach

Held out, in turn: every third message size, and all rows of 4 GPUs; the numbers printed last are fitted to all.
"""

import argparse
import csv
import json
import math
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml

from cumulo.plan.network.collectives import Network, chosen
from cumulo.plan.network.lines import Kind, NetworkProfile, profile_from
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster, Fabric

DEVICES = {"ampere": "a100-80gb", "hopper": "h100-sxm"}
# Where the search begins; it multiplies, so nothing may be 0. Ampere's switches do not reduce: those two stay out.
START = {
    "ll_us": 6.6,
    "ll128_us": 14.0,
    "simple_us": 40.0,
    "hop_us": 0.6,
    "ring_share": 0.75,
    "ll_share": 0.5,
    "ll128_share": 0.8,
    "copy_share": 0.3,
    "nvls_us": 8.0,
    "nvls_share": 0.6,
    "peer_gbps": 6.0,
    "direct_us": 14.0,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured collective, and what the model says of it."""

    run: str  # "h100-sxm, NCCL 2.27.3", "aws-p5": rows that belong together
    kind: Kind
    dtype: str
    ranks: int
    domains: int
    size_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def measured(profiles: Mapping[str, NetworkProfile] | None = None) -> Iterator[Timing]:
    """Single-node rows; `profiles` by device name, in place of what ships."""
    networks: dict[str, Network] = {}
    for row in csv.DictReader(
        line for line in _lines("collectives_measured.csv") if not line.startswith("#")
    ):
        name = row.pop("device")
        run, kind = f"{name}, NCCL {row.pop('nccl')}", cast(Kind, row.pop("operation"))
        dtype, ranks = row.pop("dtype"), int(row.pop("gpus"))
        if name not in networks:
            networks[name] = Network(catalog.cluster(8, name), (profiles or {}).get(name))
        group = networks[name].group(ranks)
        for size, time_us in row.items():
            if time_us:
                line = chosen(kind, int(size), group, in_switch=dtype != "int8")
                yield Timing(
                    run, kind, dtype, ranks, 1, int(size), float(time_us) * 1e-6, line.seconds(int(size))
                )


@cache
def published_runs() -> Mapping[str, Mapping[str, Any]]:
    """All-reduce runs of several nodes or whole racks, as others published them, with their network stated."""
    runs: Mapping[str, Mapping[str, Any]] = yaml.safe_load("\n".join(_lines("collectives_published.yaml")))
    return runs


def published(card_factors: Mapping[str, float] | None = None) -> Iterator[Timing]:
    """Runs of one or more nodes; rows of one run share everything but the size. `card_factors`: of a run's network
    cards, in place of the 1 that is the transport's share."""
    for name, run in published_runs().items():
        node = catalog.node(run["node"])
        node = replace(
            node,
            nic_bytes_per_s=run["nic_gbps"] * 1e9 * (card_factors or {}).get(name, 1.0),
            scale_up_gpus=run.get("scale_up_gpus", node.scale_up_gpus),
        )
        fabric = Fabric(name, "rail", run["transport"], switch_ports=64, latency_s=run["latency_us"] * 1e-6)
        group = Network(Cluster(node, run["ranks"], fabric)).group(run["ranks"])
        for size, time_us in run["times_us"].items():
            line = chosen("all_reduce", size, group, run.get("in_switch", True))
            domains = group.reach.domains
            predicted_s = line.seconds(size) + run.get("alone_us", 0.0) * 1e-6
            yield Timing(
                name, "all_reduce", "float", run["ranks"], domains, size, time_us * 1e-6, predicted_s
            )


def _lines(name: str) -> list[str]:
    return (resources.files("cumulo.plan") / "data" / name).read_text("utf-8").splitlines()


def predictions(numbers: dict[str, float], device: str) -> list[Timing]:
    profile = profile_from({**numbers, "evidence": "", "ll_far_gbps": [1.0, 1.0]}, catalog.device(device))
    return [row for row in measured({device: profile}) if row.run.startswith(device)]


def fit(device: str, use: Callable[[Timing], bool], rounds: int) -> dict[str, float]:
    """Coordinate search on the mean absolute logarithm of predicted over measured."""
    fixed = {"nvls_us": 0.0, "nvls_share": 0.0} if device.startswith("a100") else {}
    numbers = {**START, **fixed}

    def loss(candidate: dict[str, float]) -> float:
        return statistics.fmean(
            abs(math.log(row.predicted_s / row.measured_s))
            for row in predictions(candidate, device)
            if use(row)
        )

    best = loss(numbers)
    steps = {name: 0.3 for name in numbers if name not in fixed}
    for _ in range(rounds):
        for name in steps:
            for sign in (1, -1):
                candidate = {**numbers, name: numbers[name] * math.exp(sign * steps[name])}
                if (found := loss(candidate)) < best:
                    best, numbers = found, candidate
                    steps[name] *= 1.4
                    break
            else:
                steps[name] *= 0.6
    return numbers


def say(title: str, rows: list[Timing]) -> dict:
    errors = sorted(abs(row.error) for row in rows)
    found = {
        "name": title,
        "value": statistics.median(errors),
        "unit": "median absolute error",
        "better": "lower",
        "must": 0.10,
        "ok": statistics.median(errors) <= 0.10,
        "p90": errors[int(0.9 * len(errors))],
        "worst": errors[-1],
        "rows": len(errors),
    }
    print(f"{title:48s} median {found['value']:6.1%}  p90 {found['p90']:6.1%}  rows {found['rows']}")
    return found


def leave_runs_out() -> list[dict]:
    """Each run of several domains, predicted with the share of line rate that the largest messages of the other
    runs over its kind of network reach."""
    rows = [row for row in published() if row.domains > 1]
    transport = {name: run["transport"] for name, run in published_runs().items()}
    reached = {name: card_factor(name) for name in dict.fromkeys(row.run for row in rows)}
    report = []
    for name in reached:
        alike = [reached[other] for other in reached if other != name and transport[other] == transport[name]]
        known = [factor for factor in alike if factor is not None]
        factor = statistics.median(known) if known else 1.0
        some = [row for row in published({name: factor}) if row.run == name]
        report.append(say(f"{name} by {len(known)} others (cards × {factor:.3f})", some))
    return report


def card_factor(name: str) -> float | None:
    """With which its largest message is predicted right; None where its cards are not the limit."""

    def error(factor: float) -> float:
        return max(
            (row for row in published({name: factor}) if row.run == name), key=lambda row: row.size_bytes
        ).error

    low, high = 0.7, 1.3
    if error(low) < 0 or error(high) > 0:
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > 0 else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--leave-out", action="store_true", help="leave out runs of several nodes in turn")
    options = parser.parse_args()
    if options.leave_out:
        leave_runs_out()
        return
    report: list[dict] = []
    splits: dict[str, Callable[[Timing], bool]] = {
        "every third size held out": lambda row: row.size_bytes.bit_length() % 3 != 0,
        "4 GPUs held out": lambda row: row.ranks != 4,
    }
    for generation, device in DEVICES.items():
        for title, use in splits.items():
            rows = predictions(fit(device, use, options.rounds), device)
            report.append(say(f"{generation}, {title}: fitted", [row for row in rows if use(row)]))
            report.append(say(f"{generation}, {title}: held out", [row for row in rows if not use(row)]))
        numbers = fit(device, lambda row: True, options.rounds)
        rows = predictions(numbers, device)
        report.append(say(f"{generation}, all", rows))
        for kind in dict.fromkeys(row.kind for row in rows):
            for ranks in (2, 4, 8):
                some = [row for row in rows if row.kind == kind and row.ranks == ranks]
                report.append(say(f"{generation}, all: {kind} of {ranks}", some))
        print(f"{generation}:", ", ".join(f"{name}: {value:.4g}" for name, value in numbers.items()))
    if options.json:
        machine = {"host": platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "rows": report}, indent=1))


if __name__ == "__main__":
    main()
