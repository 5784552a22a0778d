"""The lines of a collective: latency + bytes × seconds per byte, for each algorithm and protocol that could carry
it out. `network.Group` keeps them and takes the lowest at a given size; nothing else calls this.

Each line comes from playing the algorithm's schedule (`collectives.decide.play_cost`): latency = base + hops × time
of a hop, and bytes on the busiest link over its rate. What a hop and a byte cost is NCCL's own tuning model
(v2.30.7, src/graph/tuning.cc), corrected by measurement (`data/collectives.yaml`). S: bytes as nccl-tests counts
them: all ranks' parts together.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from cumulo.base.strict import package_yaml
from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.play_cost import PlayedCost, play_cost
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


def _tables() -> Any:
    return package_yaml("cumulo.plan", "data/collectives.yaml")


_UNIT = 64  # elements of a block: every share of the buffer is a whole number of them
_MOST_NODES = 256  # of a tree that is played whole; each doubling adds a level, up and down


@cache
def played_ring(kind: str, ranks: int, per_domain: int) -> PlayedCost:
    """Domains of which the last is not full take as many hops as full ones."""
    if kind == "broadcast":
        return play_cost(make_schedule("broadcast", "chain", CollectiveShape(ranks, _UNIT)), per_domain)
    full = -(-ranks // per_domain) * per_domain
    played = play_cost(make_schedule(kind, "ring", CollectiveShape(full, full * _UNIT)), per_domain)
    if full == ranks:
        return played
    own = make_schedule(kind, "ring", CollectiveShape(ranks, ranks * _UNIT))
    return replace(played, near_load=play_cost(own, ranks).near_load, far_load=play_cost(own, 1).far_load)


@cache
def played_tree(domains: int) -> PlayedCost:
    """A double binary tree of domains."""
    levels = 0
    while domains > _MOST_NODES:
        domains, levels = -(-domains // 2), levels + 1
    played = play_cost(make_schedule("all_reduce", "tree", CollectiveShape(domains, domains * _UNIT)), 1)
    return replace(played, far_hops=played.far_hops + 2 * levels)


@cache
def played_chain(members: int) -> PlayedCost:
    """The chain of one domain's members that hangs on the tree."""
    shape = CollectiveShape(members, members * _UNIT, node_size=members)
    return play_cost(make_schedule("all_reduce", "tree", shape), members)


@cache
def played_switch(members: int) -> PlayedCost:
    return play_cost(
        make_schedule("all_reduce", "sharp", CollectiveShape(members, _UNIT, radix=members)), members
    )


@cache
def played_direct(ranks: int, per_domain: int) -> PlayedCost:
    full = -(-ranks // per_domain) * per_domain
    played = play_cost(make_schedule("all_to_all", "direct", CollectiveShape(full, full)), per_domain)
    if full == ranks:
        return played
    far = (ranks - per_domain) / ranks
    return replace(played, near_load=(per_domain - 1) / ranks, far_rank_load=far, most_messages=ranks - 1)


@cache
def played_pair(far: bool) -> PlayedCost:
    return play_cost(make_schedule("broadcast", "chain", CollectiveShape(2, _UNIT)), 1 if far else 2)


Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]


class CollectiveLine(NamedTuple):
    """time = latency_s + bytes × s_per_byte."""

    algorithm: str  # ring, tree, nvls, nvls-tree, direct
    protocol: str  # ll, ll128, simple
    latency_s: float
    s_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.s_per_byte


@dataclass(frozen=True, slots=True)
class Reach:
    """How a group lies on the machine: what the formulas need of the topology."""

    ranks: int  # n
    per_domain: int  # g, members joined by scale-up links
    domains: int  # k
    nic_bytes_per_s: float  # of each member, to its neighbour's domain: after transport and oversubscription
    far_nic_bytes_per_s: float  # the same to all other domains at once, as an all-to-all needs it
    net_latency_s: float  # card to card, over the switches between neighbours


def lines(
    kind: Kind, reach: Reach, profile: NetworkProfile, net: NetworkConstants
) -> tuple[CollectiveLine, ...]:
    if reach.ranks == 1:
        return (CollectiveLine("none", "none", 0.0, 0.0),)
    if kind in ("all_to_all", "send_recv"):
        return tuple(_direct(kind, reach, profile, net))
    found = [_ring(kind, protocol, reach, profile, net) for protocol in profile.protocols]
    if kind == "all_reduce":
        if reach.domains > 1:
            found += [_tree(protocol, reach, profile, net) for protocol in profile.protocols]
        if profile.nvls_bytes_per_s and reach.per_domain >= NVLS_FROM_GPUS:
            found.append(_nvls(reach, profile, net))
    return tuple(found)


