"""Cluster: how many of which node, joined by which fabric. What every plan is made for."""

import math
from dataclasses import dataclass

from cumulo.errors import ConfigError
from cumulo.spec.device import Device, Node
from cumulo.spec.fabric import Fabric


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
