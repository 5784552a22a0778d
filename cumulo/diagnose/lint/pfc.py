"""PFC deadlock: whether lossless switches can stop each other for ever, found by the dependencies of their buffers.

A packet in a buffer waits for the next buffer on its path. Where these waits form a circle and the buffers
on it fill, none of them can drain: deadlock. A buffer fills where a link behind it is offered more than it
carries, or where the next buffer is full (Hu et al. 2016, "Deadlocks in datacenter networks: why do they
form, and how to avoid them"); where a link is offered just what it carries, the order in which packets come
decides, so that these flows are played with random arrivals.
"""

import random
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from cumulo.diagnose.lint import Finding, finding
from cumulo.errors import ConfigError

# shared: a switch has one buffer and pauses all its senders together. per-port: a buffer for each link that enters.
BufferKind = Literal["shared", "per-port"]
BUFFER_KINDS: tuple[BufferKind, ...] = get_args(BufferKind)
Buffer = tuple[str, str]  # (switch, the neighbour whose packets it holds); shared: (switch, "")


@dataclass(frozen=True, slots=True)
class PacketFlow:
    """Packets that follow one path of switches, `rate` of them for each that a link can carry."""

    name: str
    path: tuple[str, ...]
    rate: float = 1.0

    def __post_init__(self) -> None:
        if not self.path or len(set(self.path)) != len(self.path):
            raise ConfigError(f"flow {self.name} must name one or more different switches, got {self.path}")
        if not 0 < self.rate <= 1:
            raise ConfigError(
                f"flow {self.name}: its rate is a share of a link, more than 0 to 1, got {self.rate}"
            )

    def buffers(self, kind: BufferKind) -> tuple[Buffer, ...]:
        before = ("", *self.path) if kind == "shared" else (f"host of {self.name}", *self.path)
        return tuple(
            (at, "" if kind == "shared" else came) for came, at in zip(before, self.path, strict=False)
        )


@dataclass(frozen=True, slots=True)
class BufferCheck:
    cycle: tuple[
        Buffer, ...
    ]  # buffers that wait for each other, the shortest such circle that can fill; (): none
    overloaded: tuple[
        tuple[str, str, float], ...
    ]  # links that are offered more than they carry, and how much
    filling: frozenset[Buffer]  # buffers that fill behind them

    @property
    def can_stop(self) -> bool:
        """Whether the buffers on a circle fill. Without it these flows cannot stop each other."""
        return bool(self.cycle) and any(buffer in self.filling for buffer in self.cycle)


def check_buffers(flows: Sequence[PacketFlow], kind: BufferKind = "shared") -> BufferCheck:
    waits: dict[Buffer, set[Buffer]] = defaultdict(set)
    load: dict[tuple[str, str], float] = defaultdict(float)
    behind: dict[tuple[str, str], set[Buffer]] = defaultdict(set)
    for flow in flows:
        buffers = flow.buffers(kind)
        for one, after in pairwise(buffers):
            waits[one].add(after)
            link = (one[0], after[0])
            load[link] += flow.rate
            behind[link].add(one)
    overloaded = {link: much for link, much in load.items() if much > 1 + 1e-9}
    filling = _filling(waits, {buffer for link in overloaded for buffer in behind[link]})
    inside = {buffer: after & filling for buffer, after in waits.items() if buffer in filling}
    cycle = _shortest_cycle(inside) or _shortest_cycle(waits)
    named = tuple((one, other, much) for (one, other), much in sorted(overloaded.items()))
    return BufferCheck(cycle, named, frozenset(filling))


def _filling(waits: Mapping[Buffer, set[Buffer]], first: set[Buffer]) -> set[Buffer]:
    """`first`, and all buffers that wait for one of them."""
    before: dict[Buffer, set[Buffer]] = defaultdict(set)
    for one, after in waits.items():
        for other in after:
            before[other].add(one)
    found, open_ = set(first), deque(first)
    while open_:
        for one in before[open_.popleft()] - found:
            found.add(one)
            open_.append(one)
    return found


def _shortest_cycle(waits: Mapping[Buffer, set[Buffer]]) -> tuple[Buffer, ...]:
    best: tuple[Buffer, ...] = ()
    for start in sorted(waits):
        came: dict[Buffer, Buffer] = {}
        open_ = deque([start])
        while open_ and start not in came:
            at = open_.popleft()
            for after in sorted(waits.get(at, ())):
                if after not in came:
                    came[after] = at
                    open_.append(after)
        if start in came:
            way = [start]
            while (at := came[way[-1]]) != start:
                way.append(at)
            if not best or len(way) < len(best):
                best = (start, *reversed(way[1:]))
    return best


