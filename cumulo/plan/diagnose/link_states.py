"""States of ports and links that people paste next to a test: ibstat, rdma link, ibdev2netdev, ibv_devinfo,
ethtool, lspci, nvidia-smi. `diagnose` calls it."""

from dataclasses import dataclass

from cumulo.base import quick_re as re

_DOWN = re.compile(
    r"(?:^|\n)[^\n]*(?:\bState:\s*Down|\bstate(?: is)?\s*:?\s*(?:PORT_)?(?:DOWN|INIT)\b|"
    r"Port number \d+ state is (?:Down|Init)|"
    r"[Pp]hysical[_ ]state:?\s*(?:DISABLED|POLLING|Disabled|Polling|LinkErrorRecovery)|port \d+ ==> \S+ \(Down\)|"
    r"Link detected: no|state DOWN|active_state: DOWN|\bPORT_(?:DOWN|INIT)\b|"
    r"\b(?:mlx5|bnxt_re|irdma|rdmap?|rocep|ibp|efa|hfi1)[\w.:/-]*\b[^\n]{0,40}?(?:\bis\b|->|=>|:|\s)\s*"
    r"(?:[Dd]own|DOWN|DISABLED|POLLING|INIT|Init(?:ializing)?|NO-CARRIER|[Ii]nactive)\b|NO-CARRIER|"
    r"Cable error|Cable is unplugged)[^\n]*"
)
_CAPABILITY = re.compile(r"(LnkCap:[^\n]*)\n(?:(?!LnkCap:)[^\n]*\n){0,4}?([^\n]*LnkSta:[^\n]*)")
_LINK = re.compile(r"Speed ([\d.]+)GT/s[^\n]*?Width x(\d+)")
_GPU_WIDTH = re.compile(r"Link Width\s*\n\s*Max\s*:\s*(\d+)x\s*\n\s*Current\s*:\s*(\d+)x")
_DOWNGRADED = re.compile(r"LnkSta:[^\n]*\((?:downgraded|degraded)\)")
_NARROW = re.compile(
    r"(?:LnkSta:[^\n]*Width x\d+ \(downgraded\)|LnkSta: Speed (?!2\.5)[\d.]+GT/s \(downgraded\)|"
    r"limited by[^\n]*GT/s|Could be \d+X|Could be [\d.]+ Gbps|LinkWidthActive:[. ]*[12]X|"
    r"(?m:^[ \t]*Width\s*:\s*[12]x\b)|\(1X [HENFX]DR\))"
)
# Ports that no collective uses.
_OF_NO_RAIL = re.compile(
    r"\b(?:docker|virbr|veth|usb|eno|idrac|bmc|tap|wlan)\w*|\b(?:mgmt|management|storage|unused|spare|"
    r"not (?:cabled|used)|on purpose)\b",
    re.I,
)
_RATES = (
    (re.compile(r"\b[Rr]ate\s*:\s*(\d+)"), 1.0),
    (re.compile(r"\b(?:rate|speed)\s*:\s*(\d+)\s*Gb"), 1.0),
    (re.compile(r"Speed:\s*(\d+)\s*Mb/s"), 1e-3),
    (re.compile(r"(?<![\d.])\b(\d{2,3})\s?-?G(?:b|bps|b/s|bE|E|bit|bit/s|bits/s)?\b(?!i?B)"), 1.0),
)
_LANES = re.compile(
    r"active_width:\s*(\d+)X.*?active_speed:\s*([\d.]+) Gbps|"
    r"active_speed:\s*([\d.]+) Gbps.*?active_width:\s*(\d+)X",
    re.S,
)
_WORDS = (
    (r"\bXDR\b", 800.0),
    (r"\bNDR\b|\bNDR400\b|MT4129|ConnectX-7|\bCX-?7\b", 400.0),
    (r"\bHDR\b|\bNDR200\b|MT4123|ConnectX-6(?! ?[DL]x)|\bCX-?6\b", 200.0),
    (r"\bEDR\b|\bHDR100\b|MT4119|MT4121", 100.0),
)
_PORT_GBPS = (10.0, 25.0, 40.0, 50.0, 56.0, 100.0, 200.0, 400.0, 800.0)


@dataclass(frozen=True, slots=True)
class LinkStates:
    down: str  # the line that says a port is down; "": none does
    downgraded: str  # the line that says a link is narrower or slower than it could be
    nvlinks: tuple[int, int]  # active, inactive
    narrow: str  # the line that says so of a link that does not merely rest, as a GPU's does


def link_states(text: str) -> LinkStates:
    down = next((one for one in _DOWN.finditer(text) if not _OF_NO_RAIL.search(one[0])), None)
    narrow = _NARROW.search(text) or _narrower(text)
    slow = _DOWNGRADED.search(text) or narrow
    active = len(re.findall(r"Link \d+:\s*[\d.]+ GB/s", text))
    inactive = len(re.findall(r"Link \d+:\s*<?inactive>?", text))
    return LinkStates(
        down[0].strip() if down else "",
        whole_line(slow) if slow else "",
        (active, inactive),
        whole_line(narrow) if narrow else "",
    )


def whole_line(found: re.Match[str]) -> str:
    """In which it is."""
    text = found.string
    return text[text.rfind("\n", 0, found.start()) + 1 :].split("\n", 1)[0].strip()


def _narrower(text: str) -> re.Match[str] | None:
    """A link whose state has fewer lanes or a lower rate than its own capability, as lspci and nvidia-smi print
    them. A GPU's link rests at 2.5 GT/s when idle, which says nothing."""
    for cap, state in _CAPABILITY.findall(text):
        can, has = _LINK.search(cap), _LINK.search(state)
        if can and has and (int(has[2]) < int(can[2]) or 2.5 < float(has[1]) < float(can[1])):
            return re.search(re.escape(state), text)
    for most, now in _GPU_WIDTH.findall(text):
        if int(now) < int(most):
            return _GPU_WIDTH.search(text)
    return None


def port_gbps(text: str) -> float | None:
    """The fastest rate of a port that the text states."""
    rates = [float(one) * scale for pattern, scale in _RATES for one in pattern.findall(text)]
    for width, speed, other_speed, other_width in _LANES.findall(text):
        rates.append(float(width or other_width) * float(speed or other_speed))
    rates = [rate for rate in rates if rate in _PORT_GBPS]
    if not rates:  # a card's name is what it can do at most; a rate in figures says more
        rates = [gbps for pattern, gbps in _WORDS if re.search(pattern, text)][:1]
    return max(rates, default=None)
