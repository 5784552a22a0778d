"""The tuner: which algorithm, protocol, chunk and channels carry out a collective fastest, by size; and why. From
the cost model (schedules that are played); `measured` chooses from measurements.

    machine = MachineCosts(node_size=8, cards=8, protocols=(...))
    choice = tune("all_reduce", size_bytes=1 << 20, ranks=64, machine=machine)[0]
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from cumulo.collectives.decide.catalog import CollectiveShape, algorithms, make_schedule
from cumulo.collectives.decide.play_cost import PlayedCost, play_cost
from cumulo.collectives.decide.schedule import Collective

_PIPELINED = {"tree", "chain", "sharp"}  # pieces follow each other through them
_NOT_CHOSEN = {"sharp"}  # it needs switches that add
_UNIT = 64
_MOST_PLAYED = 128  # ranks of a schedule whose ranks differ


@dataclass(frozen=True, slots=True)
class ProtocolCosts:
    """What a hop and a byte cost with one protocol."""

    name: str
    base_s: float  # one collective at all
    near_hop_s: float
    far_hop_s: float
    near_bytes_per_s: float  # a rank's links inside its node
    far_bytes_per_s: float  # one network card's


@dataclass(frozen=True, slots=True)
class MachineCosts:
    node_size: int
    cards: int  # network cards of a node that one collective keeps busy
    protocols: tuple[ProtocolCosts, ...]
    start_s: float = 0.0  # each further message that a rank starts in the same step


@dataclass(frozen=True, slots=True)
class TunedChoice:
    algorithm: str
    protocol: str
    channels: int
    pieces: int
    seconds: float
    latency_s: float  # of these: before the first byte
    bytes_s: float
    why: str


def tune(collective: Collective, size_bytes: float, ranks: int, machine: MachineCosts) -> list[TunedChoice]:
    """All that could carry it out, the fastest first."""
    found = []
    for algorithm in algorithms(collective):
        if algorithm in _NOT_CHOSEN or not _fits(algorithm, ranks, machine.node_size):
            continue
        played = _played(collective, algorithm, ranks, min(machine.node_size, ranks))
        for protocol in machine.protocols:
            found.append(_choice(algorithm, played, protocol, machine, size_bytes))
    return sorted(found, key=lambda one: one.seconds)


@dataclass(frozen=True, slots=True)
class Crossover:
    """From this size on, another choice is the fastest."""

    size_bytes: int
    choice: TunedChoice
    before: TunedChoice | None  # what it takes over from


def crossovers(collective: Collective, ranks: int, machine: MachineCosts) -> list[Crossover]:
    found: list[Crossover] = []
    for size in (1 << power for power in range(8, 34)):
        best = tune(collective, size, ranks, machine)[0]
        last = found[-1].choice if found else None
        if last is None or (last.algorithm, last.protocol) != (best.algorithm, best.protocol):
            found.append(Crossover(size, best, last))
    return found


def _fits(algorithm: str, ranks: int, node_size: int) -> bool:
    if algorithm in ("two-level", "multi-ring"):
        return 1 < node_size < ranks and ranks % node_size == 0
    return True


@lru_cache(maxsize=4096)
def _played(collective: Collective, algorithm: str, ranks: int, node_size: int) -> PlayedCost:
    shape = CollectiveShape(
        ranks, ranks * ranks * _UNIT if collective == "all_to_all" else ranks * _UNIT, node_size
    )
    schedule = make_schedule(collective, algorithm, shape)
    if not schedule.symmetry and ranks > _MOST_PLAYED and algorithm != "chain":
        # Trees: each doubling adds a level up and a level down; loads stay.
        smaller = _played(collective, algorithm, node_size * -(-ranks // node_size // 2), node_size)
        return replace(smaller, far_hops=smaller.far_hops + (2 if collective == "all_reduce" else 1))
    return play_cost(schedule, node_size)


def _choice(
    algorithm: str,
    played: PlayedCost,
    protocol: ProtocolCosts,
    machine: MachineCosts,
    size: float,
) -> TunedChoice:
    near_s = size * played.near_load / protocol.near_bytes_per_s
    far_s = size * played.far_load / (protocol.far_bytes_per_s * machine.cards)
    far_s = max(far_s, size * played.far_rank_load / protocol.far_bytes_per_s) if machine.cards < 2 else far_s
    bytes_s = max(near_s, far_s)
    hops_s = played.near_hops * protocol.near_hop_s + played.far_hops * protocol.far_hop_s
    hops_s += max(0, played.most_messages - 1) * machine.start_s
    latency_s, pieces = protocol.base_s + hops_s, 1
    channels = min(machine.cards, machine.node_size) if played.far_hops else 1
    if algorithm in _PIPELINED and bytes_s:
        # (hops + pieces − 1) steps of (one hop + a piece's bytes): least at √((hops − 1) · bytes / hop).
        hops = max(1, played.near_hops + played.far_hops)
        hop_s = hops_s / hops
        pieces = max(1, min(4096, round(math.sqrt(max(0, hops - 1) * bytes_s / hop_s)))) if hop_s else 1
        total_s = (hops + pieces - 1) * (hop_s + bytes_s / pieces)
        latency_s = protocol.base_s + max(0.0, total_s - bytes_s)
    bound = "latency" if latency_s > bytes_s else "the network" if far_s >= near_s else "links inside a node"
    why = (
        f"{played.near_hops} hops inside nodes and {played.far_hops} between them, "
        f"{max(played.near_load, played.far_load):.3g} times the buffer on the busiest link; bound by {bound}"
    )
    return TunedChoice(
        algorithm, protocol.name, channels, pieces, latency_s + bytes_s, latency_s, bytes_s, why
    )
