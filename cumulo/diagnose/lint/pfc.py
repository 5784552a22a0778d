"""PFC deadlock: buffers that can wait for each other, found by their dependencies and played packet by packet."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cumulo.collectives.decide.buffer_cycles import (
    BUFFER_KINDS,
    BufferKind,
    PacketFlow,
    check_buffers,
    named_cycle,
)
from cumulo.collectives.simulate.packets import PacketNetwork
from cumulo.diagnose.lint import Finding
from cumulo.errors import ConfigError

_THRESHOLD = 7  # packets, where a file does not say


def flows_of(content: Mapping[str, Any]) -> tuple[tuple[PacketFlow, ...], int, BufferKind]:
    """From a file: flows: {F1: L0 -> S0 -> L2, ...}, rates: {F1: 0.5}, buffers: {threshold: 7, kind: shared}."""
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
    buffers = content.get("buffers") or {}
    kind = buffers.get("kind", "shared")
    if kind not in BUFFER_KINDS:
        raise ConfigError(f"buffers.kind must be {' or '.join(BUFFER_KINDS)}, got {kind!r}")
    threshold = buffers.get("threshold", _THRESHOLD)
    if not isinstance(threshold, int) or threshold < 1:
        raise ConfigError(f"buffers.threshold must be 1 or more packets, got {threshold!r}")
    return tuple(found), threshold, kind


def lint_pfc(
    flows: Sequence[PacketFlow], threshold: int = _THRESHOLD, kind: BufferKind = "shared"
) -> Iterator[Finding]:
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
    run = PacketNetwork(flows, threshold, kind).run()
    link = ", ".join(f"{one} → {other} ({much:g} times its rate)" for one, other, much in check.overloaded)
    if run.stopped_at is None:
        yield Finding(
            "warning",
            "pfc-deadlock",
            f"Buffers on a circle ({circle}) fill behind {link}. Played packet by packet they always drain "
            f"again, but "
            "other arrival times may not let them.",
            "take the overload away, or break the circle with another priority for part of it",
            "the network cannot stop",
        )
        return
    yield Finding(
        "error",
        "pfc-deadlock",
        f"Deadlock: {named_cycle(run.stopped)} wait for each other, after {run.stopped_at} packet times at a pause "
        f"threshold of {threshold}. It starts behind {link}.",
        "route up and down only, give the return paths another priority, or keep that link below its rate",
        "these links never stop; until a watchdog drops packets, a deadlock stops every flow that passes them",
        value=float(run.stopped_at),
    )


def lint_victims(
    flows: Sequence[PacketFlow], threshold: int = _THRESHOLD, kind: BufferKind = "shared"
) -> Iterator[Finding]:
    """Flows that pass no overloaded link, and are slowed down by pauses all the same."""
    check = check_buffers(flows, kind)
    crowded = {(one, other) for one, other, _ in check.overloaded}
    if not crowded:
        return
    run = PacketNetwork(flows, threshold, kind).run(1000, until_repeat=False)
    if run.stopped_at is not None:
        return
    for flow in flows:
        links = set(zip(flow.path, flow.path[1:], strict=False))
        lost = 1 - run.share(flow.name) / flow.rate
        if not links & crowded and lost > 0.1:
            yield Finding(
                "warning",
                "pfc-victim",
                f"{flow.name} passes no overloaded link, and still loses {lost:.0%} of its rate to pauses.",
                "give it another priority, or slow down the senders of the overloaded link (DCQCN)",
                f"up to {1 / max(0.01, 1 - lost):.1f} times its throughput",
                value=lost,
            )
