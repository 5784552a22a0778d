"""Dragonfly: groups of switches, all joined inside, each group joined to every other (Kim et al. 2008).

Balanced: with h cards to a switch a group has 2h switches of h global links each. Fewer groups than the full number
get several links to a pair. `fabric_graph` makes it.
"""

import numpy as np

from cumulo.collectives.simulate.fabrics.links import Ints, LinkRates, NodeFabric, Routing, below, hashed
from cumulo.errors import ConfigError

_HOPS = 2 + 5  # cards, and local-global-local-global-local of a path by way of a third group


class DragonflyGraph(NodeFabric):
    def __init__(self, ranks: int, domain_gpus: int, switch_ports: int, rates: LinkRates) -> None:
        self.ranks, self.domain_gpus, self.rates = ranks, domain_gpus, rates
        self.at_switch = (switch_ports + 1) // 4  # h
        self.switches = 2 * self.at_switch  # of a group
        self.in_group = self.switches * self.at_switch
        self.groups = -(-ranks // self.in_group)
        ports = self.switches * self.at_switch  # global links of a group
        if self.groups > ports + 1:
            raise ConfigError(
                f"a dragonfly of {switch_ports}-port switches ends at {(ports + 1) * self.in_group:,} cards, not "
                f"{ranks:,}; take switches with more ports"
            )
        self.parallel = ports // max(1, self.groups - 1)  # links between two groups
        self._add_own_links(rates, lambda i: f"GPU {i}", lambda i: f"switch {i // self.at_switch}")
        add, card, hop = self.links.add, rates.card_bytes_per_s, rates.hop_latency_s
        local = self.groups * self.switches**2
        self._local = add(local, card, hop, "inside groups", self._local_name)
        far = self.groups * max(1, self.groups - 1) * max(1, self.parallel)
        self._global = add(far, card, hop, "between groups", self._global_name)

    def _local_name(self, link: int) -> str:
        one, other = divmod(link, self.switches)
        return f"switch {one} → switch {one // self.switches * self.switches + other}"

    def _global_name(self, link: int) -> str:
        rest, way = divmod(link, max(1, self.parallel))
        group, away = divmod(rest, max(1, self.groups - 1))
        other = (group + away + 1) % self.groups
        mine, yours = self._port(away, way), self._port(self.groups - away - 2, way)
        return f"switch {group * self.switches + mine} → switch {other * self.switches + yours}"

    def _port(self, away: int, way: int) -> int:
        """The switch of a group that has its `way`-th link to the group `away` + 1 further."""
        return (way * (self.groups - 1) + away) // self.at_switch % self.switches

    def paths(self, source: Ints, target: Ints, keys: Ints, routing: Routing) -> Ints:
        found, far = self._near_paths(source, target, _HOPS)
        if not len(far):
            return found
        src, dst, key = source[far], target[far], keys[far]
        direct = self._by_way_of(src, dst, dst // self.in_group, key, routing)
        if routing.kind == "adaptive" and self.groups > 2:
            # Universal globally-adaptive routing, decided once: by way of a third group where the direct link is
            # more than twice as busy as the average, which is what two global hops cost.
            third = below(hashed(routing.seed, src, dst, key, 7), self.groups)
            detour = self._by_way_of(src, dst, third, key, routing)
            load = np.bincount(direct[direct >= 0], minlength=len(self.links.capacity))
            first = load[np.maximum(direct[:, 3], 0)] * (direct[:, 3] >= 0)
            links = self.groups * (self.groups - 1) * self.parallel
            long_way = first > 2 * max(1.0, len(direct) / links)
            # Of the messages on such a link, as many as it can carry stay.
            stay = below(hashed(routing.seed, src, dst, key, 8), 1 << 30) / (1 << 30) < 2 / np.maximum(
                first, 1
            )
            direct = np.where((long_way & ~stay)[:, None], detour, direct)
        found[far] = direct
        return found

    def _by_way_of(self, source: Ints, target: Ints, middle: Ints, keys: Ints, routing: Routing) -> Ints:
        path = np.full((len(source), _HOPS), -1, np.int64)
        path[:, 0], path[:, 1] = self._card_out + source, self._card_in + target
        way = below(hashed(routing.seed, source, target, keys, 3), max(1, self.parallel))
        if routing.kind == "static":
            way = target % max(1, self.parallel)
        at, end = source // self.at_switch, target // self.at_switch
        column = 2
        for goal in (middle, end // self.switches):
            here = at // self.switches
            apart = here != goal
            away = (goal - here - 1) % self.groups
            ports = way * (self.groups - 1)
            leave = here * self.switches + (ports + away) // self.at_switch % self.switches
            enter = goal * self.switches + (ports + self.groups - away - 2) // self.at_switch % self.switches
            local = apart & (at != leave)
            path[local, column] = (self._local + at * self.switches + leave % self.switches)[local]
            link = self._global + (here * max(1, self.groups - 1) + away) * max(1, self.parallel) + way
            path[apart, column + 1] = link[apart]
            at = np.where(apart, enter, at)
            column += 2
        last = at != end
        path[last, column] = (self._local + at * self.switches + end % self.switches)[last]
        return path
