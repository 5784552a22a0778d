"""Faults of a network that a text names: small MTU, packets lost on RoCE, uplinks that flows share while others are
idle, ports without a subnet manager, firewalls."""

from statistics import median

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.counters_text import congestion_counters, counters_of
from cumulo.plan.diagnose.diagnosis import ECN_STEP, PAIRS_STEP, PAUSES_STEP, PORTS_STEP
from cumulo.plan.diagnose.link_states import whole_line
from cumulo.plan.diagnose.named.fault import FAILED, SLOW_NETWORK, Fault

_MTU = re.compile(
    r"\bactive_mtu:\s*(256|512|1024|2048)\b|^\s*Mtu\s*:\s*(256|512|1024|2048)\[B\]|"
    r"\b(?:path|active|RoCE|IB) MTU (?:is |of |= ?)?(256|512|1024|2048)\b|"
    r"\b(?:roce|rdma|rail|ib|mlx)\S*[^\n]{0,40}\bmtu (1500)\b",
    re.I | re.M,
)
_NETDEV_MTU = re.compile(r"\bmtu[ =:]+(\d{4})\b", re.I)
_UPLINK = re.compile(
    r"^\s*(?:\S+\s+)??((?:Eth|Ethernet|swp|et-|xe-|Port|uplink|Te|Hu|FourHundredGigE)[\w/.:-]*\d)\s+(?:\S+\s+){0,2}?"
    r"([\d.]+)\s*(Gb/s|Gbps|Gbit/s|%)",
    re.M | re.I,
)
_NO_MANAGER = re.compile(
    r"^\s*(?:sm[_ ]lid|SM lid)\s*:\s*(?:0|0x0+)\s*$|\bstate:\s*2: INIT\b|State:\s*Initializing|PORT_INIT|"
    r"(?:opensm|subnet manager)[^\n]{0,40}(?:not running|inactive|dead|stopped|no master|down)",
    re.M | re.I,
)
_REACHED = re.compile(r"\b\d+ bytes from\b|icmp_seq=\d+|0% packet loss|ping (?:works|is fine|ok)", re.I)
_UNREACHED = re.compile(
    r"No route to host|[Cc]onnection timed out|timed out[^\n]{0,40}connect|Connection refused|"
    r"[Tt]imeout[^\n]{0,60}(?:connect|rendezvous|store)|socketPollConnect|socketStartConnect|"
    r"admin(?:istratively)? prohibited"
)
_FIREWALL = re.compile(
    r"firewall\S*|\biptables\b|\bnft(?:ables)?\b|\bufw\b|security[ -]group|NetworkPolicy|\bSELinux\b|"
    r"host[- ]prohibited|DROP\s+(?:all|tcp)|REJECT\s+(?:all|tcp)|reject-with",
    re.I,
)


def fabric_faults(text: str) -> list[Fault]:
    readers = (_firewall, _no_manager, _collisions, _lossy, _paused, _small_mtu)
    return [found for read in readers if (found := read(text)) is not None]


def _firewall(text: str) -> Fault | None:
    wall, missed = _FIREWALL.search(text), _UNREACHED.search(text)
    off = wall and re.search(r"inactive|not running|disabled|is off|stopped", whole_line(wall), re.I)
    if missed is None or (wall is None and not ("No route to host" in text and _REACHED.search(text))) or off:
        return None
    return Fault(
        "firewall",
        "A firewall blocks the ports between the nodes: NCCL listens on any high TCP port.",
        whole_line(wall) if wall else whole_line(missed),
        (
            "allow all TCP ports between the nodes (firewalld: put the interface into the zone trusted; clouds: a "
            "rule of the security group to itself)",
            "test with `nc -l 45000` on one node and `nc NODE 45000` on the other",
        ),
        FAILED | {"wrong-nic"},
        sure=True,
    )


def _no_manager(text: str) -> Fault | None:
    found = _NO_MANAGER.search(text)
    if found is None or re.search(r"link_layer:?\s*Ethernet|Link layer: Ethernet", text):
        return None
    return Fault(
        "no-subnet-manager",
        "The port stays in INIT: no subnet manager (opensm, or that of a switch) reaches it.",
        whole_line(found),
        ("run `sminfo`, and start opensm on one host or the manager of a switch", PORTS_STEP),
        SLOW_NETWORK | FAILED,
        sure=True,
    )


