"""Which replicas start and which go, so that a role has as many as its rule wants. The simulator and the live
autoscaler call it.

A replica never goes with requests on it: it drains first. One that drains is taken back before a new one starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReplicaLife:
    name: str
    state: Literal["starting", "ready", "draining"]
    requests: int = 0
    since_s: float = 0.0  # when it was ordered


@dataclass(frozen=True, slots=True)
class ScaleChanges:
    start: int = 0  # new replicas
    take_back: tuple[str, ...] = ()  # that drain
    cancel: tuple[str, ...] = ()  # that have not begun to serve
    drain: tuple[str, ...] = ()


def changes(replicas: Sequence[ReplicaLife], wanted: int) -> ScaleChanges:
    """Cheapest first: up by taking back, then by starting; down by cancelling the youngest, then by draining the
    replica with the fewest requests."""
    ready = [one for one in replicas if one.state == "ready"]
    starting = [one for one in replicas if one.state == "starting"]
    missing = wanted - len(ready) - len(starting)
    if missing >= 0:
        draining = sorted(
            (one for one in replicas if one.state == "draining"), key=lambda one: (-one.requests, one.since_s)
        )
        back = tuple(one.name for one in draining[:missing])
        return ScaleChanges(start=missing - len(back), take_back=back)
    cancel = sorted(starting, key=lambda one: -one.since_s)[:-missing]
    goes = sorted(ready, key=lambda one: (one.requests, -one.since_s))[: -missing - len(cancel)]
    return ScaleChanges(cancel=tuple(one.name for one in cancel), drain=tuple(one.name for one in goes))
