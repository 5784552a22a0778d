"""Clos fabrics of any number of tiers: fat-trees and rails, with scale-up domains below. `fabric_graph` makes them.

A plane joins cards: one plane for all cards of a fat-tree, one for each rail. Cards are grouped tier by tier; the
group of tier t has the switches of its columns, and uplink j of every one of them leads to column j of the
tier above. So a path up is the list of the j chosen, and the path down follows from it. Two cards on
different rails are joined through the scale-up links of the sender's node (NCCL's PXN).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cumulo.collectives.simulate.fabrics.links import Ints, LinkRates, NodeFabric, Routing, below, hashed
from cumulo.errors import ConfigError

_TRIES = 16  # other hashes for a path that has lost a link


@dataclass(frozen=True, slots=True)
class ClosTier:
    """One layer of switches of a plane."""

    name: str
    cards: int  # that one group of this tier joins
    uplinks: int  # of each switch; 0: the top
    bytes_per_s: float  # of each uplink


class ClosGraph(NodeFabric):
    def __init__(
        self,
        nodes: int,
        node_gpus: int,
        domain_gpus: int,
        rails: bool,
        tiers: Sequence[ClosTier],
        rates: LinkRates,
    ) -> None:
        self.ranks, self.nodes, self.node_gpus = nodes * node_gpus, nodes, node_gpus
        self.domain_gpus, self.rails, self.tiers, self.rates = domain_gpus, rails, tuple(tiers), rates
        self.planes = node_gpus if rails else 1
        self.cards = self.ranks // self.planes  # of one plane
        if self.tiers[-1].uplinks or self.tiers[-1].cards < self.cards:
            raise ConfigError(
                f"the top tier joins {self.tiers[-1].cards:,} cards of {self.cards:,}; add a tier, or take "
                f"switches "
                "with more ports"
            )
        self._add_own_links(rates, self._gpu, self._leaf)
        self._columns = [1]
        self._groups = []
        for tier in self.tiers:
            self._groups.append(-(-self.cards // tier.cards))
            self._columns.append(self._columns[-1] * max(1, tier.uplinks))
        self._up: list[int] = []  # the first link of each level, and of what adaptive routing sees of it
        self._down: list[int] = []
        self._trunk_up: list[int] = []
        self._trunk_down: list[int] = []
        for level in range(len(self.tiers) - 1):
            self._add_level(level)

    def _add_level(self, level: int) -> None:
        tier, add = self.tiers[level], self.links.add
        each = self._columns[level + 1]  # links up from one group
        count, hop = self.planes * self._groups[level] * each, self.rates.hop_latency_s
        name = f"{tier.name}-{self.tiers[level + 1].name}"

        def ends(link: int) -> tuple[str, str]:
            group, column = divmod(link, each)
            low, uplink = divmod(column, tier.uplinks)
            high = self._group_above(group, level)
            return self._switch(level, group, low), self._switch(level + 1, high, low * tier.uplinks + uplink)

        self._up.append(add(count, tier.bytes_per_s, hop, name, lambda i: " → ".join(ends(i))))
        self._down.append(add(count, tier.bytes_per_s, hop, name, lambda i: " → ".join(reversed(ends(i)))))
        # What packet-by-packet spreading sees: all links up from a group as one.
        trunks, whole = self.planes * self._groups[level], tier.bytes_per_s * each
        spread = f"all uplinks of {tier.name}"
        self._trunk_up.append(add(trunks, whole, hop, name, lambda i: f"{spread} group {i}"))
        self._trunk_down.append(
            add(trunks, whole, hop, name, lambda i: f"all links down to {tier.name} group {i}")
        )

    def _group_above(self, group: int, level: int) -> int:
        plane, local = divmod(group, self._groups[level])
        return (
            plane * self._groups[level + 1] + local * self.tiers[level].cards // self.tiers[level + 1].cards
        )

    def _gpu(self, rank: int) -> str:
        return f"node {rank // self.node_gpus} GPU {rank % self.node_gpus}"

    def _leaf(self, rank: int) -> str:
        plane, card = self._card(np.asarray(rank))
        return self._switch(0, int(plane) * self._groups[0] + int(card) // self.tiers[0].cards, 0)

    def _switch(self, level: int, group: int, column: int) -> str:
        """Numbers start at 0 in each tier; a rail's switches are numbered rail by rail."""
        return f"{self.tiers[level].name} {group * self._columns[level] + column}"

    def _card(self, ranks: Ints) -> tuple[Ints, Ints]:
        """Plane, and place in the plane."""
        if self.rails:
            return ranks % self.node_gpus, ranks // self.node_gpus
        return np.zeros_like(ranks), ranks

    def paths(self, source: Ints, target: Ints, keys: Ints, routing: Routing) -> Ints:
        found, far = self._near_paths(source, target, 4 + 2 * (len(self.tiers) - 1))
        if len(far):
            found[far] = self._far(source[far], target[far], keys[far], routing)
        return found

    def _far(self, source: Ints, target: Ints, keys: Ints, routing: Routing) -> Ints:
        found = np.full((len(source), 4 + 2 * (len(self.tiers) - 1)), -1, np.int64)
        sender = source
        if self.rails:  # on the receiver's rail, from the neighbour that has it
            sender = source // self.node_gpus * self.node_gpus + target % self.node_gpus
            crossed = sender != source
            found[crossed, 0] = self._near_out + source[crossed]
            found[crossed, 1] = self._near_in + sender[crossed]
        found[:, 2] = self._card_out + sender
        found[:, 3] = self._card_in + target
        if routing.kind == "adaptive":
            self._spread(found, sender, target)
        else:
            self._climb(found, sender, target, keys, routing)
        return found

    def _spread(self, found: Ints, source: Ints, target: Ints) -> None:
        plane, here = self._card(source)
        _, there = self._card(target)
        for level, tier in enumerate(self.tiers[:-1]):
            apart = here // tier.cards != there // tier.cards
            base = plane * self._groups[level]
            up, down = 4 + 2 * level, 5 + 2 * level
            found[apart, up] = (self._trunk_up[level] + base + here // tier.cards)[apart]
            found[apart, down] = (self._trunk_down[level] + base + there // tier.cards)[apart]

    def _climb(self, found: Ints, source: Ints, target: Ints, keys: Ints, routing: Routing) -> None:
        plane, here = self._card(source)
        _, there = self._card(target)
        open_ = np.arange(len(source))
        for attempt in range(_TRIES):
            column = np.zeros(len(open_), np.int64)
            for level, tier in enumerate(self.tiers[:-1]):
                mine, yours = here[open_] // tier.cards, there[open_] // tier.cards
                if routing.kind == "static":
                    chosen = (there[open_] // self._columns[level] + attempt) % tier.uplinks
                else:
                    salt = level * _TRIES + attempt
                    mixed = hashed(routing.seed, source[open_], target[open_], keys[open_], salt)
                    chosen = below(mixed, tier.uplinks)
                column = column * tier.uplinks + chosen
                each, base, apart = (
                    self._columns[level + 1],
                    plane[open_] * self._groups[level],
                    mine != yours,
                )
                rows = open_[apart]
                found[rows, 4 + 2 * level] = (self._up[level] + (base + mine) * each + column)[apart]
                found[rows, 5 + 2 * level] = (self._down[level] + (base + yours) * each + column)[apart]
            path = found[open_][:, 4:]
            dead = ((self.links.capacity[path] <= 0) & (path >= 0)).any(axis=1)
            open_ = open_[dead]
            if not len(open_):
                return

    def fail(self, link: int, capacity: float = 0.0) -> None:
        """Change one link; what spreads over it loses its share."""
        lost = self.links.capacity[link] - capacity
        self.links.capacity[link] = capacity
        for level in range(len(self.tiers) - 1):
            each = self._columns[level + 1]
            count = self.planes * self._groups[level] * each
            for first, trunks in (
                (self._up[level], self._trunk_up[level]),
                (self._down[level], self._trunk_down[level]),
            ):
                if first <= link < first + count:
                    self.links.capacity[trunks + (link - first) // each] -= lost
