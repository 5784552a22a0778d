"""LinkTable: every directed link of a fabric as arrays, and what a fabric must answer. The fabrics fill
it; routing, sharing and the player read it.

A rank is a GPU. A path is a row of link numbers, padded with -1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cumulo.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
RoutingKind = Literal["ecmp", "adaptive", "static"]
ROUTING_KINDS: tuple[RoutingKind, ...] = ("ecmp", "adaptive", "static")


@dataclass(frozen=True, slots=True)
class Routing:
    """How a message chooses among equal paths.

    ecmp: each queue pair by a hash of its addresses; `queue_pairs` of them share a message. static: by destination,
    as InfiniBand's tables do. adaptive: spread over all paths, packet by packet.
    """

    kind: RoutingKind = "ecmp"
    queue_pairs: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ROUTING_KINDS:
            raise ConfigError(f"routing must be {', '.join(ROUTING_KINDS)}, got {self.kind!r}")
        if self.queue_pairs < 1:
            raise ConfigError(f"a message needs 1 or more queue pairs, got {self.queue_pairs}")


@dataclass
class LinkTable:
    """Filled block by block, each of links that are alike."""

    capacity: Floats = field(default_factory=lambda: np.zeros(0))  # bytes/s
    latency: Floats = field(default_factory=lambda: np.zeros(0))  # seconds
    tier: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    tiers: list[str] = field(default_factory=list)
    _blocks: list[tuple[int, Callable[[int], str]]] = field(default_factory=list)

    def add(
        self, count: int, capacity: float, latency_s: float, tier: str, name: Callable[[int], str]
    ) -> int:
        """The number of the first of them; `name` is given their numbers from 0."""
        first = len(self.capacity)
        if tier not in self.tiers:
            self.tiers.append(tier)
        self.capacity = np.concatenate([self.capacity, np.full(count, float(capacity))])
        self.latency = np.concatenate([self.latency, np.full(count, latency_s)])
        self.tier = np.concatenate([self.tier, np.full(count, self.tiers.index(tier))])
        self._blocks.append((first, name))
        return first

    def name(self, link: int) -> str:
        first, name = next(block for block in reversed(self._blocks) if block[0] <= link)
        return name(link - first)

    def ends(self, link: int) -> tuple[str, str]:
        """The devices at the two ends of a link, for buffer dependencies; both with their site."""
        first, _, last = self.name(link).partition(" → ")
        site, apart, _ = first.rpartition(": ")
        return first, f"{site}{apart}{last}"

    def named(self, name: str) -> int:
        """The link of that name; people name the one that fails."""
        for link in range(len(self.capacity)):
            if self.name(link) == name:
                return link
        raise ConfigError(f"the fabric has no link {name!r}; the first one is {self.name(0)!r}")


class FabricGraph(ABC):
    """What the player asks of a fabric."""

    ranks: int
    links: LinkTable

    @abstractmethod
    def paths(self, source: Ints, target: Ints, keys: Ints, routing: Routing) -> Ints:
        """One row for each message; messages with equal addresses differ in their keys."""

    def fail(self, link: int, capacity: float = 0.0) -> None:
        """Change a link's capacity."""
        self.links.capacity[link] = capacity


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What one GPU's own links carry, each way, and how long a step over them takes."""

    card_bytes_per_s: float
    scale_up_bytes_per_s: float
    card_latency_s: float  # card to card over one switch
    hop_latency_s: float  # each further switch
    scale_up_latency_s: float


class NodeFabric(FabricGraph):
    """A fabric of GPUs with scale-up links inside their domain, and each with a card."""

    domain_gpus: int

    def _add_own_links(self, rates: LinkRates, gpu: Callable[[int], str], leaf: Callable[[int], str]) -> None:
        self.links = LinkTable()
        near_s, far_s, count = rates.scale_up_latency_s / 2, rates.card_latency_s / 2, self.ranks
        near, card, add = rates.scale_up_bytes_per_s, rates.card_bytes_per_s, self.links.add
        self._near_out = add(count, near, near_s, "scale-up", lambda i: f"{gpu(i)} → scale-up")
        self._near_in = add(count, near, near_s, "scale-up", lambda i: f"scale-up → {gpu(i)}")
        self._card_out = add(count, card, far_s, "cards", lambda i: f"{gpu(i)} → {leaf(i)}")
        self._card_in = add(count, card, far_s, "cards", lambda i: f"{leaf(i)} → {gpu(i)}")

    def _near_paths(self, source: Ints, target: Ints, hops: int) -> tuple[Ints, Ints]:
        """Paths inside scale-up domains, and the numbers of the messages that leave theirs."""
        near = source // self.domain_gpus == target // self.domain_gpus
        found = np.full((len(source), hops), -1, np.int64)
        found[near, 0] = self._near_out + source[near]
        found[near, 1] = self._near_in + target[near]
        found[source == target] = -1
        return found, np.flatnonzero(~near)


def hashed(seed: int, *parts: "Ints | int") -> NDArray[np.uint64]:
    """A well-mixed 64-bit number for each row (splitmix64's finaliser over the parts)."""
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = np.asarray(np.uint64(seed * 2 + 1))
        for part in parts:
            mixed = (mixed ^ np.asarray(part).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def below(mixed: NDArray[np.uint64], bound: int) -> Ints:
    return (mixed % np.uint64(bound)).astype(np.int64)
