"""Fabric: the network between scale-up domains, as numbers. Part of a Cluster; the network model reads it."""

from dataclasses import dataclass
from typing import Literal

from cumulo.errors import ConfigError

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
        for name in ("latency_s", "hop_latency_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"fabric {self.name}: {name} must be 0 or more, got {getattr(self, name)}")

    def oversubscription_of(self, tier: int) -> float:
        """Of the links above tier `tier` (0: the leaf's); the last number given holds for all tiers above it."""
        return self.oversubscription[min(tier, len(self.oversubscription) - 1)]
