"""What an operator does with a fleet: drain replicas, restart them one after the other, add and remove them. No
request fails by it. Called by the endpoints of /v1/fleet and by the console.
"""

import asyncio
import logging

from cumulo.errors import CumuloError
from cumulo.serve.http.listening import wait_while
from cumulo.serve.replicas.fleet import Fleet
from cumulo.serve.replicas.replica import FleetReplica

log = logging.getLogger(__name__)

_LOOK_S = 0.02
MOST_REPLICAS = 64


class NoSuchReplica(CumuloError):
    """The name is none of the fleet's."""


class NotPossibleNow(CumuloError):
    """The fleet's state does not allow it; the message says what would."""


def find(fleet: Fleet, name: str) -> FleetReplica:
    if name not in fleet.replicas:
        raise NoSuchReplica(f"there is no replica {name!r}; there are {', '.join(fleet.replicas)}")
    return fleet.replicas[name]


def drain(fleet: Fleet, name: str, move: bool = False) -> FleetReplica:
    """It gets no new requests. Those it has finish there, or with `move` are continued by others at once."""
    replica = find(fleet, name)
    _check_others(fleet, replica, "drained")
    replica.draining = True
    log.info("replica %s is draining; it has %d requests", name, len(replica.client.in_flight))
    if move:
        fleet.move_all(replica, f"replica {name} is draining")
    return replica


def undrain(fleet: Fleet, name: str) -> FleetReplica:
    replica = find(fleet, name)
    if replica.busy_with:
        raise NotPossibleNow(f"replica {name} is being {replica.busy_with}; wait until that is done")
    replica.draining = False
    fleet.place_unplaced()
    return replica


def begin_restart(fleet: Fleet, name: str, patience_s: float) -> FleetReplica:
    """Replace its engine by a new one, in the background. Its requests may finish for this long; what is left then
    is continued by others."""
    replica = find(fleet, name)
    _check_idle(replica, "restarted")
    if replica.client.state != "ready":
        raise NotPossibleNow(f"replica {name} {replica.refuses}; wait until it is ready")
    _check_others(fleet, replica, "restarted")
    replica.busy_with = "restarted"
    fleet.keep(_restart(fleet, replica, patience_s))
    return replica


def begin_rolling_restart(fleet: Fleet, patience_s: float) -> None:
    """Restart all replicas, one after the other."""
    replicas = list(fleet.replicas.values())
    if len(replicas) < 2:
        raise NotPossibleNow(
            "the fleet has a single replica; add one first, so that it can take the requests"
        )
    for replica in replicas:
        _check_idle(replica, "restarted")
    for replica in replicas:
        replica.busy_with = "restarted"
    fleet.keep(_restart_all(fleet, replicas, patience_s))


def add(fleet: Fleet) -> FleetReplica:
    """Add a replica; it gets requests as soon as its model is loaded."""
    if len(fleet.replicas) >= MOST_REPLICAS:
        raise NotPossibleNow(f"a fleet has at most {MOST_REPLICAS} replicas")
    replica = fleet.make_replica()
    fleet.keep(replica.client.start_until_up())
    return replica


def begin_removal(fleet: Fleet, name: str, patience_s: float) -> FleetReplica:
    """Drain it and stop its engine, in the background."""
    replica = find(fleet, name)
    _check_idle(replica, "removed")
    _check_others(fleet, replica, "removed")
    replica.busy_with = "removed"
    fleet.keep(_remove(fleet, replica, patience_s))
    return replica


def _check_idle(replica: FleetReplica, wanted: str) -> None:
    if replica.busy_with:
        raise NotPossibleNow(
            f"replica {replica.name} cannot be {wanted}, it is being {replica.busy_with}; wait until that is done"
        )


def _check_others(fleet: Fleet, replica: FleetReplica, wanted: str) -> None:
    others = [one for one in fleet.replicas.values() if one is not replica]
    if not any(not one.refuses for one in others):
        states = ", ".join(f"{one.name} {one.refuses}" for one in others) or "there is no other"
        raise NotPossibleNow(
            f"replica {replica.name} cannot be {wanted} because no other takes requests ({states}); wait until one "
            "does, or add one"
        )


async def _restart_all(fleet: Fleet, replicas: list[FleetReplica], patience_s: float) -> None:
    for replica in replicas:
        others = [one for one in fleet.replicas.values() if one is not replica]
        while replica.client.state != "ready" or all(one.refuses for one in others):
            await asyncio.sleep(_LOOK_S)
        await _restart(fleet, replica, patience_s)


async def _restart(fleet: Fleet, replica: FleetReplica, patience_s: float) -> None:
    drained_before, before = replica.draining, replica.client.info
    replica.draining = True
    try:
        await _empty(fleet, replica, patience_s)
        replica.client.ask_for_restart()
        while replica.client.state != "ready" or replica.client.info is before:
            await asyncio.sleep(_LOOK_S)
    finally:
        replica.draining, replica.busy_with = drained_before, ""
    fleet.place_unplaced()


async def _remove(fleet: Fleet, replica: FleetReplica, patience_s: float) -> None:
    replica.draining = True
    await _empty(fleet, replica, patience_s)
    await fleet.dismiss(replica)


async def _empty(fleet: Fleet, replica: FleetReplica, patience_s: float) -> None:
    await wait_while(lambda: bool(replica.client.in_flight), patience_s)
    fleet.move_all(replica, f"replica {replica.name} is being {replica.busy_with}")
