"""PFC deadlock: buffers that can wait for each other, found by their dependencies."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cumulo.collectives.decide.buffer_cycles import (
    BUFFER_KINDS,
    BufferKind,
    PacketFlow,
    check_buffers,
    named_cycle,
)
from cumulo.diagnose.lint import Finding
from cumulo.errors import ConfigError


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
    if not check.cycle:
        yield Finding(
            "note",
            "pfc-deadlock",
            f"No buffers of these {len(flows)} flows can wait for each other in a circle.",
            "",
            "",
        )
        return
    circle = named_cycle(check.cycle)
    if not check.can_stop:
        yield Finding(
            "warning",
            "pfc-deadlock",
            f"Buffers depend on each other in a circle ({circle}), but no link is offered more than it carries, so "
            "that they do not fill: safe with these flows, not with more.",
            "route up and down only (no path that goes down and up again), or give the return paths another "
            "priority",
            "no flow that is added later can stop the network",
        )
        return
    link = ", ".join(f"{one} → {other} ({much:g} times its rate)" for one, other, much in check.overloaded)
    yield Finding(
        "error",
        "pfc-deadlock",
        f"Deadlock: {circle} can wait for each other for ever. Their buffers fill behind {link}.",
        "route up and down only, give the return paths another priority, or keep that link below its rate",
        "these links never stop; until a watchdog drops packets, a deadlock stops every flow that passes them",
    )


def lint_victims(flows: Sequence[PacketFlow], kind: BufferKind = "shared") -> Iterator[Finding]:
    """Flows that pass no overloaded link, and are slowed down by pauses all the same."""
    check = check_buffers(flows, kind)
    if check.can_stop:
        return
    crowded = {(one, other) for one, other, _ in check.overloaded}
    for flow in flows:
        full = [switch for switch, port in flow.buffers(kind) if (switch, port) in check.filling]
        if full and not crowded & set(pairwise(flow.path)):
            yield Finding(
                "warning",
                "pfc-victim",
                f"{flow.name} passes no overloaded link, and still waits for pauses: the buffer of {full[0]} on "
                "its path fills behind one.",
                "give it another priority, or slow down the senders of the overloaded link (DCQCN)",
                "its own rate",
            )
