"""PFC packet by packet: diagnose/lint/pfc.py."""

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from cumulo.diagnose.lint.pfc import (
    BufferKind,
    PacketFlow,
    check_buffers,
    lint_pfc,
    named_cycle,
    plays_that_stop,
)

F1 = PacketFlow("F1", ("L0", "S0", "L2"))
F2 = PacketFlow("F2", ("L2", "S1", "L0"))
F3 = PacketFlow("F3", ("L1", "S0", "L2"))


def test_two_flows_that_meet_at_both_ends_are_safe_and_a_third_stops_them() -> None:
    safe, unsafe = check_buffers([F1, F2]), check_buffers([F1, F2, F3])
    assert named_cycle(safe.cycle) == "L0 → S0 → L2 → S1 → L0" and not safe.can_stop
    assert unsafe.can_stop and unsafe.overloaded == (("S0", "L2", 2.0),)
    assert not stalls([F1, F2], 7, "shared", 300) and stalls([F1, F2, F3], 7, "shared", 300)


def test_a_buffer_for_each_port_does_not_stop_these_three() -> None:
    assert not check_buffers([F1, F2, F3], "per-port").cycle
    assert not stalls([F1, F2, F3], 7, "per-port", 300)


def test_a_ring_of_overlapping_paths_stops_with_a_buffer_for_each_port() -> None:
    """Each flow passes two links of a ring of three, as in the classic picture (Dally and Seitz 1987)."""
    flows = [
        PacketFlow(f"f{start}{copy}", tuple(f"s{(start + step) % 3}" for step in range(3)))
        for start in range(3)
        for copy in range(2)
    ]
    assert check_buffers(flows, "per-port").can_stop
    assert stalls(flows, 8, "per-port", 300)


@pytest.mark.parametrize("kind", ["shared", "per-port"])
def test_a_circle_of_four_that_is_offered_just_what_it_carries_stops_by_chance(kind: BufferKind) -> None:
    """Each link carries two flows of half its rate: no link is overloaded, and bursts fill the buffers."""
    flows = [
        PacketFlow(f"f{start}", tuple("ABCD"[(start + step) % 4] for step in range(3)), rate=0.5)
        for start in range(4)
    ]
    assert not check_buffers(flows, kind).can_stop
    (found,) = lint_pfc(flows, kind)
    assert found.severity == "error" and "in 10 of 10 plays" in found.what
    assert plays_that_stop([F1, F2], kind) == 0


def stalls(flows: list[PacketFlow], threshold: int, kind: BufferKind, slots: int) -> bool:
    """Brute force, packet by packet: at the end nobody who has packets in a full buffer has moved one for long."""
    held: dict[object, list[list[int]]] = defaultdict(list)  # buffer -> packets as [flow, place]
    credit = [0.0] * len(flows)
    turns: dict[object, int] = defaultdict(int)
    paths = [flow.buffers(kind) for flow in flows]
    still = 0
    for _ in range(slots):
        full = {buffer for buffer, packets in held.items() if len(packets) >= threshold}
        moves = []
        links = sorted({(a[0], b[0]) for path in paths for a, b in pairwise(path)})
        for one, other in links:
            feeding = sorted({a for path in paths for a, b in pairwise(path) if (a[0], b[0]) == (one, other)})
            for step in range(len(feeding)):
                at = (turns[one, other] + step) % len(feeding)
                ready = [
                    p
                    for p in held[feeding[at]]
                    if p[1] + 1 < len(paths[p[0]]) and paths[p[0]][p[1] + 1][0] == other
                ]
                if ready and paths[ready[0][0]][ready[0][1] + 1] not in full:
                    moves.append((feeding[at], ready[0]))
                    turns[one, other] = (at + 1) % len(feeding)
                    break
        leaving = []
        for buffer, packets in held.items():
            done = {}
            for packet in packets:
                if packet[1] + 1 == len(paths[packet[0]]):
                    done.setdefault(packet[0], packet)
            leaving += [(buffer, packet) for packet in done.values()]
        for buffer, packet in leaving:
            held[buffer].remove(packet)
        for buffer, packet in moves:
            held[buffer].remove(packet)
        for _, packet in moves:
            packet[1] += 1
            held[paths[packet[0]][packet[1]]].append(packet)
        for number, flow in enumerate(flows):
            credit[number] = min(1.0, credit[number] + flow.rate)
            if credit[number] >= 1 and paths[number][0] not in full:
                credit[number] -= 1
                held[paths[number][0]].append([number, 0])
        stuck = bool(full) and not any(buffer in full for buffer, _ in moves)
        still = still + 1 if stuck and not any(buffer in full for buffer, _ in leaving) else 0
        if still > 60:
            return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_no_random_fabric_stalls_without_a_circle_that_fills(seed: int) -> None:
    chance, stalled = random.Random(seed), 0
    for _ in range(12):
        switches = [f"s{number}" for number in range(chance.randint(3, 5))]
        flows = [
            PacketFlow(
                f"f{number}",
                tuple(chance.sample(switches, chance.randint(2, min(4, len(switches))))),
                chance.choice([1.0, 1.0, 0.5]),
            )
            for number in range(chance.randint(2, 5))
        ]
        kind: BufferKind = chance.choice(["shared", "per-port"])
        if stalls(flows, 9, kind, 700):
            stalled += 1
            assert check_buffers(flows, kind).can_stop, flows
    assert stalled
