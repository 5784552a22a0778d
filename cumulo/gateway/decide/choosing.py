"""Chooser: which replica of a pool gets a request. One per pool.

Replicas of different weights form groups: a canary has a share of the requests, exactly and in turn. Within the
group the router decides, as inside one server and in the simulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cumulo.engine.decide.routing import Ask, NoReplica, ReplicaView, Route, Router, router, usable


@dataclass(slots=True)
class Chooser:
    policy: str
    _routers: dict[float, Router] = field(default_factory=dict)  # by weight: its group's
    _credit: dict[float, float] = field(default_factory=dict)  # what each group is owed

    def choose(self, ask: Ask, replicas: Sequence[ReplicaView], weights: Mapping[str, float]) -> Route:
        """Raises NoReplica where none takes it."""
        groups: dict[float, list[ReplicaView]] = {}
        for one in usable(ask, replicas):
            groups.setdefault(weights.get(one.name, 1.0), []).append(one)
        groups = {weight: members for weight, members in groups.items() if weight > 0} or groups
        weight = next(iter(groups)) if len(groups) == 1 else self._next_group(groups)
        if weight not in self._routers:
            self._routers[weight] = router(self.policy)
        route = self._routers[weight].route(ask, groups[weight])
        if len(groups) == 1:
            return route
        share = weight * len(groups[weight]) / sum(one * len(members) for one, members in groups.items())
        return Route(
            route.replica,
            route.ttft_s,
            route.cached_tokens,
            f"the turn of weight {weight:g}, which has {share:.0%} of the requests; there {route.why}",
            route.second,
        )

    def forget(self, replica: str) -> None:
        """It is gone, or has lost its cache."""
        for one in self._routers.values():
            one.forget(replica)

    def _next_group(self, groups: Mapping[float, Sequence[ReplicaView]]) -> float:
        """Smooth weighted round-robin: each group is owed its share, the one owed most is next."""
        total = 0.0
        for weight, members in groups.items():
            share = weight * len(members)
            self._credit[weight] = self._credit.get(weight, 0.0) + share
            total += share
        chosen = max(groups, key=lambda weight: self._credit[weight])
        self._credit[chosen] -= total
        return chosen


__all__ = ["Ask", "Chooser", "NoReplica", "ReplicaView", "Route"]
