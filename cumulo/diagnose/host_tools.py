"""What other tools print next to a run, as facts: ports (ibstat, rdma link, ibdev2netdev, ethtool), PCIe links
(lspci), NVLinks and clocks (nvidia-smi), counters (ethtool -S, perfquery), and NCCL's settings."""

import re
from dataclasses import dataclass

from cumulo.diagnose.plain_text import line_of

_DOWN = re.compile(
    r"\bState:\s*Down|\bstate(?: is)?\s*:?\s*(?:PORT_)?(?:DOWN|INIT)\b|\bPORT_(?:DOWN|INIT)\b|"
    r"Port number \d+ state is (?:Down|Init)|port \d+ ==> \S+ \(Down\)|Link detected: no|NO-CARRIER|"
    r"[Pp]hysical[_ ]state:?\s*(?:DISABLED|POLLING|Disabled|Polling|LinkErrorRecovery)|"
    r"\b(?:mlx5|bnxt_re|irdma|rdmap|rocep|ibp|efa)[\w.:/-]*\b[^\n]{0,40}?(?:->|=>|:|\s)\s*"
    r"(?:[Dd]own|DOWN|DISABLED|POLLING|INIT|[Ii]nactive)\b|Cable is unplugged"
)
# Ports that no collective uses.
_OF_NO_RAIL = re.compile(
    r"\b(?:docker|virbr|veth|usb|eno|idrac|bmc|tap|wlan)\w*|"
    r"\b(?:mgmt|management|storage|unused|spare|not cabled)\b",
    re.I,
)
_CAPABILITY = re.compile(r"(LnkCap:[^\n]*)\n(?:(?!LnkCap:)[^\n]*\n){0,4}?([^\n]*LnkSta:[^\n]*)")
_LINK = re.compile(r"Speed ([\d.]+)GT/s[^\n]{0,200}?Width x(\d+)")
_NARROW = re.compile(
    r"LnkSta:[^\n]{0,200}Width x\d+ \(downgraded\)|LnkSta: Speed (?!2\.5)[\d.]+GT/s \(downgraded\)|"
    r"LinkWidthActive:[. ]*[12]X|\(1X [HENFX]DR\)"
)
_LINK_ERRORS = re.compile(
    r"\b(SymbolErrorCounter|LinkErrorRecoveryCounter|LinkDownedCounter|symbol_error|link_error_recovery|"
    r"port_rcv_errors|rx_crc_errors_phy|rx_symbol_err_phy|CRC Errors?)\b[\s:=.]*(\d[\d,]*)"
)
_CONGESTION = re.compile(
    r"\b([rt]x_prio\d_(?:pause|discards?|buf_discard)(?:_duration)?|[rt]x_pause(?:_ctrl_phy)?|[rt]x_discards_phy|"
    r"out_of_(?:buffer|sequence)|packet_seq_err|local_ack_timeout_err|rnr_nak_retry_err|np_cnp_sent|"
    r"roce_(?:adp|slow)_retrans\w*|rp_cnp_handled|np_ecn_marked_roce_packets|PortXmitWait|PortXmitDiscards)"
    r"\s*[:=.]*[\s:]*(\d[\d,]*)"
)
_LOSSES = re.compile(r"discard|Discards|out_of|seq_err|timeout|rnr|retrans")
_MANY, _MANY_LOST, _MANY_ERRORS = 100_000, 100, 100  # some pauses, losses and errors are usual
_THROTTLED = re.compile(r"\b(?:Thermal|HW|Power Brake)\s*Slowdown\s*:\s*Active\b", re.I)
_NO_PEERMEM = re.compile(r"(?:nvidia[_-]peermem|nv_peer_mem)\b[^\n]{0,20}not (?:loaded|found)", re.I)
_LOGGED_SETTING = re.compile(r"(NCCL_\w+)\s+set\s+(?:by environment\s+)?to\s+([^\s.]+)")
_COMMAND = re.compile(r"^\s*(?:[$#]\s*)?(?:export\b|ENV\b|env\b|mpirun\b|srun\b|-x\b|NCCL_\w+=).*", re.M)
_GIVEN_SETTING = re.compile(r"\b(NCCL_\w+)=[\"']?([^\s\"']+)")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Each line is what the text says; "": it says no such thing."""

    port_down: str
    narrow_link: str  # a PCIe or network link that has fewer lanes or a lower rate than it could have
    link_errors: str
    throttled: str
    no_peermem: str
    nvlinks: tuple[int, int]  # active, inactive
    congestion: tuple[tuple[str, int], ...]  # counters that are high, the highest first
    settings: dict[str, str]  # NCCL's, as a log or a command names them


def host_facts(text: str) -> HostFacts:
    down = next((found for found in _DOWN.finditer(text) if not _OF_NO_RAIL.search(line_of(found))), None)
    errors = next((one for one in _LINK_ERRORS.finditer(text) if _count(one[2]) >= _MANY_ERRORS), None)
    counters: dict[str, int] = {}
    for name, digits in _CONGESTION.findall(text):
        counters[name] = max(counters.get(name, 0), _count(digits))
    high = [
        (name, count)
        for name, count in counters.items()
        if count >= (_MANY_LOST if _LOSSES.search(name) else _MANY)
    ]
    settings = dict(_LOGGED_SETTING.findall(text))
    for line in _COMMAND.findall(text):
        settings.update(_GIVEN_SETTING.findall(line))
    return HostFacts(
        port_down=line_of(down) if down else "",
        narrow_link=_narrow(text),
        link_errors=line_of(errors) if errors else "",
        throttled=line_of(found) if (found := _THROTTLED.search(text)) else "",
        no_peermem=line_of(found) if (found := _NO_PEERMEM.search(text)) else "",
        nvlinks=(
            len(re.findall(r"Link \d+:\s*[\d.]+ GB/s", text)),
            len(re.findall(r"Link \d+:\s*<?inactive>?", text)),
        ),
        congestion=tuple(sorted(high, key=lambda one: -one[1])),
        settings=settings,
    )


def _count(digits: str) -> int:
    return int(digits.replace(",", ""))


def _narrow(text: str) -> str:
    """A link whose state has fewer lanes or a lower rate than its own capability. A GPU's link rests at 2.5 GT/s
    when idle, which says nothing."""
    if found := _NARROW.search(text):
        return line_of(found)
    for capability, state in _CAPABILITY.findall(text):
        can, has = _LINK.search(capability), _LINK.search(state)
        if can and has and (int(has[2]) < int(can[2]) or 2.5 < float(has[1]) < float(can[1])):
            return str(state).strip()
    return ""
