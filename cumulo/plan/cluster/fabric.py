"""The fabric of a cluster, counted, and where a job's traffic goes in it. The cluster planner calls it."""

import math
from dataclasses import dataclass, replace

from cumulo.errors import ConfigError
from cumulo.plan.cluster.sheet import Sheet
from cumulo.plan.job import TrainJob
from cumulo.plan.network.collectives import Group, Network
from cumulo.plan.time.step import estimate
from cumulo.spec.cluster import Cluster, Tier, tiers_of


@dataclass(frozen=True, slots=True)
class TierCount:
    """One layer of switches, and the cables from it to the layer below (the leaves': to the nodes)."""

    tier: Tier
    key: str  # in the sheet's names: "leaf" has leaf_switches, leaf_cables and leaf_bytes_per_s
    switches: int
    cables_down: int
    bytes_per_s_down: float  # of all those cables together, each way


def count_switches(cluster: Cluster, tiers: tuple[Tier, ...], sheet: Sheet) -> tuple[TierCount, ...]:
    """What has to be bought. Ports that a part-filled tier leaves free are counted with their switches."""
    sheet.fill("cards")
    if cluster.fabric.kind == "dragonfly":
        found = _count_dragonfly(tiers, sheet)
    else:
        found = _count_tree(cluster, tiers, sheet)
    switches, cables = (
        " + ".join(f"{count.key}_{what}" for count in found) for what in ("switches", "cables")
    )
    sheet.fill("fabric", switches=switches, cables=cables)
    return found


def _count_tree(cluster: Cluster, tiers: tuple[Tier, ...], sheet: Sheet) -> tuple[TierCount, ...]:
    found: list[TierCount] = []
    cables = "cards"
    for index, tier in enumerate(tiers):
        key = tier.name.replace("-", "_")
        _ports(tier, key, sheet)
        if index:
            switches = f"ceil({cables} / {key}_down)"
        elif cluster.fabric.kind == "rail":
            switches = f"gpus_per_node * ceil(nodes / {key}_down)"
        else:
            switches = f"ceil(nodes / floor({key}_down / gpus_per_node))"
        found.append(_count(tier, key, switches, cables, sheet))
        if tier.up_ports:
            sheet.fill("tier uplinks", key=key, name=tier.name)
            cables = f"{key}_uplinks"
    return tuple(found)


def _count_dragonfly(tiers: tuple[Tier, ...], sheet: Sheet) -> tuple[TierCount, ...]:
    """2h switches to a group, each with h cards, 2h − 1 cables inside the group and h out of it; a cable has two
    ends (Kim et al. 2008)."""
    switch, group, everything = tiers
    _ports(switch, "switch", sheet)
    return (
        _count(switch, "switch", "ceil(cards / switch_down)", "cards", sheet),
        _count(group, "group", "0", "floor(switch_switches * switch_up / 2)", sheet),
        _count(everything, "all", "0", "floor(switch_switches * switch_down / 2)", sheet),
    )


def _ports(tier: Tier, key: str, sheet: Sheet) -> None:
    sheet.fill("tier ports", {f"{key}_down": tier.down_ports}, key=key, name=tier.name)
    if tier.up_ports:
        sheet.fill("tier ports up", {f"{key}_up": tier.up_ports}, key=key, name=tier.name)


def _count(tier: Tier, key: str, switches: str, cables: str, sheet: Sheet) -> TierCount:
    sheet.fill("tier switches", key=key, name=tier.name, switches=switches, cables=cables)
    rate = sheet[f"{key}_bytes_per_s"]
    return TierCount(tier, key, int(sheet[f"{key}_switches"]), int(sheet[f"{key}_cables"]), rate)


@dataclass(frozen=True, slots=True)
class FabricChoice:
    """The same job on another fabric. The sheet has its step_s, switches and cables under `key`."""

    key: str
    name: str


def other_fabrics(job: TrainJob, cluster: Cluster, sheet: Sheet) -> tuple[FabricChoice, ...]:
    """Rail and fat-tree with the switches of this fabric, at several oversubscriptions above the leaves."""
    found: list[FabricChoice] = []
    # The sheet's step may be a mean over software.
    scaled = sheet["step_s"] / estimate(job, replace(cluster, gpus=job.layout.world), explain=False).step_s
    for kind in ("rail", "fat-tree"):
        for ratio in (1, 2, 4):
            name = f"{kind}, {ratio} : 1"
            key = f"{kind.replace('-', '_')}_{ratio}"
            fabric = replace(cluster.fabric, name=name, kind=kind, oversubscription=(float(ratio),))
            whole = replace(cluster, fabric=fabric)
            try:
                tiers = tiers_of(fabric, whole.node, whole.nodes)
            except ConfigError:
                continue  # switches with too few ports for this kind
            scratch = Sheet()
            for known in ("nodes", "gpus_per_node", "nic_bytes_per_s"):
                scratch.given(known, sheet[known], "", known, "")
            count_switches(whole, tiers, scratch)
            step_s = estimate(job, replace(whole, gpus=job.layout.world), explain=False).step_s
            given = {
                f"{key}_switches": scratch["switches"],
                f"{key}_cables": scratch["cables"],
                f"{key}_step_s": scaled * step_s,
            }
            sheet.fill("other fabric", given, key=key, name=name)
            found.append(FabricChoice(key, name))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """One parallel axis of a job: who talks, how far. The sheet has dp_bytes and dp_share, and so on."""

    axis: str
    ranks: int
    stride: int  # GPUs from one member to the next
    where: str  # "scale-up", or the highest tier of switches that it passes


def traffic_of(
    job: TrainJob, network: Network, link_bytes: dict[str, float], sheet: Sheet
) -> tuple[AxisTraffic, ...]:
    """By axis, those that stay nearest first."""
    found: list[AxisTraffic] = []
    for axis, (ranks, stride) in job.axes.items():
        if axis not in link_bytes:
            continue
        group = network.group(ranks, stride)
        where = _where(group, network)
        found.append(AxisTraffic(axis, ranks, stride, where))
        sheet.fill("axis", {f"{axis}_bytes": link_bytes[axis]}, axis=axis)
        if where == "scale-up":
            sheet.fill("axis in a domain", axis=axis)
            continue
        if axis == "ep":  # each member sends its own share to all that are elsewhere
            sent = "ep_bytes * (ep_ranks - ep_near) / (ep_ranks - 1)"
            how = "all-to-all: to members elsewhere"
        else:  # ring: of a domain's members one sends on
            sent, how = f"{axis}_bytes / {axis}_near", "one in each domain's members sends on"
        given = {f"{axis}_near": group.reach.per_domain, f"{axis}_ranks": ranks}
        sheet.fill("axis between domains", given, axis=axis, sent=sent, how=how)
    return tuple(sorted(found, key=lambda traffic: traffic.stride))


def _where(group: Group, network: Network) -> str:
    if group.reach.domains == 1:
        return "scale-up"
    span = math.ceil(group.ranks * group.stride / network.cluster.node.gpus)  # nodes
    return next(tier.name for tier in network.tiers if tier.nodes >= span or tier is network.tiers[-1])
