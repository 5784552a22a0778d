"""Policies by name, as `--policy` takes them, and a user's own from a file.

A name is an order, and optionally where gangs are placed and what else is done: `fair`, `backfill+topology`,
`priority+topology+cordon`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.decide.decisions import Cordon, Decision
from cumulo.cluster.decide.elastic import elastic
from cumulo.cluster.decide.fit import PlacerOf, emptiest, packed
from cumulo.cluster.decide.las import least_attained_service
from cumulo.cluster.decide.preemption import fair, preempting
from cumulo.cluster.decide.queueing import by_arrival, by_prediction, queue_policy
from cumulo.cluster.decide.snapshot import Policy, Snapshot
from cumulo.cluster.decide.topology import TopologyPlacer
from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    name: str
    decide: Policy
    always_decide: bool = False  # also when nothing waits: it resizes or moves what runs
    resizes: bool = False  # jobs are elastic for it
    in_rounds: bool = False  # looks at every running job: too much for every event of a large cluster


ORDERS: dict[str, Callable[[PlacerOf], Policy]] = {
    # First come, first served; nobody overtakes.
    "fifo": lambda place: queue_policy(by_arrival, place),
    # Later jobs start where they do not delay the first (EASY), or any before them.
    "backfill": lambda place: queue_policy(by_arrival, place, backfill=True),
    "conservative": lambda place: queue_policy(by_arrival, place, backfill=True, reservations=20),
    # Shortest predicted duration first, with backfill; nobody starves.
    "shortest": lambda place: queue_policy(by_prediction, place, backfill=True),
    "las": least_attained_service,
    "fair": fair,
    "priority": preempting,
    # Elastic jobs resized by marginal goodput (Pollux); in the second one short jobs count more.
    "elastic": lambda place: elastic(),
    "goodput": lambda place: elastic(short_first=0.3),
}
_RESIZING = ("elastic", "goodput")
PLACERS: dict[str, PlacerOf] = {"pack": packed, "topology": TopologyPlacer, "emptiest": emptiest}


def cordoning(policy: Policy, failures: int = 3, at_most: float = 0.05) -> Policy:
    """Nodes with so many recent failures get no more tasks; never more than `at_most` of all nodes."""

    def wrapped(snapshot: Snapshot) -> list[Decision]:
        bad = [node for node in snapshot.nodes if node.failures >= failures and node.health == "ready"]
        if bad:
            out = sum(node.health != "ready" for node in snapshot.nodes)
            bad.sort(key=lambda node: -node.failures)
            bad = bad[: max(0, int(at_most * len(snapshot.nodes)) - out)]
        if bad:  # the next decision sees them cordoned
            return [Cordon(node.name, f"it failed {node.failures} times") for node in bad]
        return policy(snapshot)

    return wrapped


def policy_named(name: str) -> NamedPolicy:
    if ":" in name:
        return NamedPolicy(name, _from_file(name), always_decide=True)
    order, *more = name.split("+")
    if order not in ORDERS:
        raise ConfigError(
            f"there is no policy {order!r}{did_you_mean(order, ORDERS)} (or FILE.py:FUNCTION, a policy of your own)"
        )
    place = PLACERS["pack"]
    for part in more:
        if part != "cordon" and part not in PLACERS:
            raise ConfigError(f"there is no placement {part!r}{did_you_mean(part, [*PLACERS, 'cordon'])}")
        place = PLACERS.get(part, place)
    decide = ORDERS[order](place)
    if "cordon" in more:
        decide = cordoning(decide)
    resizes = order in _RESIZING
    return NamedPolicy(name, decide, resizes, resizes, in_rounds=resizes or order == "las")


def _from_file(name: str) -> Policy:
    """`my_policy.py:function`: one function of the snapshot."""
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError(f"{name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("cumulo_user_policy", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{name}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"{name}: {path} has no function {function}")
    return found  # type: ignore[no-any-return]
