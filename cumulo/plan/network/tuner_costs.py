"""What hops and bytes cost on a cluster, for the collectives' tuner: the same constants as the planner's lines."""

from cumulo.collectives.decide.tuner import MachineCosts, ProtocolCosts
from cumulo.plan.network.collectives import Network
from cumulo.plan.network.profile import network_constants
from cumulo.spec.cluster import Cluster


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
