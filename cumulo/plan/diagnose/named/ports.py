"""Ports of network cards as tools list them (ibstat, ibstatus, ibv_devinfo, ethtool), and those that run below
what their card can do or what their sisters do."""

from dataclasses import dataclass

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import PORTS_STEP, WIDTH_STEP
from cumulo.plan.diagnose.link_states import link_states
from cumulo.plan.diagnose.named.fault import SLOW, SLOW_NETWORK, Fault

_BLOCK = re.compile(
    r"^.*?(?:\bCA '(\w+)'|[Ii]nfini[Bb]and device '(\w+)'|\bhca_id:\s*(\w+)|^Settings for (\w+):|"
    r"\bibstat(?:us)? (mlx5_\w+))",
    re.M,
)
_RATE = re.compile(r"^\s*[Rr]ate:\s*(\d+)(?:\s*Gb/sec\s*\((\d+)X)?|^\s*Speed:\s*(\d+)Mb/s", re.M)
_LANES = re.compile(r"active_width:\s*(\d+)X")
_SPEED = re.compile(r"active_speed:\s*([\d.]+)\s*Gbps")
_TYPE = re.compile(r"CA type:\s*(MT\d+)|vendor_part_id:\s*(\d+)|\b(MT41\d\d)\b")
_CAN = {"4115": 100, "4119": 100, "4121": 100, "4123": 200, "4125": 200, "4129": 400, "4131": 800}
_DOWN = re.compile(r"State:\s*Down|state:\s*1: DOWN|PORT_DOWN|Link detected: no")
_CABLE_STEP = "change the cable or transceiver, and see that both ends are allowed the full rate (mlxlink)"


@dataclass(frozen=True, slots=True)
class Port:
    name: str
    gbps: float | None
    can_gbps: float | None  # by its card
    lanes: int | None
    down: bool


def ports_of(text: str) -> list[Port]:
    starts = list(_BLOCK.finditer(text))
    found = []
    for at, start in enumerate(starts):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(text)
        block = text[start.start() : min(end, start.end() + 900)]
        name = next(one for one in start.groups() if one)
        found.append(_port(name, block))
    return [port for port in found if port.gbps is not None or port.down]


def _port(name: str, block: str) -> Port:
    rate, lanes, speed, kind = (one.search(block) for one in (_RATE, _LANES, _SPEED, _TYPE))
    gbps = None
    if rate:
        gbps = float(rate[1]) if rate[1] else float(rate[3]) / 1e3
    elif lanes and speed:
        gbps = float(lanes[1]) * float(speed[1])
    width = int(lanes[1]) if lanes else int(rate[2]) if rate and rate[2] else None
    digits = next((one for one in kind.groups() if one), "") if kind else ""
    can = _CAN.get(digits.removeprefix("MT"))
    return Port(name, gbps, float(can) if can else None, width, bool(_DOWN.search(block)))


def port_faults(text: str) -> list[Fault]:
    found = []
    states = link_states(text)
    ports = [one for one in ports_of(text) if not one.down and one.gbps]
    narrow = next(
        (one for one in ports if one.lanes in (1, 2) and (one.can_gbps or 100) > (one.gbps or 0)), None
    )
    if narrow is not None:
        words = (
            f"{narrow.name}: {narrow.gbps:g} Gbit/s on {narrow.lanes} lane{'s' if narrow.lanes != 1 else ''}"
        )
        found.append(_degraded(f"Port {narrow.name} runs on {narrow.lanes} of its 4 lanes.", words, True))
    if states.narrow:
        found.append(
            _degraded("A link has fewer lanes or a lower rate than it could have.", states.narrow, True)
        )
    most = max((one.gbps or 0.0 for one in ports), default=0.0)
    for port in ports:
        own = port.gbps or 0.0
        if port.can_gbps and own <= port.can_gbps / 2 and not re.search(r"NDR200|HDR100|split|2x200", text):
            words = f"{port.name} has {own:g} Gbit/s, and its card can do {port.can_gbps:g}"
            found.append(
                _degraded(
                    f"Port {port.name} runs at {own:g} Gbit/s, its card can do {port.can_gbps:g}.", words
                )
            )
        elif own <= most / 2 and len(ports) > 1:
            words = f"{port.name} has {own:g} Gbit/s, another port {most:g}"
            found.append(_degraded(f"Port {port.name} runs at {own:g} Gbit/s, another at {most:g}.", words))
    return found


def _degraded(sentence: str, words: str, against: bool = False) -> Fault:
    explains = SLOW if "link has" in sentence else SLOW_NETWORK
    return Fault(
        "slow-link", sentence, words, (_CABLE_STEP, WIDTH_STEP, PORTS_STEP), explains, against=against
    )
