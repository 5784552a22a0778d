"""What communication costs on a cluster: seconds for a collective over a group of ranks. The cost models call it.

    network = Network(cluster)                   # once for a cluster
    group = network.group(ranks=64, stride=8)    # 64 ranks, every 8th GPU: kept, so asking again is cheap
    collective_s("all_reduce", 2 * gib, group)   # seconds, when nothing else uses its links and cards

A group is `ranks` members, `stride` GPUs apart: with the mesh of `cumulo.layout.layout` (pp, dp, cp, tp)
tensor-parallel groups have stride 1, context-parallel ones tp, data-parallel ones tp × cp, pipeline neighbours
tp × cp × dp. Each member brings its own scale-up links and its own network card, so groups that lie side by side do
not share them.

Sizes are in bytes as nccl-tests counts them: all_reduce, broadcast and send_recv: the buffer; all_gather: what each
rank has afterwards; reduce_scatter: what each rank has before; all_to_all: what each rank sends, with its own part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cumulo.collectives.decide.tuner import MachineCosts, ProtocolCosts
from cumulo.errors import ConfigError
from cumulo.plan.network.lines import (
    CollectiveLine,
    Kind,
    NetworkProfile,
    Reach,
    lines,
    network_constants,
    profile_of,
)
from cumulo.spec.cluster import Cluster, tiers_of


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, where they lie, and what each collective costs them."""

    reach: Reach
    stride: int
    lines: Mapping[Kind, tuple[CollectiveLine, ...]] = field(repr=False, hash=False)

    @property
    def ranks(self) -> int:
        return self.reach.ranks


def collective_s(kind: Kind, size_bytes: float, group: Group) -> float:
    """Seconds for one collective with links and cards to itself. Reductions are of floating-point numbers."""
    best = float("inf")
    for _, _, latency_s, s_per_byte in group.lines[kind]:  # plain floats: a search asks a million times
        seconds = latency_s + size_bytes * s_per_byte
        if seconds < best:
            best = seconds
    return best


def chosen(kind: Kind, size_bytes: float, group: Group, in_switch: bool = True) -> CollectiveLine:
    """The algorithm and protocol that `collective_s` counts; `in_switch` False: numbers that the switch cannot add
    (integers), so without NVLS."""
    able = (line for line in group.lines[kind] if in_switch or not line.algorithm.startswith("nvls"))
    return min(able, key=lambda line: line.seconds(size_bytes))


class _Lines(dict[Kind, tuple[CollectiveLine, ...]]):
    """Worked out when a kind is first asked for: few groups need all of them."""

    def __init__(self, reach: Reach, profile: NetworkProfile) -> None:
        super().__init__()
        self._reach, self._profile = reach, profile

    def __missing__(self, kind: Kind) -> tuple[CollectiveLine, ...]:
        self[kind] = found = lines(kind, self._reach, self._profile, network_constants())
        return found


class Network:
    """The groups of one cluster, each worked out once."""

    def __init__(self, cluster: Cluster, profile: NetworkProfile | None = None) -> None:
        self.cluster = cluster
        self.profile = profile or profile_of(cluster.device)
        self.tiers = tiers_of(cluster.fabric, cluster.node, cluster.nodes)
        self._groups: dict[tuple[int, int], Group] = {}

    def group(self, ranks: int, stride: int = 1) -> Group:
        """`ranks` members, `stride` GPUs apart, the slowest such group of the mesh."""
        known = self._groups.get((ranks, stride))
        if known is not None:
            return known
        if ranks < 1 or stride < 1:
            raise ConfigError(
                f"a group needs 1 or more ranks and a stride of 1 or more, got {ranks} and {stride}"
            )
        reach = self._reach(ranks, stride)
        found = self._groups[ranks, stride] = Group(reach, stride, _Lines(reach, self.profile))
        return found

    def _reach(self, ranks: int, stride: int) -> Reach:
        cluster, fabric = self.cluster, self.cluster.fabric
        domain, block = cluster.node.scale_up_gpus, ranks * stride
        per_domain = max(1, min(ranks, domain // stride))
        whole_nodes = domain > cluster.node.gpus and block % cluster.node.gpus == 0
        if block < domain and domain % block and not whole_nodes:
            per_domain = -(-ranks // 2)  # groups lie one after another, and some of them across a border
        domains = -(-ranks // per_domain)
        card = cluster.node.nic_bytes_per_s * network_constants().transport_share[fabric.transport]
        apart = max(1.0, stride / cluster.node.gpus)  # nodes from a member's domain to its neighbour's
        span = max(1.0, ranks * stride / cluster.node.gpus)  # nodes over which the group lies
        near_loss = far_loss = 1.0
        latency = fabric.latency_s
        for tier in self.tiers:
            # A ring leaves a tier once for all its members in there; an all-to-all with all that are elsewhere.
            near_loss = max(near_loss, min(1.0, apart / tier.nodes) * tier.oversubscription)
            far_loss = max(far_loss, max(0.0, 1 - tier.nodes / span) * tier.oversubscription)
            if apart >= tier.nodes:
                latency += 2 * fabric.hop_latency_s
        return Reach(ranks, per_domain, domains, card / near_loss, card / far_loss, latency)


def machine_costs(cluster: Cluster) -> MachineCosts:
    network = Network(cluster)
    profile, net = network.profile, network_constants()
    reach = network.group(cluster.gpus).reach
    protocols = []
    for protocol in profile.protocols:
        far_s = net.ring_hop_s[protocol.name] + reach.net_latency_s * (2 if protocol.name == "simple" else 1)
        near_s = profile.hop_s if reach.domains == 1 else max(profile.hop_s, net.near_hop_s[protocol.name])
        protocols.append(
            ProtocolCosts(
                protocol.name,
                protocol.base_s,
                near_s,
                far_s,
                protocol.bytes_per_s,
                reach.nic_bytes_per_s * protocol.wire_share,
            )
        )
    cards = min(reach.per_domain, net.most_cards)
    return MachineCosts(cluster.node.scale_up_gpus, cards, tuple(protocols), 0.25 * profile.hop_s)