_PLAYS = 10
_PACKETS = 8  # that a buffer holds
_STEPS, _MOST_MOVES = 4_000, 3_000_000


def plays_that_stop(flows: Sequence[PacketFlow], kind: BufferKind = "shared", seed: int = 0) -> int:
    """In how many of ten plays with random arrivals these flows stop each other. A link carries a packet a step, to
    a buffer that has room; a buffer keeps the packets of each flow apart."""
    ways = [flow.buffers(kind) for flow in flows]
    steps = min(_STEPS, _MOST_MOVES // (_PLAYS * sum(len(way) for way in ways)))
    return sum(_stops(flows, ways, steps, random.Random(f"{seed}/{play}")) for play in range(_PLAYS))


def _stops(
    flows: Sequence[PacketFlow], ways: Sequence[tuple[Buffer, ...]], steps: int, drawn: random.Random
) -> bool:
    waiting = {(flow, hop): 0 for flow, way in enumerate(ways) for hop in range(len(way))}
    held: dict[Buffer, int] = defaultdict(int)
    turns = list(waiting)
    for _ in range(steps):
        for flow, way in enumerate(ways):
            if held[way[0]] < _PACKETS and drawn.random() < flows[flow].rate:
                waiting[flow, 0] += 1
                held[way[0]] += 1
        drawn.shuffle(turns)
        used: set[tuple[str, str]] = set()
        for flow, hop in turns:
            if not waiting[flow, hop]:
                continue
            here, after = ways[flow][hop], ways[flow][hop + 1] if hop + 1 < len(ways[flow]) else None
            link = (here[0], flows[flow].name if after is None else after[0])
            if link in used or (after is not None and held[after] >= _PACKETS):
                continue
            used.add(link)
            waiting[flow, hop] -= 1
            held[here] -= 1
            if after is not None:
                waiting[flow, hop + 1] += 1
                held[after] += 1
        if not used and any(held.values()):
            return True
    return False


def named_cycle(cycle: Sequence[Buffer]) -> str:
    """The circle as people read it: L0 → S0 → L2 → S1 → L0."""
    names = [switch if not port else f"{switch} (from {port})" for switch, port in cycle]
    return " → ".join([*names, names[0]]) if names else "none"


def flows_of(content: Mapping[str, Any]) -> tuple[tuple[PacketFlow, ...], BufferKind]:
    """From a file: flows: {F1: L0 -> S0 -> L2, ...}, rates: {F1: 0.5}, buffers: {kind: shared}."""
    flows, rates = content.get("flows"), content.get("rates") or {}
    if not isinstance(flows, Mapping) or not flows:
        raise ConfigError("`flows` must be a table of paths, such as F1: L0 -> S0 -> L2")
    found = []
    for name, path in flows.items():
        hops = (
            path
            if isinstance(path, Sequence) and not isinstance(path, str)
            else str(path).replace("→", "->").split("->")
        )
        found.append(
            PacketFlow(str(name), tuple(str(hop).strip() for hop in hops), float(rates.get(name, 1.0)))
        )
    kind = (content.get("buffers") or {}).get("kind", "shared")
    if kind not in BUFFER_KINDS:
        raise ConfigError(f"buffers.kind must be {' or '.join(BUFFER_KINDS)}, got {kind!r}")
    return tuple(found), kind


def lint_pfc(flows: Sequence[PacketFlow], kind: BufferKind = "shared") -> Iterator[Finding]:
    check = check_buffers(flows, kind)
    circle = named_cycle(check.cycle)
    if not check.cycle:
        yield finding("no-circle", flows=len(flows))
    elif not check.can_stop and (stopped := plays_that_stop(flows, kind)):
        yield finding("pfc-deadlock-by-chance", circle=circle, stopped=stopped, plays=_PLAYS)
    elif not check.can_stop:
        yield finding("safe-circle", circle=circle)
    else:
        links = (f"{one} → {other} ({much:g} times its rate)" for one, other, much in check.overloaded)
        yield finding("pfc-deadlock", circle=circle, links=", ".join(links))


def lint_victims(flows: Sequence[PacketFlow], kind: BufferKind = "shared") -> Iterator[Finding]:
    """Flows that pass no overloaded link, and are slowed down by pauses all the same."""
    check = check_buffers(flows, kind)
    if check.can_stop:
        return
    crowded = {(one, other) for one, other, _ in check.overloaded}
    for flow in flows:
        full = [switch for switch, port in flow.buffers(kind) if (switch, port) in check.filling]
        if full and not crowded & set(pairwise(flow.path)):
            yield finding("pfc-victim", flow=flow.name, switch=full[0])
