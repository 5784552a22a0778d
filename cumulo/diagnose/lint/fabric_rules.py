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
from cumulo.diagnose.lint import Finding
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
        yield Finding(
            "note",
            "ecmp-collisions",
            "No message of these groups leaves its leaf switch: nothing is hashed.",
            "",
            "",
        )
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
    yield Finding(
        "warning" if mean > 1.1 else "note",
        "ecmp-collisions",
        f"With {queue_pairs} queue pair{'s' if queue_pairs > 1 else ''} for each message, hashing makes a "
        f"round of these rings {mean:.2f} times as "
        f"long (90%: {low:.2f} to {high:.2f}).",
        f"{4 * queue_pairs} queue pairs (NCCL_IB_QPS_PER_CONNECTION), or adaptive routing",
        f"{fmean(more):.2f} times with {4 * queue_pairs} queue pairs, 1.00 with adaptive routing",
        mean,
        low,
        high,
    )


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
        share = ""
        if groups is not None:
            source, target = ring_flows(groups)
            size = tier.nodes * cluster.node.gpus
            away = float((source // size != target // size).mean())
            need = away * tier.oversubscription
            share = (
                f" {away:.0%} of these rings' messages pass it, which needs {need:.1f} times what it has."
                if need > 1
                else (f" {away:.0%} of these rings' messages pass it: it is enough for them.")
            )
            if need <= 1:
                yield Finding(
                    "note",
                    "oversubscribed",
                    f"Above the {tier.name} switches bandwidth is {tier.oversubscription:g} : 1.{share}",
                    "",
                    "",
                )
                continue
        yield Finding(
            "warning",
            "oversubscribed",
            f"Above the {tier.name} switches ({tier.nodes:,} nodes each) bandwidth is "
            f"{tier.oversubscription:g} : 1.{share}",
            f"keep groups that talk most within {tier.nodes:,} nodes (topology-aware placement), or add uplinks",
            f"up to {tier.oversubscription:g} times the bandwidth for what passes it",
            tier.oversubscription,
        )


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
    yield Finding(
        "warning",
        "rails-crossed",
        f"{share:.0%} of the {axis} messages between nodes change rails.",
        f"make tp × cp a multiple of {near}, or use rings over rails (multi-ring), so that equal GPUs of "
        f"nodes are neighbours",
        "these messages stay below one leaf switch and off the NVLink of the sender's node",
        share,
    )


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
    per_link = senders / storage_links
    seconds = state_bytes / rate
    offered = senders * cluster.node.nic_bytes_per_s
    if offered <= rate:
        return
    slow = (
        f", which is more than the {quantity(budget_s, 's')} between two steps" if seconds > budget_s else ""
    )
    yield Finding(
        "warning" if per_link > 8 else "note",
        "incast",
        f"At a checkpoint {senders:,} nodes write to {storage_links} storage links, {per_link:.0f} to one: "
        f"they are offered "
        f"{offered / rate:.0f} times their rate. {quantity(state_bytes, 'B')} take {quantity(seconds, 's')}{slow}.",
        f"let {max(1, int(storage_links * 2))} nodes write at a time, put storage in a traffic class of its "
        f"own, and write asynchronously",
        "no pauses for the training's own messages while a checkpoint is written",
        offered / rate,
    )


def data_groups(world: int, near: int, members: int) -> Ints:
    """Groups of every `near`-th GPU: the data-parallel rings next to tp = `near`."""
    block = near * members
    ranks = np.arange(world - world % block).reshape(-1, members, near)
    return ranks.transpose(0, 2, 1).reshape(-1, members)


def worst(findings: Sequence[Finding]) -> str:
    order = ("error", "warning", "note")
    return min((one.severity for one in findings), key=order.index, default="note")
