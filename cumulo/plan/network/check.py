"""The network model against what others measured: every shipped row with its prediction. Tests, the validation
command and the fitting script call it.

Measured: nccl-tests on one node (`data/collectives_measured.csv`). Published: all-reduce runs of several nodes or
whole racks, with their network stated (`data/collectives_published.yaml`). Both are our transcription.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, cast

import yaml

from cumulo.plan.network.collectives import Network, chosen
from cumulo.plan.network.lines import Kind
from cumulo.plan.network.profile import NetworkProfile
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster, Fabric


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
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    runs: Mapping[str, Mapping[str, Any]] = yaml.load("\n".join(_lines("collectives_published.yaml")), loader)
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
