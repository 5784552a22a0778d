"""What collectives cost on a device generation and a transport, as numbers. The network model reads them.

The numbers, what they rest on and how many of them were fitted is said in `data/collectives.yaml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from cumulo.spec.device import Device

# Payload over bytes sent: LL sends 4 bytes of flag with 4 of data, LL128 8 with 120.
WIRE_SHARE = {"ll": 0.5, "ll128": 120 / 128, "simple": 1.0}
NVLS_FROM_GPUS = 5  # NCCL leaves smaller domains to rings


@dataclass(frozen=True, slots=True)
class Protocol:
    """How data and flags travel (LL, LL128, Simple): what a collective costs before its first byte."""

    name: str
    base_s: float
    bytes_per_s: float  # of payload, round a ring

    @property
    def wire_share(self) -> float:
        return WIRE_SHARE[self.name]


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """One device's collectives inside a scale-up domain."""

    ll: Protocol
    ll128: Protocol
    simple: Protocol
    hop_s: float  # one step from GPU to GPU
    copy_bytes_per_s: float  # a rank's own part, from its send to its receive buffer
    nvls_s: float  # for each member
    nvls_bytes_per_s: float  # payload of an all-reduce in the switch; 0: it has none
    peer_bytes_per_s: float  # all-to-all of short messages: to each peer
    direct_s: float  # all-to-all of middling messages, before their first byte
    ll_far_bytes_per_s: tuple[float, float]  # between two domains, between more
    evidence: str

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        return self.ll, self.ll128, self.simple


@dataclass(frozen=True, slots=True)
class NetworkConstants:
    """What a step between scale-up domains costs, whatever the device."""

    ring_hop_s: Mapping[str, float]
    tree_hop_s: Mapping[str, float]
    nvls_tree_hop_s: float
    near_hop_s: Mapping[str, float]  # a step inside a domain while the network takes part
    chunk_bytes: int
    channel_bytes_per_s: float
    most_cards: int
    transport_share: Mapping[str, float]


def profile_of(device: Device) -> NetworkProfile:
    profiles = _tables()["profiles"]
    over_pcie = device.link_kind.startswith(("pcie", "memory"))
    name = "pcie" if over_pcie else device.generation if device.generation in profiles else "link"
    return profile_from(profiles[name], device)


def profile_from(table: Mapping[str, Any], device: Device) -> NetworkProfile:
    """A table of `data/collectives.yaml` (or one being fitted), with a device's own rates filled in."""
    ring = table["ring_share"] * device.link_bytes_per_s
    return NetworkProfile(
        ll=Protocol("ll", table["ll_us"] * 1e-6, table["ll_share"] * ring),
        ll128=Protocol("ll128", table["ll128_us"] * 1e-6, table["ll128_share"] * ring),
        simple=Protocol("simple", table["simple_us"] * 1e-6, ring),
        hop_s=table["hop_us"] * 1e-6,
        copy_bytes_per_s=table["copy_share"] * device.memory_bytes_per_s,
        nvls_s=table["nvls_us"] * 1e-6,
        nvls_bytes_per_s=table["nvls_share"] * device.link_bytes_per_s,
        peer_bytes_per_s=table["peer_gbps"] * 1e9,
        direct_s=table["direct_us"] * 1e-6,
        ll_far_bytes_per_s=(table["ll_far_gbps"][0] * 1e9, table["ll_far_gbps"][1] * 1e9),
        evidence=table["evidence"],
    )


@cache
def network_constants() -> NetworkConstants:
    table = _tables()["network"]
    return NetworkConstants(
        ring_hop_s=_seconds(table["ring_us"]),
        tree_hop_s=_seconds(table["tree_us"]),
        nvls_tree_hop_s=table["nvls_tree_us"] * 1e-6,
        near_hop_s=_seconds(table["near_us"]),
        chunk_bytes=table["chunk_bytes"],
        channel_bytes_per_s=table["channel_gbps"] * 1e9,
        most_cards=table["most_cards"],
        transport_share=_tables()["transport_share"],
    )


def _seconds(microseconds: Mapping[str, float]) -> dict[str, float]:
    return {name: value * 1e-6 for name, value in microseconds.items()}


@cache
def _tables() -> Mapping[str, Any]:
    text = (resources.files("cumulo.plan") / "data" / "collectives.yaml").read_text("utf-8")
    tables: Mapping[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables
