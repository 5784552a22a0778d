"""A fabric link by link from the description the planner uses. Commands and tests call it."""

from cumulo.collectives.simulate.fabrics.clos import ClosGraph, ClosTier, LinkRates
from cumulo.collectives.simulate.fabrics.dragonfly import DragonflyGraph
from cumulo.collectives.simulate.fabrics.links import FabricGraph
from cumulo.errors import ConfigError
from cumulo.spec.cluster import Cluster
from cumulo.spec.fabric import tiers_of

FABRIC_SCALE_UP_LATENCY_S = (
    0.8e-6  # a step from GPU to GPU, as measured on Hopper (plan/data/collectives.yaml)
)


def fabric_graph(
    cluster: Cluster,
    card_share: float = 1.0,
    link_share: float = 1.0,
    pod_gpus: int | None = None,
) -> FabricGraph:
    """`card_share`, `link_share`: what of the line rate payload reaches. `pod_gpus`: GPUs below one spine layer,
    where they are fewer than its ports allow."""
    node, fabric = cluster.node, cluster.fabric
    rates = LinkRates(
        node.nic_bytes_per_s * card_share,
        node.device.link_bytes_per_s * link_share,
        fabric.latency_s,
        fabric.hop_latency_s,
        FABRIC_SCALE_UP_LATENCY_S,
    )
    if fabric.kind == "dragonfly":
        return DragonflyGraph(cluster.nodes * node.gpus, node.scale_up_gpus, fabric.switch_ports, rates)
    tiers = tiers_of(fabric, node, cluster.nodes)
    each = 1 if fabric.kind == "rail" else node.gpus
    found = [ClosTier(tier.name, tier.nodes * each, tier.up_ports, rates.card_bytes_per_s) for tier in tiers]
    if pod_gpus is not None:
        found = _with_pods(
            found, pod_gpus // node.gpus * each, cluster.nodes * each, fabric.oversubscription_of(1)
        )
    return ClosGraph(cluster.nodes, node.gpus, node.scale_up_gpus, fabric.kind == "rail", found, rates)


def _with_pods(tiers: list[ClosTier], pod: int, cards: int, ratio: float) -> list[ClosTier]:
    """Leaf, a spine layer that joins `pod` cards, and one core above all pods, `ratio` : 1 oversubscribed."""
    leaf = tiers[0]
    if pod < leaf.cards or pod % leaf.cards:
        raise ConfigError(
            f"a pod of {pod:,} cards is not made of leaves of {leaf.cards}; give a multiple of {leaf.cards}"
        )
    uplinks = leaf.uplinks or leaf.cards
    wanted = pod / ratio / uplinks  # links up from each spine switch
    ports = max(1, round(wanted))
    rate = leaf.bytes_per_s * wanted / ports  # so that the pod's bandwidth is exact where ports do not divide
    return [
        ClosTier("leaf", leaf.cards, uplinks, leaf.bytes_per_s),
        ClosTier("spine", pod, ports, rate),
        ClosTier("core", max(pod, cards), 0, leaf.bytes_per_s),
    ]
