"""What outputs of perftest and of OSU's tests say about links. `diagnose` calls it."""

from collections import defaultdict

from cumulo.base.quantities import quantity
from cumulo.plan.diagnose.cards.perftest_text import LINE_RATES_GBPS, OsuTest, Perftest
from cumulo.plan.diagnose.diagnosis import (
    GDR_STEP,
    PAIRS_STEP,
    PAUSES_STEP,
    PORTS_STEP,
    TOPO_STEP,
    WIDTH_STEP,
    Diagnosis,
)
from cumulo.plan.diagnose.link_states import link_states, port_gbps
from cumulo.plan.diagnose.machine_names import node_of
from cumulo.plan.diagnose.peer_figures import peer_gbits

_SLOWER = 0.8  # of the other test of the same card
_MOST = 1.05  # of a port's rate
_LEAST = 0.85  # of a port's rate, that a healthy link reaches
_USUAL_LATENCY_US = 6.0
# Gbit/s that arrive of a slot's rate.
_SLOTS = (
    (252.0, "a PCIe slot of generation 4 with 16 lanes or generation 5 with 8"),
    (125.0, "a PCIe slot of generation 3 with 16 lanes or generation 4 with 8"),
    (62.0, "a PCIe slot of generation 3 with 8 lanes or generation 4 with 4"),
)
_CORES_STEP = "run with -q 4, and with the CPU of the card's NUMA node (numactl)"


def perftests_verdict(tests: list[Perftest], text: str) -> Diagnosis:
    """The worst of several, each compared with the port's stated rate and with its sisters."""
    states = link_states(text)
    if states.down:
        return Diagnosis(
            "rail-down", "A port is down.", (f"the text says: {states.down[:120]}",), (PORTS_STEP,), "high"
        )
    reached = [test.gbps for test in tests if test.gbps is not None and test.size_bytes >= 4096]
    rate = port_gbps(text)
    if rate is not None and reached and max(reached) > _MOST * rate:
        rate = None  # it is another port's
    if rate is None and len(reached) > 1:
        rate = next((one for one in LINE_RATES_GBPS if 0.88 * one <= max(reached) <= 1.02 * one), None)
    if (differ := _variants(tests) or _repeats(tests)) is not None:
        return differ
    usual = usual_gbps(text) if rate is None else None
    found = [_verdict(test, rate, len(tests) > 1, usual) for test in tests]
    if states.downgraded and all(one.cause == "healthy" for one in found):
        return Diagnosis(
            "slow-link", "A PCIe link is narrower or slower than its card.",
            (f"lspci says: {states.downgraded[:120]}",), (WIDTH_STEP,), "medium",
        )  # fmt: skip
    peer = peer_gbits(text, min(reached)) if reached else None
    if peer is not None and all(one.cause == "healthy" for one in found):
        return Diagnosis(
            "slow-link", f"A card has {min(reached) / peer.rate:.0%} of what the text says of another.",
            (f"{min(reached):.0f} Gbit/s", f"the text says: {peer.words}"), (PORTS_STEP, WIDTH_STEP), "medium",
        )  # fmt: skip
    bad = [one for one in found if one.cause not in ("healthy", "unknown", "small-messages")]
    return next(iter(bad or [one for one in found if one.cause == "unknown"] or found))


def osu_verdict(test: OsuTest, text: str) -> Diagnosis:
    """As a test of perftest with the same numbers."""
    same = Perftest("the link", None, "", test.gpu_memory, test.gbps, test.size_bytes, test.latency_us)
    return perftests_verdict([same], text)


def usual_gbps(text: str) -> float | None:
    """Of a card in a server with the GPUs that the text names; None: it names none."""
    node = node_of(text)
    return node.nic_bytes_per_s * 8 / 1e9 if node is not None and node.gpus >= 4 else None


