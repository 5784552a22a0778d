"""PFC and SwitchML packet by packet: buffer_cycles.py, simulate/packets.py, simulate/switch_packets.py."""

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from cumulo.collectives.decide.buffer_cycles import BufferKind, PacketFlow, check_buffers, named_cycle
from cumulo.collectives.simulate.congestion import play_incast
from cumulo.collectives.simulate.packets import PacketNetwork
from cumulo.collectives.simulate.switch_packets import SwitchLinks, play_switch

F1 = PacketFlow("F1", ("L0", "S0", "L2"))
F2 = PacketFlow("F2", ("L2", "S1", "L0"))
F3 = PacketFlow("F3", ("L1", "S0", "L2"))


def test_two_flows_that_meet_at_both_ends_are_safe_and_a_third_stops_them() -> None:
    safe, unsafe = check_buffers([F1, F2]), check_buffers([F1, F2, F3])
    assert named_cycle(safe.cycle) == "L0 → S0 → L2 → S1 → L0" and not safe.can_stop
    assert unsafe.can_stop and unsafe.overloaded == (("S0", "L2", 2.0),)
    assert PacketNetwork([F1, F2], 7).run().forever
    run = PacketNetwork([F1, F2, F3], 7).run()
    assert run.stopped_at is not None
    assert {switch for switch, _ in run.stopped} == {"L0", "S0", "L2", "S1"}


def test_a_buffer_for_each_port_does_not_stop_these_three() -> None:
    assert not check_buffers([F1, F2, F3], "per-port").cycle
    assert PacketNetwork([F1, F2, F3], 7, "per-port").run().forever


def test_a_ring_of_overlapping_paths_stops_with_a_buffer_for_each_port() -> None:
    """Each flow passes two links of a ring of three, as in the classic picture (Dally and Seitz 1987)."""
    flows = [
        PacketFlow(f"f{start}{copy}", tuple(f"s{(start + step) % 3}" for step in range(3)))
        for start in range(3)
        for copy in range(2)
    ]
    assert check_buffers(flows, "per-port").can_stop
    run = PacketNetwork(flows, 8, "per-port").run()
    assert run.stopped_at is not None and len(run.stopped) == 3


def test_pauses_reach_a_flow_that_passes_no_busy_link() -> None:
    """The victim shares a switch with packets that wait (head-of-line blocking); its own links are free."""
    busy = [PacketFlow(f"busy {number}", (f"edge {number}", "middle", "out")) for number in range(3)]
    victim = PacketFlow("victim", ("edge 0", "other"))
    lossless = PacketNetwork([*busy, victim], 8).run(800, until_repeat=False)
    free = PacketNetwork([*busy, victim], 8, lossless=False).run(200, until_repeat=False)
    assert lossless.stopped_at is None
    assert lossless.share("victim") < 0.75 < 0.95 < free.share("victim")
    assert lossless.paused["edge 0", "middle"] > 0


def stalls(flows: list[PacketFlow], threshold: int, kind: BufferKind, slots: int) -> bool:
    """Brute force, written apart from the simulator: packets one by one in plain lists, and at the end
    nobody who has packets in a full buffer has moved one for a long time."""
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
def test_random_fabrics_stop_exactly_where_brute_force_stalls(seed: int) -> None:
    chance = random.Random(seed)
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
        run = PacketNetwork(flows, 9, kind).run(3000)
        found = run.stopped_at is not None
        whole = found and len({b for b, _ in run.stopped}) == len({s for flow in flows for s in flow.path})
        assert not (found and not check_buffers(flows, kind).can_stop), flows
        if found or check_buffers(flows, kind).can_stop:
            # Brute force sees a stop only where it reaches everything that has packets in full buffers.
            if stalls(flows, 9, kind, 700):
                assert found, flows
            elif whole:
                assert not found, flows
        elif check_buffers(flows, kind).cycle:
            assert not stalls(flows, 9, kind, 300), flows


@pytest.mark.thorough
def test_no_fabric_of_thousands_stops_without_a_circle_that_fills() -> None:
    chance = random.Random(11)
    stopped = 0
    for _ in range(3000):
        switches = [f"s{number}" for number in range(chance.randint(3, 6))]
        flows = [
            PacketFlow(
                f"f{n}",
                tuple(chance.sample(switches, chance.randint(2, min(4, len(switches))))),
                chance.choice([1.0, 0.5]),
            )
            for n in range(chance.randint(2, 6))
        ]
        kind: BufferKind = chance.choice(["shared", "per-port"])
        run = PacketNetwork(flows, 10, kind).run(4000)
        stopped += run.stopped_at is not None
        assert run.stopped_at is None or check_buffers(flows, kind).can_stop, flows
    assert stopped > 100


def test_dcqcn_trades_pauses_for_use_of_the_port() -> None:
    alone, controlled = play_incast(8, 8e6, 50e9, None), play_incast(8, 8e6, 50e9)
    assert alone.paused_share > 0.7 and alone.use > 0.95
    assert controlled.paused_share < 0.2 and controlled.use < alone.use
    assert alone.end_s == pytest.approx(8 * 8e6 / 50e9, rel=0.05)


def test_switchml_reaches_the_links_rate_with_enough_slots_and_survives_losses() -> None:
    links = SwitchLinks(workers=4, bytes_per_s=12.5e9, latency_s=1e-6)
    packets = 400
    wire_s = packets * links.packet_s
    free = play_switch(links, packets, links.slots_for_line_rate)
    assert free.right and free.again == 0
    assert wire_s < free.seconds < 1.15 * wire_s  # a round trip at the end
    few = play_switch(links, packets, 2)
    round_s = 2 * (links.latency_s + links.packet_s)
    assert few.seconds == pytest.approx(packets / 2 * round_s, rel=0.1)
    lossy = play_switch(replace(links, loss=0.2, timeout_s=20e-6), packets, 16)
    assert lossy.right and lossy.again > 0 and lossy.seconds > free.seconds
