"""Cluster: how many of which node, joined by which fabric. What every plan is made for."""

import math
from dataclasses import dataclass
from typing import Literal

from cumulo.errors import ConfigError, require_least
from cumulo.spec.device import Device, Node

FabricKind = Literal["fat-tree", "rail", "dragonfly"]


@dataclass(frozen=True, slots=True)
class Fabric:
    """How switches join network cards.

    fat-tree: every card of a node on the same leaf switch. rail: card i of every node on leaf i, so that equal
    ranks of different nodes are one switch apart (rail-optimised). dragonfly: groups of switches, all joined.
    """

    name: str
    kind: FabricKind
    transport: Literal["infiniband", "roce", "ethernet"]
    switch_ports: int  # of one switch, each at a card's rate
    oversubscription: tuple[float, ...] = (
        1.0,
    )  # bandwidth down over bandwidth up, of each tier above the leaf's
    # From card to card over one switch; every further switch adds hop_latency_s.
    latency_s: float = 2e-6
    hop_latency_s: float = 0.3e-6

    def __post_init__(self) -> None:
        if self.switch_ports < 2:
            raise ConfigError(f"fabric {self.name}: a switch needs 2 or more ports, got {self.switch_ports}")
        if not self.oversubscription or min(self.oversubscription) < 1:
            raise ConfigError(
                f"fabric {self.name}: oversubscription is 1 (none) or more for each tier, got "
                f"{list(self.oversubscription)}"
            )
        require_least(self, 0, "latency_s", "hop_latency_s", of=f"fabric {self.name}: ")

    def oversubscription_of(self, tier: int) -> float:
        """The oversubscription of the links above tier `tier` (0: the leaf's); the last number given holds for
        all tiers above it."""
        return self.oversubscription[min(tier, len(self.oversubscription) - 1)]


_MOST_TIERS = 5


@dataclass(frozen=True, slots=True)
class Tier:
    """One layer of switches, the leaves first."""

    name: str
    nodes: int  # that reach each other without going above this tier
    oversubscription: float  # of the paths above this tier: a card's rate over what is left of it; the top: 1
    down_ports: int  # of each switch
    up_ports: int


def tiers_of(fabric: Fabric, node: Node, nodes: int) -> tuple[Tier, ...]:
    """Adds as many tiers as `nodes` need. Each switch splits its ports by the tier's oversubscription; those of the
    top tier all go down."""
    if fabric.kind == "dragonfly":
        return _dragonfly(fabric, node, nodes)
    tiers: list[Tier] = []
    below, lost = 1, 1.0
    while len(tiers) < _MOST_TIERS:
        cards = 1 if tiers or fabric.kind == "rail" else node.gpus  # a rail's leaf has one card of each node
        name = ("leaf", "spine", "core", "super-core", "top")[len(tiers)]
        if below * (fabric.switch_ports // cards) >= nodes:
            return (*tiers, Tier(name, below * (fabric.switch_ports // cards), 1.0, fabric.switch_ports, 0))
        ratio = fabric.oversubscription_of(len(tiers))
        down = int(fabric.switch_ports * ratio / (1 + ratio))
        if down < cards:
            raise ConfigError(
                f"fabric {fabric.name}: a leaf switch of {fabric.switch_ports} ports has {down} for nodes, fewer "
                f"than the {cards} cards of a {node.name}; take a switch with more ports, or kind: rail"
            )
        below *= down // cards
        lost *= ratio
        tiers.append(Tier(name, below, lost, down, fabric.switch_ports - down))
    raise ConfigError(
        f"{nodes:,} nodes need more than {_MOST_TIERS} tiers of {fabric.switch_ports}-port switches "
        f"({fabric.name}); take switches with more ports"
    )


def _dragonfly(fabric: Fabric, node: Node, nodes: int) -> tuple[Tier, ...]:
    """Balanced: a = 2p = 2h switches to a group, 4h − 1 ports (Kim et al. 2008, section 3.1)."""
    cards = (fabric.switch_ports + 1) // 4
    at_switch = max(1, cards // node.gpus)
    in_group = max(1, 2 * cards * cards // node.gpus)
    groups = 2 * cards * cards + 1
    if nodes > in_group * groups:
        raise ConfigError(
            f"a dragonfly of {fabric.switch_ports}-port switches ends at {in_group * groups:,} nodes, "
            f"not {nodes:,}; take switches with more ports, or kind: fat-tree"
        )
    inside, between = fabric.oversubscription_of(0), fabric.oversubscription_of(1)
    return (
        Tier("switch", at_switch, inside, cards, 2 * cards - 1),
        Tier("group", in_group, inside * between, cards, cards),
        Tier("all groups", in_group * groups, 1.0, cards, 0),
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    node: Node
    gpus: int
    fabric: Fabric

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError(
                f"a cluster needs 1 or more GPUs, got {self.gpus}; a {self.node.name} has {self.node.gpus}"
            )
        if self.gpus > self.node.gpus and self.gpus % self.node.gpus:
            below = self.gpus // self.node.gpus * self.node.gpus
            raise ConfigError(
                f"{self.gpus} GPUs do not fill whole nodes of {self.node.gpus} ({self.node.name}); "
                f"use {below} or {below + self.node.gpus}"
            )

    @property
    def device(self) -> Device:
        return self.node.device

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.node.gpus)

    @property
    def scale_up_gpus(self) -> int:
        """GPUs that reach each other over scale-up links: the NVLink domain."""
        return min(self.gpus, self.node.scale_up_gpus)

    @property
    def power_w(self) -> float:
        """All devices at full load and the rest of their nodes; network and cooling not included."""
        return self.gpus * (self.device.power_w + self.node.power_w / self.node.gpus)

    @property
    def price_per_hour(self) -> float:
        return self.gpus * self.device.price_per_hour

    def __str__(self) -> str:
        return f"{self.gpus:,} × {self.device.name} ({self.nodes:,} × {self.node.name}, {self.fabric.name})"
