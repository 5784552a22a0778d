"""Rings and trees on a machine, found as NCCL finds them: the fastest channel speed at which most rings
fit, each link carrying no more than it can. `cumulo topology` prints them."""

from dataclasses import dataclass

from cumulo.collectives.topology.machine_graph import MachineGraph

# Speeds that NCCL tries for a channel in a node, GB/s (src/graph/search.cc, 2.30).
_SPEEDS = {0: (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3), 90: (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
           100: (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18)}  # fmt: skip
_MOST_CHANNELS = 16
_MOST_TRIES = 20_000


@dataclass(frozen=True, slots=True)
class FoundRings:
    orders: tuple[tuple[int, ...], ...]  # of each channel, GPUs in the order of the ring
    gbps: float  # of each channel

    @property
    def total_gbps(self) -> float:
        return self.gbps * len(self.orders)


def find_rings(machine: MachineGraph) -> FoundRings:
    """The speed whose rings carry most together; of equal ones the faster."""
    count = len(machine.gpus)
    if count < 2:
        return FoundRings((), 0.0)
    speeds = _SPEEDS[max(sm for sm in _SPEEDS if sm <= machine.generation)]
    slow = tuple(speed for speed in (2.4, 1.2, 0.24) if speed < min(speeds))
    best = FoundRings((), 0.0)
    for speed in (*speeds, *slow):
        found = FoundRings(_pack(machine, float(speed)), float(speed))
        if found.total_gbps > best.total_gbps * 1.0001:
            best = found
    return best


def _pack(machine: MachineGraph, speed: float) -> tuple[tuple[int, ...], ...]:
    """Ring after ring, until one more does not fit."""
    count = len(machine.gpus)
    left = {pair: machine.pair_gbps(*pair) for pair in machine.near}
    ports = None
    if machine.switched:  # a switch joins any pair, and a GPU's links are all it has
        each = max(machine.pair_gbps(*pair) for pair in machine.near)
        ports = [each] * count
    found: list[tuple[int, ...]] = []
    while len(found) < _MOST_CHANNELS:
        order = _ring(count, left, ports, speed, len(found))
        if order is None:
            break
        found.append(order)
        for at, one in enumerate(order):
            other = order[(at + 1) % count]
            if ports is not None:
                ports[one] -= speed
            else:
                left[one, other] -= speed
    return tuple(found)


def _ring(
    count: int, left: dict[tuple[int, int], float], ports: list[float] | None, speed: float, turn: int
) -> tuple[int, ...] | None:
    """A circle over all GPUs whose links have `speed` left, depth first, neighbours in turn."""
    if ports is not None and min(ports) < speed:
        return None
    tries = 0

    def free(one: int, other: int) -> bool:
        return ports[one] >= speed if ports is not None else left.get((one, other), 0.0) >= speed

    def extend(order: list[int]) -> list[int] | None:
        nonlocal tries
        tries += 1
        if tries > _MOST_TRIES:
            return None
        if len(order) == count:
            return order if free(order[-1], order[0]) else None
        at = order[-1]
        for step in range(count):
            other = (at + 1 + step + (turn if ports is None else 0)) % count
            if other not in order and free(at, other):
                done = extend([*order, other])
                if done is not None:
                    return done
        return None

    found = extend([0])
    return tuple(found) if found is not None else None


def ring_text(found: FoundRings) -> list[str]:
    """As NCCL prints channels."""
    count = len(found.orders)
    return [
        f"Channel {number:02d}/{count:02d} : {' '.join(str(gpu) for gpu in order)}"
        for number, order in enumerate(found.orders)
    ]


def tree_text(found: FoundRings) -> list[str]:
    """In a node NCCL's trees are chains along the rings: each GPU with its children and its parent."""
    lines = []
    for number, order in enumerate(found.orders):
        parts = []
        for at, gpu in enumerate(order):
            child = order[at + 1] if at + 1 < len(order) else -1
            parent = order[at - 1] if at else -1
            parts.append(f"{child}/-1/-1->{gpu}->{parent}")
        lines.append(f"Tree {number:02d} : {' '.join(parts)}")
    return lines
