"""Policies by name, as `--policy` takes them, and a user's own from a file.

A name is an order, and optionally where gangs are placed and what else is done: `fair`, `backfill+topology`,
`priority+defrag+cordon`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.decide.elastic import elastic
from cumulo.cluster.decide.fair import fair
from cumulo.cluster.decide.fit import PlacerOf, emptiest, packed
from cumulo.cluster.decide.las import least_attained_service
from cumulo.cluster.decide.preemption import preempting
from cumulo.cluster.decide.queueing import by_arrival, by_prediction, queue_policy
from cumulo.cluster.decide.snapshot import Policy
from cumulo.cluster.decide.topology import TopologyPlacer
from cumulo.cluster.decide.upkeep import cordoning, defragmenting
from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    name: str
    decide: Policy
    always_decide: bool = False  # also when nothing waits: it resizes or moves what runs
    resizes: bool = False  # jobs are elastic for it
    in_rounds: bool = False  # looks at every running job: too much for every event of a large cluster


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """An order of the queue that `--policy` knows."""

    summary: str
    make: Callable[[PlacerOf], Policy]
    always_decide: bool = False
    in_rounds: bool = False


ORDERS: dict[str, PolicyKind] = {
    "fifo": PolicyKind(
        "first come, first served; nobody overtakes", lambda place: queue_policy(by_arrival, place)
    ),
    "backfill": PolicyKind(
        "first come, first served; later jobs start where they do not delay the first (EASY)",
        lambda place: queue_policy(by_arrival, place, backfill=True),
    ),
    "conservative": PolicyKind(
        "backfill that delays no job before it", lambda place: queue_policy(by_arrival, place, True, 20)
    ),
    "shortest": PolicyKind(
        "shortest predicted duration first, with backfill; nobody starves",
        lambda place: queue_policy(by_prediction, place, backfill=True),
    ),
    "las": PolicyKind(
        "least attained service in two queues (Tiresias)", least_attained_service, in_rounds=True
    ),
    "fair": PolicyKind("fair shares between tenants (DRF), with quotas, borrowing and reclaiming", fair),
    "priority": PolicyKind("urgent jobs first; they preempt others where that pays", preempting),
    "elastic": PolicyKind("elastic jobs resized by marginal goodput (Pollux)", lambda place: elastic(), True),
    "goodput": PolicyKind(
        "elastic, and short jobs count more", lambda place: elastic(short_first=0.3), always_decide=True
    ),
    "attained": PolicyKind(
        "elastic, and jobs that had little GPU time count more; nothing is predicted",
        lambda place: elastic(short_first=0.3, predicted=False),
        always_decide=True,
    ),
}
PLACERS: dict[str, tuple[str, PlacerOf]] = {
    "pack": ("tightest nodes first, blind to topology", packed),
    "topology": ("where the job's step is fastest, by the collective model", TopologyPlacer),
    "emptiest": ("nodes with the most free GPUs first", emptiest),
}
_UPKEEP: dict[str, Callable[[Policy], Policy]] = {"cordon": cordoning, "defrag": defragmenting}


def policy_named(name: str) -> NamedPolicy:
    if ":" in name:
        return NamedPolicy(name, _from_file(name), always_decide=True)
    order, *more = name.split("+")
    if order not in ORDERS:
        raise ConfigError(
            f"there is no policy {order!r}{did_you_mean(order, ORDERS)} (or FILE.py:FUNCTION, a policy of your own)"
        )
    kind, place, upkeep = ORDERS[order], PLACERS["pack"][1], []
    for part in more:
        if part in PLACERS:
            place = PLACERS[part][1]
        elif part in _UPKEEP:
            upkeep.append(_UPKEEP[part])
        else:
            raise ConfigError(f"there is no placement {part!r}{did_you_mean(part, [*PLACERS, *_UPKEEP])}")
    decide = kind.make(place)
    for wrap in upkeep:
        decide = wrap(decide)
    rounds = kind.in_rounds or kind.always_decide
    return NamedPolicy(name, decide, kind.always_decide, kind.always_decide, rounds)


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
