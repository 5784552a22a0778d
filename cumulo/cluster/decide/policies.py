"""Policies by name, as `--policy` takes them, and a user's own from a file.

A name is an order, and optionally where gangs are placed: `fair`, `backfill+topology`, `shortest+fgd`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.decide.fit import pack_gang
from cumulo.cluster.decide.las import least_attained_service
from cumulo.cluster.decide.queueing import Placer, by_arrival, by_prediction, queue_policy
from cumulo.cluster.decide.snapshot import Policy
from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    name: str
    decide: Policy
    always_decide: bool = False  # also when nothing waits: it resizes or moves what runs


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """An order of the queue that `--policy` knows."""

    summary: str
    make: Callable[[Placer], Policy]
    always_decide: bool = False


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
    "las": PolicyKind("least attained service in two queues (Tiresias)", least_attained_service),
}
PLACERS: dict[str, tuple[str, Placer]] = {"pack": ("tightest nodes first, blind to topology", pack_gang)}


def policy_named(name: str) -> NamedPolicy:
    if ":" in name:
        return NamedPolicy(name, _from_file(name), always_decide=True)
    order, _, placer = name.partition("+")
    if order not in ORDERS:
        raise ConfigError(
            f"there is no policy {order!r}{did_you_mean(order, ORDERS)}; your own is FILE.py:FUNCTION"
        )
    if placer and placer not in PLACERS:
        raise ConfigError(f"there is no placement {placer!r}{did_you_mean(placer, PLACERS)}")
    kind = ORDERS[order]
    return NamedPolicy(name, kind.make(PLACERS[placer or "pack"][1]), kind.always_decide)


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
