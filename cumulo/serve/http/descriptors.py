"""Room: how many connections the process's file descriptors allow. Called once, when the server starts."""

import logging
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from cumulo.errors import CumuloError

log = logging.getLogger(__name__)

_RESERVE = 16  # connections beyond the limit, on which only health, readiness and metrics are answered
_OWN = 128  # descriptors the process may open later: workers, the file of keys, a new engine's sockets
_LEAST_CONNECTIONS = 8
_BURST = 32  # accepted before they are counted: uvloop takes one at a time
BACKLOG = 2048  # connections the kernel holds until they are accepted; they need no descriptors of ours


@dataclass(frozen=True, slots=True)
class Room:
    connections: int
    reserve: int


def find_room(wanted_connections: int) -> Room:
    """Raise the soft limit of open files as far as needed and allowed; fewer connections where it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = _open_descriptors()
    needed = opened + _OWN + _RESERVE + wanted_connections + _BURST
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Room(wanted_connections, _RESERVE)
    room = room_within(soft - opened, wanted_connections)
    if room.connections < wanted_connections:
        log.warning(
            "%d connections are possible instead of %d: the limit of open files is %d; raise it with `ulimit -Hn`",
            room.connections, wanted_connections, soft,
        )  # fmt: skip
    return room


def room_within(free_descriptors: int, wanted_connections: int) -> Room:
    """What is left when the process, the reserve and a burst of newcomers have theirs."""
    own, burst = min(_OWN, free_descriptors // 4), min(_BURST, free_descriptors // 8)
    connections = min(wanted_connections, free_descriptors - own - burst - _RESERVE)
    if connections < min(wanted_connections, _LEAST_CONNECTIONS):
        raise CumuloError(
            f"only {free_descriptors} more files can be opened, which is too few to serve: raise the limit of open "
            "files, for instance with `ulimit -n 4096`"
        )
    return Room(connections, _RESERVE)


def _open_descriptors() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        highest = os.open(os.devnull, os.O_RDONLY)  # descriptors are given out lowest first
        os.close(highest)
        return highest
