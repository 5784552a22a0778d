"""An NCCL log (NCCL_DEBUG=INFO) as facts: cards, transports, paths and settings."""

import re
from dataclasses import dataclass

_USING = re.compile(r"NET/IB\s*:\s*Using\s+(.*)")
_CARD = re.compile(r"\[\d+\]\s*([\w.\-]+):\d+/(\w+)")
_HOST = re.compile(r"^([\w.\-]+):\d+:\d+\s+\[")
_INFO = re.compile(r"NCCL (?:INFO|WARN)")
_RANKS = re.compile(r"\bnranks\s+(\d+)", re.I)
_NODES = re.compile(r"\bnNodes\s+(\d+)")
_PROCESS = re.compile(r"(.*?:\d+):\d+ \[")
_GROUP = re.compile(r"\bcommId\s+(\w+)", re.I)
_VIA = re.compile(
    r"->\s*\d+\[[\w]+\]\s*(?:\[(?:send|receive)\]\s*)?via\s+(direct shared memory|NET/\w+(?: \w+)*/\S+|\S+)"
)
_OVER_TCP = re.compile(
    r"NET/OFI.{0,200}[Pp]rovider is tcp|Using network (?:Socket|TCP)\b|NET/IB\s*:\s*No device found"
)
_TYPE = re.compile(r"\btype\s+(\w+)/(\w+)")
_GDR_OFF = re.compile(r"GPU ?Direct RDMA (?:is )?(?:Disabled|not available)|no nvidia-peermem", re.I)
_GDR_ON = re.compile(r"GDRDMA|GPU ?Direct RDMA Enabled", re.I)
_P2P_OFF = re.compile(r"P2P is disabled between|[Cc]ould not enable P2P|peer access.{0,80}not supported")


@dataclass(frozen=True, slots=True)
class NcclLog:
    cards: dict[str, tuple[str, ...]]  # network cards in use, by host
    link: str  # IB, RoCE or ""
    socket: bool  # data goes over TCP
    ranks: int | None
    nodes: int | None
    hosts: int  # that wrote it
    near: frozenset[str]  # transports inside a node: P2P/CUMEM, SHM/direct/direct
    far: frozenset[str]  # between nodes: NET/IB/GDRDMA
    gdr_off: bool
    gdr_on: bool
    pcie_path: str  # PHB, SYS, ...: the type NCCL found between GPUs, where it is no NVLink
    p2p_off: bool  # NCCL says that GPUs of a node cannot reach each other
    alone: int  # processes, if each has a communicator of its own with one rank


def parse_nccl_log(text: str) -> NcclLog | None:
    lines = [line for line in text.splitlines() if _INFO.search(line)]
    if not lines:
        return None
    body = "\n".join(lines)
    cards: dict[str, tuple[str, ...]] = {}
    link = ""
    for line in lines:
        if (using := _USING.search(line)) and (found := _CARD.findall(using[1])):
            host = _HOST.match(line)
            cards[host[1] if host else "here"] = tuple(name for name, _ in found)
            link = found[0][1]
    paths = {"SHM" if via == "direct shared memory" else via for via in _VIA.findall(body)}
    far = frozenset(re.sub(r"/\d+", "", path) for path in paths if path.startswith("NET"))
    kinds = [first for first, _ in _TYPE.findall(body)]
    ranks, nodes = _RANKS.search(body), _NODES.search(body)
    without = any(path.startswith("NET/IB") and "GDRDMA" not in path for path in far)
    return NcclLog(
        cards=cards,
        link=link,
        socket=bool(_OVER_TCP.search(body)) or any(path.startswith("NET/Socket") for path in far),
        ranks=int(ranks[1]) if ranks else None,
        nodes=int(nodes[1]) if nodes else None,
        hosts=len({match[1] for line in lines if (match := _HOST.match(line))}),
        near=frozenset(path for path in paths if path.startswith(("P2P", "SHM"))),
        far=far,
        gdr_off=bool(_GDR_OFF.search(body)) or (without and not _GDR_ON.search(body)),
        gdr_on=bool(_GDR_ON.search(body)),
        pcie_path=kinds[0] if kinds and kinds[0] not in ("NVL", "NVB", "LOC", "C2C") else "",
        p2p_off=bool(_P2P_OFF.search(body)),
        alone=_alone(body),
    )


def _alone(body: str) -> int:
    if set(_RANKS.findall(body)) != {"1"}:
        return 0
    found = [
        (process[1], group[1])
        for line in body.splitlines()
        if _RANKS.search(line) and (process := _PROCESS.match(line)) and (group := _GROUP.search(line))
    ]
    return min(len({process for process, _ in found}), len({group for _, group in found}))