def _collisions(text: str) -> Fault | None:
    """Some uplinks of a switch are full and others nearly idle."""
    rates = [(name, float(rate)) for name, rate, _ in _UPLINK.findall(text)]
    if len(rates) < 3:
        return None
    most = max(rate for _, rate in rates)
    full = [name for name, rate in rates if rate >= 0.85 * most]
    idle = [name for name, rate in rates if rate <= 0.35 * most]
    if not idle or most <= 0 or len(full) == len(rates):
        return None
    return Fault(
        "collisions",
        "Flows collide: the switch's hash (ECMP) puts many on the same uplinks, while others are nearly idle.",
        f"{', '.join(full[:4])} carry up to {most:g}, {', '.join(idle[:4])} almost nothing",
        (
            "raise NCCL_IB_QPS_PER_CONNECTION (4 or more) with NCCL_IB_SPLIT_DATA_ON_QPS=1, so that flows spread",
            "turn on adaptive routing or packet spraying, or hash on the queue pair (UDP source port)",
            "run `cumulo network lint FABRIC` for the layout's collisions",
        ),
        SLOW_NETWORK,
        against=True,
    )


def _lossy(text: str) -> Fault | None:
    """Packets are lost and no pause is sent: the fabric should be lossless, and is not."""
    counters = counters_of(text)
    lost = {
        name: count for name, count in congestion_counters(text) if "pause" not in name and _is_loss(name)
    }
    pauses = [count for name, count in counters.items() if "pause" in name.lower() or "pfc" in name.lower()]
    if not lost:
        return None
    without = bool(pauses) and max(pauses) == 0
    name, count = max(lost.items(), key=lambda one: one[1])
    sentence = (
        "RoCE loses packets and sends them again, and no pause is ever sent: PFC and ECN do not work on this path."
        if without
        else "RoCE loses packets and sends them again: PFC or ECN is missing or wrong somewhere on the path."
    )
    return Fault(
        "lossy",
        sentence,
        f"{name} is {count:,}" + (", all pause counters are 0" if without else ""),
        (ECN_STEP, "check that DSCP or PCP of the traffic maps to the lossless priority (mlnx_qos, cma_roce_tos)",
         PAUSES_STEP),
        SLOW_NETWORK if without else SLOW_NETWORK - {"congested"},
    )  # fmt: skip


def _paused(text: str) -> Fault | None:
    pauses = [
        (name, count)
        for name, count in congestion_counters(text)
        if re.search(r"pause|pfc|cnp|ecn", name, re.I)
    ]
    if not pauses:
        return None
    return Fault(
        "congested",
        "Senders are paused (PFC) again and again: too many send to one port (incast), or one receiver is slow.",
        f"{pauses[0][0]} is {pauses[0][1]:,}",
        (
            PAUSES_STEP,
            ECN_STEP,
            "find the port that sends pauses: what is behind it is slow or gets too much",
        ),
        frozenset({"slow-link", "unknown", "congested"}),
        confidence="medium",
    )


def _is_loss(name: str) -> bool:
    return any(word in name for word in ("discard", "Discard", "out_of_seq", "seq_err", "timeout", "retrans"))


def _small_mtu(text: str) -> Fault | None:
    found = _MTU.search(text)
    sizes = {int(one) for one in _NETDEV_MTU.findall(text)}
    unequal = len(sizes) > 1 and min(sizes) <= 1500 < 4000 <= max(sizes)
    if found is None and not unequal:
        return None
    size = next((one for one in found.groups() if one), "") if found else str(min(sizes))
    netdev = _NETDEV_MTU.search(text) if found is None else None
    return Fault(
        "mtu",
        f"The MTU is {size}: too small, so that headers and packet rates limit the bandwidth."
        if not unequal
        else f"The MTU is not the same everywhere ({min(sizes)} and {max(sizes)}).",
        whole_line(found) if found else whole_line(netdev) if netdev else "",
        (
            "set the interfaces and switch ports to MTU 9000 (jumbo frames), so that RDMA uses 4096",
            PAIRS_STEP,
        ),
        SLOW_NETWORK - {"rail-down", "no-gdr", "congested", "wrong-nic"}
        | (FAILED | {"rail-down"} if unequal else frozenset()),
        confidence="medium",
    )


def uneven(rates: list[float]) -> bool:
    """Repeats of one run differ: nothing that is merely slow does so."""
    return len(rates) > 2 and max(rates) > 1.35 * min(rates) and median(rates) < 0.9 * max(rates)
