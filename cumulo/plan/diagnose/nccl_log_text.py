"""An NCCL log (NCCL_DEBUG=INFO) as facts. `diagnose` calls it."""

from collections import Counter
from dataclasses import dataclass

from cumulo.base import quick_re as re

_USING = re.compile(r"NET/IB\s*:\s*Using\s+(.*)")
_CARD = re.compile(r"\[\d+\]\s*([\w.\-]+):\d+/(\w+)")
_HOST = re.compile(r"^(?:\[[^\]]*\]\s*(?:<\w+>:?)?\s*)?([\w.\-]+):\d+:\d+\s+\[")
_INFO = re.compile(r"NCCL (?:INFO|WARN)")
_RANKS = re.compile(r"\bnranks\s+(\d+)", re.IGNORECASE)
_ALONE = re.compile(r"^(.*?:\d+):\d+ \[.*\bnranks\s+1\b.*\bcommId\s+(\w+)", re.IGNORECASE | re.MULTILINE)
_FOUND = re.compile(r"provider is (\w+).*\(found (\d+) nics?\)", re.IGNORECASE)
_NODES = re.compile(r"\bnNodes\s+(\d+)")
_VIA = re.compile(
    r"->\s*\d+\[[\w]+\]\s*(?:\[(send|receive)\]\s*)?via\s+(direct shared memory|NET/\w+(?: \w+)*/\S+|\S+)"
)
_OVER_TCP = re.compile(
    r"NET/OFI.*[Pp]rovider is tcp|Using network (?:Socket|TCP)\b|NET/IB\s*:\s*No device found"
)
_TYPE = re.compile(r"\btype\s+(\w+)/(\w+)")
_SET = re.compile(r"(NCCL_\w+)\s+set\s+(?:by environment\s+)?to\s+(\S+)")
_ASYNC = re.compile(r"Got async (?:fatal )?event\s*:\s*([\w ]+)")


_REPEATED = re.compile(r"via [^\[]*|NCCL INFO (?:Channel|Ring|Trees?|Setting affinity)\b")
_KEPT = 64  # of each kind


@dataclass(frozen=True, slots=True)
class NcclLog:
    cards: dict[str, tuple[str, ...]]  # network cards in use, by host
    link: str  # IB, RoCE or ""
    socket: bool  # data goes over TCP
    network: str  # "Using network ..."
    ranks: int | None
    nodes: int | None
    near: frozenset[str]  # transports inside a node: P2P/CUMEM, SHM/direct/direct
    far: frozenset[str]  # between nodes: NET/IB/0/GDRDMA
    gdr_off: bool
    gdr_on: bool
    pcie_path: str  # PHB, SYS, ...: the type NCCL found between GPUs, where it is no NVLink
    events: tuple[str, ...]  # port error
    settings: dict[str, str]
    domain_off: bool  # no NVLink between hosts, where there could be
    p2p_off: bool  # NCCL says that GPUs of a node cannot reach each other
    nvls_off: bool  # NCCL says that there is no NVLink SHARP, or is told not to use it
    card_path: str  # PIX, PXB, PHB, SYS: the type NCCL found between GPUs and cards
    warnings: tuple[str, ...]
    hosts: int = 0  # that wrote it
    alone: int = 0  # processes, if each has a communicator of its own with one rank
    nvls: bool = False  # NCCL says that there is NVLink SHARP
    found: tuple[int, ...] = ()  # network cards that libfabric found, each time that it says so


def condensed(text: str) -> str:
    """A log without the many lines of channels, rings and trees that say the same of other ranks."""
    seen: Counter[str] = Counter()
    kept = []
    for line in text.splitlines():
        if "NCCL INFO" in line and (match := _REPEATED.search(line)):
            kind = re.sub(r"\d+", "", match[0])
            seen[kind] += 1
            if seen[kind] > _KEPT:
                continue
        kept.append(line)
    return "\n".join(kept)


def parse_nccl_log(text: str) -> NcclLog | None:
    lines = [line for line in text.splitlines() if _INFO.search(line) or "NET/" in line]
    if not lines:
        return None
    body = "\n".join(lines)
    cards: dict[str, tuple[str, ...]] = {}
    link = ""
    for line in lines:
        if match := _USING.search(line):
            found = _CARD.findall(match[1])
            host = _HOST.match(line)
            if found:
                cards[host[1] if host else "here"] = tuple(name for name, _ in found)
                link = found[0][1]
    paths = [_transport(via) for _, via in _VIA.findall(body)]
    network = re.search(r"Using network (\S+)", body)
    named = network[1] if network else ""
    kinds = [first for first, _ in _TYPE.findall(body)]
    ranks, nodes = _RANKS.search(body), _NODES.search(body)
    return NcclLog(
        cards=cards,
        link=link,
        socket=bool(_OVER_TCP.search(body)) or any(path.startswith("NET/Socket") for path in paths),
        network=named,
        ranks=int(ranks[1]) if ranks else None,
        nodes=int(nodes[1]) if nodes else None,
        near=frozenset(path for path in paths if path.startswith(("P2P", "SHM"))),
        far=frozenset(re.sub(r"/\d+", "", path) for path in paths if path.startswith("NET")),
        gdr_off=bool(
            re.search(r"GPU ?Direct RDMA (?:is )?(?:Disabled|not available)|no nvidia-peermem", body, re.I)
            or (re.search(r"\bGDR 0\b", body) and not re.search(r"\bGDR 1\b|GDRDMA", body))
        ),
        gdr_on="GDRDMA" in body or bool(re.search(r"GPU ?Direct RDMA Enabled", body, re.I)),
        pcie_path=kinds[0] if kinds and kinds[0] not in ("NVL", "NVB", "LOC", "C2C") else "",
        events=tuple(dict.fromkeys(one.strip() for one in _ASYNC.findall(body))),
        settings=dict(_SET.findall(body)),
        domain_off=bool(re.search(r"\bMNNVL 0\b", body)) and not re.search(r"\bMNNVL 1\b", body),
        p2p_off=bool(
            re.search(r"P2P is disabled between|[Cc]ould not enable P2P|peer access.*not supported", body)
        ),
        nvls_off=bool(
            re.search(r"NVLS (?:multicast )?support is not available|NCCL_NVLS_ENABLE set.* to 0", body)
        ),
        card_path=next((second for _, second in _TYPE.findall(body)), ""),
        warnings=tuple(
            dict.fromkeys(line.split("NCCL WARN", 1)[1].strip() for line in lines if "NCCL WARN" in line)
        ),
        hosts=len({match[1] for line in lines if (match := _HOST.match(line))}),
        alone=_alone(body),
        nvls="NVLS multicast support is available" in body,
        found=tuple(int(count) for _, count in _FOUND.findall(body)),
    )


def _alone(body: str) -> int:
    if {int(one) for one in _RANKS.findall(body)} != {1}:
        return 0
    found = set(_ALONE.findall(body))
    return min(len({process for process, _ in found}), len({group for _, group in found}))


def _transport(via: str) -> str:
    """Versions before 2.12 spell shared memory out."""
    return "SHM" if via == "direct shared memory" else via