def _variants(tests: list[Perftest]) -> Diagnosis | None:
    """Two tests of one card of which one is much slower: what they differ in is the reason."""
    measured = [test for test in tests if test.gbps is not None and test.size_bytes >= 4096]
    for fast in measured:
        for slow in measured:
            assert fast.gbps is not None and slow.gbps is not None
            alike = not fast.device or not slow.device or fast.device == slow.device
            if not alike or slow.gbps >= _SLOWER * fast.gbps:
                continue
            evidence = (_said(slow), _said(fast))
            share = slow.gbps / fast.gbps
            if slow.gpu_memory and not fast.gpu_memory:
                return Diagnosis(
                    "no-gdr",
                    f"GPU memory is reached at {share:.0%} of host memory's rate: GPUDirect RDMA takes a long way.",
                    evidence,
                    (GDR_STEP, TOPO_STEP, "look for ACS with `lspci -vvv | grep ACSCtl`: ReqRedir+ is on"),
                    "medium",
                )
            if slow.bound != fast.bound:
                return Diagnosis(
                    "numa",
                    f"The same test is faster with {fast.bound or 'no binding'}: the process runs on the other "
                    "socket than its card.",
                    evidence,
                    ("bind each process to the socket of its card (numactl -N, --cpu-bind)", TOPO_STEP),
                    "high",
                )
            if slow.mtu is not None and fast.mtu is not None and slow.mtu < fast.mtu:
                return Diagnosis(
                    "mtu",
                    f"The MTU of {slow.mtu} is too small: with {fast.mtu} the same card is faster.",
                    evidence,
                    ("set the interfaces and switch ports to MTU 9000, so that RDMA uses 4096",),
                    "high",
                )
            if slow.relaxed == "OFF" and fast.relaxed == "ON":
                return Diagnosis(
                    "setting",
                    "Without relaxed ordering the PCIe link is slow.",
                    evidence,
                    ("set PCI_WR_ORDERING to relaxed (mlxconfig), and NCCL_IB_PCI_RELAXED_ORDERING=1",),
                    "high",
                )
            if slow.queue_pairs < fast.queue_pairs:
                return Diagnosis(
                    "setting",
                    f"{slow.queue_pairs} queue pair does not fill the link, {fast.queue_pairs} do: each takes one "
                    "path (of a bond, or of ECMP) or one core.",
                    evidence,
                    ("set NCCL_IB_QPS_PER_CONNECTION to 4 or more", _CORES_STEP),
                    "medium",
                )
    return None


def _repeats(tests: list[Perftest]) -> Diagnosis | None:
    """The same cards several times: if each is fast once and slow once, no card and no cable is slow."""
    rates: dict[str, list[float]] = defaultdict(list)
    for test in tests:
        if test.gbps is not None and test.device and not test.gpu_memory:
            rates[test.device].append(test.gbps)
    most = max((max(one) for one in rates.values()), default=0.0)
    changing = [name for name, one in rates.items() if max(one) > 0.9 * most and min(one) < 0.7 * most]
    steady = [one for one in rates.values() if len(one) > 1 and max(one) < min(0.9 * most, 1.15 * min(one))]
    if len(changing) < 2 or steady:  # a card that is slow each time is slow by itself
        return None
    return Diagnosis(
        "collisions",
        "Flows collide: each card is fast in one run and slow in another, as the hash of the switches (ECMP) puts "
        "several on one uplink.",
        tuple(
            f"{name}: {', '.join(f'{rate:.0f}' for rate in rates[name][:6])} Gbit/s" for name in changing[:3]
        ),
        (
            "raise NCCL_IB_QPS_PER_CONNECTION (4 or more) with NCCL_IB_SPLIT_DATA_ON_QPS=1, so that flows spread",
            "turn on adaptive routing or packet spraying; run `cumulo network lint FABRIC`",
            PAUSES_STEP,
        ),
        "high" if len(changing) > 2 else "medium",
    )


def _said(test: Perftest) -> str:
    how = ", ".join(
        one
        for one in (
            "GPU memory" if test.gpu_memory else "",
            test.bound and f"bound to {test.bound}",
            f"{test.queue_pairs} queue pairs" if test.queue_pairs > 1 else "",
            f"MTU {test.mtu}" if test.mtu else "",
        )
        if one
    )
    return f"{test.gbps:.0f} Gbit/s on {test.device or 'the card'}" + (f" ({how})" if how else "")


