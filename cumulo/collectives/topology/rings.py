"""Rings and trees on a machine, found as NCCL finds them: the fastest channel speed at which most rings
fit, each link carrying no more than it can. `cumulo topology` prints them."""

from dataclasses import dataclass

from cumulo.collectives.topology.machine_graph import PATH_GBPS, MachineGraph, links

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
    for only_nvlink in (True, False):  # NCCL relaxes the kind of path only where the better kind has no ring
        best = FoundRings((), 0.0)
        for speed in (*speeds, *slow):
            found = FoundRings(_pack(machine, float(speed), only_nvlink), float(speed))
            if found.total_gbps > best.total_gbps * 1.0001:
                best = found
        if best.orders:
            return best
    return FoundRings((), 0.0)


class _Left:
    """What the links still carry, GB/s. Each pair has its own NVLinks, or a switch joins all pairs; what goes over
    PCIe shares the GPU's slot, and between sockets also their link."""

    def __init__(self, machine: MachineGraph, only_nvlink: bool) -> None:
        self._machine = machine
        self._of: dict[tuple[object, ...], float] = {}
        self._only_nvlink = only_nvlink

    def _resources(self, one: int, other: int) -> list[tuple[tuple[object, ...], float]]:
        machine = self._machine
        kind = machine.near.get((one, other), "SYS")
        gbps = machine.pair_gbps(one, other)
        if links(kind):
            return [(("port", one) if machine.switched else ("nvlink", one, other), gbps)]
        slots: list[tuple[tuple[object, ...], float]] = [
            (("out", one), PATH_GBPS["PIX"]),
            (("in", other), PATH_GBPS["PIX"]),
        ]
        if kind == "SYS":
            sockets = (machine.gpus[one].numa, machine.gpus[other].numa)
            slots.append((("sockets", *(sockets if sockets[0] != sockets[1] else ())), gbps))
        return [*slots, (("pair", one, other), gbps)]

    def fits(self, one: int, other: int, speed: float) -> bool:
        if self._only_nvlink and not links(self._machine.near.get((one, other), "SYS")):
            return False
        return all(self._of.get(name, gbps) >= speed for name, gbps in self._resources(one, other))

    def reserve(self, order: tuple[int, ...], speed: float) -> bool:
        """False: it does not fit with all hops together, and nothing is taken."""
        hops = list(zip(order, (*order[1:], order[0]), strict=True))
        after = dict(self._of)
        for one, other in hops:
            for name, gbps in self._resources(one, other):
                after[name] = after.get(name, gbps) - speed
        if min(after.values()) < -1e-9:
            return False
        self._of = after
        return True


def _pack(machine: MachineGraph, speed: float, only_nvlink: bool) -> tuple[tuple[int, ...], ...]:
    """Ring after ring, until one more does not fit."""
    left = _Left(machine, only_nvlink)
    found: list[tuple[int, ...]] = []
    while len(found) < _MOST_CHANNELS:
        order = _ring(machine, left, speed, len(found))
        if order is None or not left.reserve(order, speed):
            break
        found.append(order)
    return tuple(found)


def _ring(machine: MachineGraph, left: _Left, speed: float, turn: int) -> tuple[int, ...] | None:
    """A circle over all GPUs whose links have `speed` left, depth first, neighbours in turn."""
    count = len(machine.gpus)
    tries = 0

    def extend(order: list[int]) -> list[int] | None:
        nonlocal tries
        tries += 1
        if tries > _MOST_TRIES:
            return None
        if len(order) == count:
            return order if left.fits(order[-1], order[0], speed) else None
        at = order[-1]
        others = [(at + 1 + step + (0 if machine.switched else turn)) % count for step in range(count)]
        # The best links first: PCIe only where NVLink does not lead on.
        for other in sorted(others, key=lambda one: not links(machine.near.get((at, one), "SYS"))):
            if other not in order and left.fits(at, other, speed):
                done = extend([*order, other])
                if done is not None:
                    return done
        return None

    found = extend([0])
    return tuple(found) if found is not None else None


def ring_text(found: FoundRings) -> list[str]:
    """The rings as NCCL prints channels."""
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
