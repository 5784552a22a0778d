"""What a fabric does to a job's flows: collisions of hashes, oversubscribed tiers, rails that are crossed,
incast."""

from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np

from cumulo.base.quantiles import quantile
from cumulo.base.quantities import quantity
from cumulo.collectives.simulate.fabrics.build import fabric_graph
from cumulo.collectives.simulate.fabrics.links import FabricGraph, Ints, Routing
from cumulo.collectives.simulate.player import RoundTraffic, play_network
from cumulo.collectives.simulate.rounds import MessageRound
from cumulo.diagnose.lint import Finding, finding
from cumulo.diagnose.lint.pfc import PacketFlow
from cumulo.spec.cluster import Cluster, tiers_of

_SEEDS = 12
_MOST_PATHS = 400  # messages whose buffers are checked for circles


def ring_flows(groups: Ints) -> tuple[Ints, Ints]:
    """Every member to the next."""
    return groups.ravel(), np.roll(groups, -1, axis=1).ravel()


def lint_collisions(cluster: Cluster, groups: Ints, queue_pairs: int = 1) -> Iterator[Finding]:
    """Slowdown of one round of these rings by hashing, over several seeds, against packets that spread."""
    graph = fabric_graph(cluster)
    source, target = ring_flows(groups)
    one = MessageRound(source, target, np.full(len(source), 1e9))
    if not _leaves_the_leaf(graph, source, target):
        yield finding("nothing-hashed")
        return

    def seconds(routing: Routing) -> float:
        return play_network(graph, [RoundTraffic("lint", [one])], routing).end_s

    ideal = seconds(Routing("adaptive"))
    found = {
        pairs: sorted(seconds(Routing("ecmp", pairs, seed)) / ideal for seed in range(_SEEDS))
        for pairs in (queue_pairs, 4 * queue_pairs)
    }
    mine, more = found[queue_pairs], found[4 * queue_pairs]
    low, high = quantile(mine, 0.05), quantile(mine, 0.95)
    mean = fmean(mine)
    yield finding(
        "ecmp-collisions", mean, low, high, "warning" if mean > 1.1 else "note", pairs=queue_pairs,
        s="s" if queue_pairs > 1 else "", mean=mean, low_end=low, high_end=high, more=4 * queue_pairs,
        with_more=fmean(more),
    )  # fmt: skip


def _leaves_the_leaf(graph: FabricGraph, source: Ints, target: Ints) -> bool:
    paths = graph.paths(source, target, np.zeros(len(source), np.int64), Routing())
    names = graph.links.tiers
    inside = [names.index(name) for name in ("scale-up", "cards") if name in names]
    return bool(((paths >= 0) & ~np.isin(graph.links.tier[paths], inside)).any())


def lint_tiers(cluster: Cluster, groups: Ints | None = None) -> Iterator[Finding]:
    tiers = tiers_of(cluster.fabric, cluster.node, cluster.nodes)
    for tier in tiers[:-1]:
        if tier.oversubscription <= 1:
            continue
        share, enough = "", False
        if groups is not None:
            source, target = ring_flows(groups)
            size = tier.nodes * cluster.node.gpus
            away = float((source // size != target // size).mean())
            need = away * tier.oversubscription
            enough = need <= 1
            told = "it is enough for them" if enough else f"which needs {need:.1f} times what it has"
            share = f" {away:.0%} of these rings' messages pass it{':' if enough else ','} {told}."
        if enough:
            yield finding("enough-uplinks", tier=tier, share=share)
        else:
            yield finding("oversubscribed", tier.oversubscription, tier=tier, share=share)


def lint_rails(cluster: Cluster, groups: Ints, axis: str) -> Iterator[Finding]:
    if cluster.fabric.kind != "rail":
        return
    near = cluster.node.gpus
    source, target = ring_flows(groups)
    far = source // cluster.node.scale_up_gpus != target // cluster.node.scale_up_gpus
    crossed = far & (source % near != target % near)
    if not crossed.any():
        return
    share = float(crossed.sum() / far.sum())
    yield finding("rails-crossed", share, share=share, axis=axis, near=near)


def lint_loops(cluster: Cluster, groups: Ints) -> tuple[PacketFlow, ...]:
    """The paths of a sample of these groups' messages, for the check of buffers."""
    graph = fabric_graph(cluster)
    source, target = ring_flows(groups)
    keep = np.linspace(0, len(source) - 1, min(_MOST_PATHS, len(source))).astype(int)
    paths = graph.paths(source[keep], target[keep], np.zeros(len(keep), np.int64), Routing())
    flows = []
    for number, path in enumerate(paths):
        edges = dict(graph.links.ends(int(link)) for link in path[path >= 0])
        starts = set(edges) - set(edges.values())
        if len(starts) != 1:
            continue
        at = starts.pop()
        way = []
        while at in edges:
            at = edges.pop(at)
            way.append(at)
        if len(way) > 1:
            flows.append(PacketFlow(f"message {number}", tuple(way[:-1]), 1.0))
    return tuple(flows)


def lint_incast(
    cluster: Cluster, state_bytes: float, storage_links: int, link_gbps: float, budget_s: float
) -> Iterator[Finding]:
    """All nodes write a checkpoint at once."""
    rate = storage_links * link_gbps * 1e9 / 8
    senders = cluster.nodes
    per_link, over = senders / storage_links, senders * cluster.node.nic_bytes_per_s / rate
    seconds = state_bytes / rate
    if over <= 1:
        return
    slow = f", which is more than the {quantity(budget_s, 's')} between two steps"
    yield finding(
        "incast", over, severity="warning" if per_link > 8 else "note", senders=senders, links=storage_links,
        per_link=per_link, over=over, size=quantity(state_bytes, "B"), time=quantity(seconds, "s"),
        slow=slow if seconds > budget_s else "", at_a_time=2 * storage_links,
    )  # fmt: skip


def data_groups(world: int, near: int, members: int) -> Ints:
    """Groups of every `near`-th GPU: the data-parallel rings next to tp = `near`."""
    block = near * members
    ranks = np.arange(world - world % block).reshape(-1, members, near)
    return ranks.transpose(0, 2, 1).reshape(-1, members)


def worst(findings: Sequence[Finding]) -> str:
    order = ("error", "warning", "note")
    return min((one.severity for one in findings), key=order.index, default="note")