def _ring(
    kind: Kind, protocol: Protocol, reach: Reach, profile: NetworkProfile, net: NetworkConstants
) -> CollectiveLine:
    played = played_ring(kind, reach.ranks, reach.per_domain)
    hop, rate = profile.hop_s, protocol.bytes_per_s
    load = played.near_load or played.far_load
    s_per_byte = load / rate
    if reach.domains > 1:
        hop = max(hop, net.near_hop_s[protocol.name])
        s_per_byte = load / _far_ring_rate(protocol, reach, profile)
        s_per_byte = max(s_per_byte, played.far_load / _cards(protocol, reach, net))
    latency = protocol.base_s + played.near_hops * hop
    latency += played.far_hops * _far_hop_s(net.ring_hop_s, protocol, reach)
    if kind in ("all_gather", "reduce_scatter"):
        s_per_byte += 1 / (reach.ranks * profile.copy_bytes_per_s)
    return CollectiveLine("ring", protocol.name, latency, s_per_byte)


def _tree(protocol: Protocol, reach: Reach, profile: NetworkProfile, net: NetworkConstants) -> CollectiveLine:
    """Every hop of a piece waits for the piece before it, so a pipeline fills chunk by chunk."""
    near, far = played_chain(reach.per_domain), played_tree(reach.domains)
    s_per_byte = max(
        far.far_load / _cards(protocol, reach, net), near.near_load / _far_ring_rate(protocol, reach, profile)
    )
    latency = protocol.base_s + near.near_hops * max(profile.hop_s, net.near_hop_s[protocol.name])
    latency += far.far_hops * _far_hop_s(net.tree_hop_s, protocol, reach)
    if protocol.name != "ll":
        channel = min(net.channel_bytes_per_s, 2 * reach.nic_bytes_per_s)
        latency += (near.near_hops + far.far_hops) * net.chunk_bytes / channel
    return CollectiveLine("tree", protocol.name, latency, s_per_byte)


def _nvls(reach: Reach, profile: NetworkProfile, net: NetworkConstants) -> CollectiveLine:
    """The switch adds up, member after member; between domains a tree, each level of which waits for its switch."""
    inside = played_switch(reach.per_domain)
    switch = profile.nvls_s * inside.most_messages
    s_per_byte = inside.near_load / profile.nvls_bytes_per_s
    if reach.domains == 1:
        return CollectiveLine("nvls", "simple", switch, s_per_byte)
    far = played_tree(reach.domains)
    latency = far.far_hops * (switch + net.nvls_tree_hop_s + 2 * reach.net_latency_s)
    s_per_byte = max(s_per_byte, far.far_load / _cards(profile.simple, reach, net))
    return CollectiveLine("nvls-tree", "simple", latency, s_per_byte)


def _cards(protocol: Protocol, reach: Reach, net: NetworkConstants) -> float:
    """Payload that leaves a domain per second, over the cards of its members."""
    return min(reach.per_domain, net.most_cards) * reach.nic_bytes_per_s * protocol.wire_share


def _far_ring_rate(protocol: Protocol, reach: Reach, profile: NetworkProfile) -> float:
    """What a ring through several domains reaches where cards are no limit."""
    if protocol is profile.ll:
        return min(protocol.bytes_per_s, profile.ll_far_bytes_per_s[min(reach.domains, 3) - 2])
    return protocol.bytes_per_s if reach.per_domain > 1 else math.inf


def _direct(
    kind: Kind, reach: Reach, profile: NetworkProfile, net: NetworkConstants
) -> Iterator[CollectiveLine]:
    """Everybody sends to everybody at once (send_recv: to one); links and cards work side by side. With LL there is
    one channel for each peer, so all of them take as long as one; Simple begins on few channels, then takes all."""
    one = kind == "send_recv"
    played = played_pair(reach.domains > 1) if one else played_direct(reach.ranks, reach.per_domain)
    part = 1.0 if one else 1 / reach.ranks  # of S, what one peer is sent
    copy = 0.0 if one else part / profile.copy_bytes_per_s  # of what a rank keeps
    card = reach.nic_bytes_per_s if one else reach.far_nic_bytes_per_s
    starts = 0.25 * profile.hop_s * played.most_messages
    for protocol, base, s_per_byte in (
        (profile.ll, profile.ll.base_s + profile.hop_s, part / profile.peer_bytes_per_s),
        (profile.simple, profile.direct_s, played.near_load / profile.ll128.bytes_per_s),
        (profile.simple, profile.simple.base_s, played.near_load / profile.simple.bytes_per_s),
    ):
        latency = base + starts
        if played.far_hops:
            latency += played.far_hops * _far_hop_s(net.ring_hop_s, protocol, reach)
            s_per_byte = max(s_per_byte, played.far_rank_load / (card * protocol.wire_share))
        yield CollectiveLine("direct", protocol.name, latency, s_per_byte + copy)


def _far_hop_s(hops: Mapping[str, float], protocol: Protocol, reach: Reach) -> float:
    """NCCL counts the network's latency twice for Simple, which must flush."""
    return hops[protocol.name] + reach.net_latency_s * (2 if protocol.name == "simple" else 1)