def _verdict(test: Perftest, stated: float | None, several: bool, usual: float | None = None) -> Diagnosis:
    if test.gbps is None:
        return _latency(test)
    name = test.device or "the card"
    evidence = (f"{test.gbps:.0f} Gbit/s on {name} at {quantity(test.size_bytes, 'B')}",)
    if test.size_bytes < 4096:
        return Diagnosis(
            "small-messages",
            "At this size the message rate counts.",
            evidence,
            ("run with -s 65536 or -a",),
            "high",
        )
    if stated is not None and test.gbps < _LEAST * stated:
        return _below(test, stated, name, evidence)
    rate = test.line_rate
    if test.gpu_memory and (rate is None or rate <= 100) and stated is None:
        return Diagnosis(
            "no-gdr", "GPU memory is reached slowly: GPUDirect RDMA is missing or takes a long way.", evidence,
            (GDR_STEP, TOPO_STEP), "medium",
        )  # fmt: skip
    if rate is not None and rate <= 50 and not several:
        return _management(name, rate, evidence)
    if rate is not None:
        if stated is not None:
            return Diagnosis("healthy", f"{name} reaches its {stated:.0f} Gbit/s.", evidence, (), "high")
        if usual is not None and rate < usual:
            return Diagnosis(
                "unknown", f"{name} reaches {rate:.0f} Gbit/s. Servers with these GPUs often have {usual:.0f}: see "
                "which rate the port has.", evidence, (PORTS_STEP, WIDTH_STEP), "low",
            )  # fmt: skip
        return Diagnosis(
            "healthy", f"{name} reaches {rate:.0f} Gbit/s, which is a line rate; a faster port "
            "(see `ibstat`) would be slow.", evidence, (PORTS_STEP,), "medium",
        )  # fmt: skip
    return Diagnosis("slow-link", f"{name} reaches no line rate.", evidence, _slow_steps(test), "medium")


def _below(test: Perftest, stated: float, name: str, evidence: tuple[str, ...]) -> Diagnosis:
    assert test.gbps is not None
    share = f"{test.gbps / stated:.0%} of the port's {stated:.0f} Gbit/s"
    if test.gpu_memory:
        return Diagnosis(
            "no-gdr", f"GPU memory is reached at {share}.", evidence, (GDR_STEP, TOPO_STEP), "medium"
        )
    if test.line_rate is not None and test.line_rate <= 50 and stated >= 100:
        return _management(name, test.line_rate, evidence)
    slot = _slot(test.gbps)
    said = f"{name} reaches {share}{f', which is what {slot} carries' if slot else ''}."
    return Diagnosis("slow-link", said, evidence, _slow_steps(test), "high")


def _slot(gbps: float) -> str:
    """The PCIe slot that carries so much and no more."""
    for most, slot in _SLOTS:
        if 0.93 * most <= gbps <= 1.02 * most:
            return slot
    return ""


def _management(name: str, rate: float, evidence: tuple[str, ...]) -> Diagnosis:
    return Diagnosis(
        "wrong-nic", f"{name} is a {rate:.0f} Gbit/s port: a management card, not one for GPUs.", evidence,
        (TOPO_STEP, "name a compute card with -d"), "medium",
    )  # fmt: skip


def _slow_steps(test: Perftest) -> tuple[str, ...]:
    steps: tuple[str, ...] = (_CORES_STEP, WIDTH_STEP, PORTS_STEP)
    if test.mtu is not None and test.mtu < 4096:
        return (f"raise the MTU, which is {test.mtu}: 4096 needs an interface MTU of 9000", *steps)
    return steps


def _latency(test: Perftest) -> Diagnosis:
    if test.latency_us is None:
        return Diagnosis("unknown", "There is no bandwidth in the text.", (), (PAIRS_STEP,), "low")
    if test.tail_us is not None and test.tail_us > max(10 * test.latency_us, 25.0):
        return Diagnosis(
            "congested", f"One message in a hundred takes {test.tail_us:g} µs, and most {test.latency_us:g}: "
            "it waits in a switch's queue, or for a core that sleeps.", (f"99% within {test.tail_us:g} µs",),
            (PAUSES_STEP, _CORES_STEP, "set the CPU's governor to performance, and C-states off"), "medium",
        )  # fmt: skip
    if test.latency_us <= _USUAL_LATENCY_US:
        return Diagnosis(
            "healthy", f"A latency of {test.latency_us:g} µs is usual.", (), (PAIRS_STEP,), "medium"
        )
    if test.latency_us >= 15 and test.gpu_memory:
        return Diagnosis(
            "no-gdr", f"A latency of {test.latency_us:g} µs from GPU memory: small messages are copied through "
            "host memory.", (f"{test.latency_us:g} µs",), (GDR_STEP, "load gdrdrv (GDRCopy)", TOPO_STEP), "medium",
        )  # fmt: skip
    if test.latency_us >= 15:
        return Diagnosis(
            "slow-link", f"A latency of {test.latency_us:g} µs is high: RDMA takes 1 to 6.",
            (f"{test.latency_us:g} µs",), (_CORES_STEP, PORTS_STEP, PAIRS_STEP), "low",
        )  # fmt: skip
    return Diagnosis(
        "unknown",
        f"A latency of {test.latency_us:g} µs is more than usual.",
        (),
        (PAIRS_STEP, _CORES_STEP),
        "low",
    )
