"""Which GPUs and network cards a text names: drivers' names, clouds' instances, cards in people's own words, and
what NCCL prints of them. `diagnose` compares a run with a machine that has these."""

from collections import Counter
from dataclasses import replace

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.cloud_machines import INSTANCES
from cumulo.spec import catalog
from cumulo.spec.device import Node

# Names as drivers print them, the first that fits; PCIe boards before their SXM sisters.
_NODES = (
    (r"H100.*PCIe|H100 PCIe", "h100-pcie-server"),
    (r"H100 NVL|H200 NVL", "h100-nvl-server"),
    (r"GB300", "gb300-nvl72"),
    (r"GB200", "gb200-nvl72"),
    (r"B300", "dgx-b300"),
    (r"B200", "dgx-b200"),
    (r"H200", "dgx-h200"),
    (r"H100|HGX H100", "dgx-h100"),
    (r"H800", "hgx-h800"),
    (r"A800", "hgx-a800"),
    (r"A100.*40GB", "dgx-a100-40gb"),
    (r"A100.*SXM|A100", "dgx-a100"),
    (r"MI300X", "mi300x-server"),
    (r"L40S", "l40s-server"),
    (r"RTX 4090", "rtx-4090-workstation"),
    (r"RTX 5090", "rtx-5090-workstation"),
)
# GPUs that the planner's catalogue lacks: a node of it that has the same kind of links, their rate each way, and
# the network of each GPU where it is another one (bytes/s).
_LIKE: tuple[tuple[str, str, str, float | None, float | None], ...] = (
    (r"\bA100[- ]?(?:80GB |40GB )?PCI", "a100-pcie", "l40s-server", 32e9, 25e9),
    (r"\bH20\b", "h20", "dgx-h100", 450e9, None),
    (r"\bV100[- ]?(?:PCI|FHHL)|\bP100[- ]?PCI", "v100-pcie", "l40s-server", 16e9, 6.25e9),
    # Two rings of three NVLinks each way round, of which 130 GB/s arrive on 8 GPUs.
    (r"\bV100", "v100", "dgx-a100", 182e9, 6.25e9),
    (r"\bMI325X", "mi325x", "mi300x-server", None, None),
    (r"\bMI(?:350|355)X", "mi355x", "mi300x-server", 538e9, None),
    (r"\bMI250X?|\bMI210", "mi250", "mi300x-server", 175e9, 12.5e9),
    (r"RTX PRO 6000|RTX 6000 Blackwell", "rtx-pro-6000", "l40s-server", 64e9, None),
    (r"\b(?:L4|A10G)\b", "pcie-x8-gpu", "l40s-server", 16e9, None),
    (
        r"\b(?:L40|L20|A40|A10|A16|A30|RTX A[456]000|RTX 6000 Ada|RTX 30[6789]0|30[89]0|RTX 40[678]0|A6000)\b",
        "pcie-gpu",
        "l40s-server",
        32e9,
        None,
    ),
    (
        r"RTX (?:20[78]0|[568]000)\b|TITAN (?:RTX|V)|Quadro|GTX 10[78]0|\bP40\b|\bP4\b",
        "pcie3-gpu",
        "l40s-server",
        16e9,
        None,
    ),
    (r"Tesla T4|\bT4\b", "t4", "l40s-server", 16e9, None),
)
# Boards that a bridge joins in pairs: GB/s each way that it carries, as the model reckons (0.77 of it arrive).
_BRIDGED: tuple[tuple[str, str, float], ...] = (
    (r"\bA100[- ]?(?:80GB |40GB )?PCI", "a100-pcie-bridged", 300e9),
    (r"\bH100[- ]?(?:80GB )?PCI", "h100-pcie-bridged", 300e9),
    (r"\bA30\b", "a30-bridged", 110e9),
    (r"\b(?:RTX )?30?90\b|RTX 3090|\bA40\b|RTX A[56]000|\bA6000\b", "bridged-gpu", 66e9),
    (r"RTX 2080|TITAN RTX|Quadro RTX [68]000|RTX [68]000", "bridged-gpu-2", 56e9),
)
_BRIDGE = re.compile(
    r"\bnv-?link(?:s|ed)?\b[^\n]{0,40}\bbridges?\b|\bbridges?\b[^\n]{0,40}\bnv-?link|\bNVL? bridges?\b|"
    r"\bNV(?:[1-9]|1[0-2])\b|Link \d+:\s*[\d.]+ GB/s|\bbridged\b",
    re.I,
)
_NO_BRIDGE = re.compile(
    r"\b(?:no|without(?: an?| the)?|missing|not?) (?:NV-?Link |NVL )?bridges?\b|\bno NV-?Link\b", re.I
)
_RATES = r"(?:NDR200|NDR|XDR|HDR100|HDR|EDR|FDR)"
_GENERATION = {
    "xdr": 800.0, "ndr": 400.0, "ndr200": 200.0, "hdr": 200.0, "hdr100": 100.0, "edr": 100.0, "fdr": 56.0,
}  # fmt: skip
_CARDS = (
    re.compile(r"\b(\d{1,2})\s*(?:x|×|\*)\s*(\d{2,3})\s*-?\s*G(?:b|B|E|bE|bit|bps|b/s|bit/s)?\b", re.I),
    re.compile(rf"\b(\d{{1,2}})\s*(?:x|×)\s*(?:[\w-]+\s+)?({_RATES})\d*\b", re.I),
    re.compile(
        r"\b(one|single|two|four|eight|\d{1,2})\s*(?:x|×|\*)?\s*(?:NVIDIA |Mellanox )?(?:ConnectX|CX)-?\s?\d\w*"
        r"\s*(?:Dx|VPI)?[ ,(]*(\d{2,3})\s*G",
        re.I,
    ),
)
# "one EDR per node", "2 x HDR200 a node"
_NODE_CARDS = re.compile(
    rf"\b(one|single|two|four|eight|\d{{1,2}})\s*(?:x|×)?\s*(?:[\w-]+\s+){{0,2}}?"
    rf"(?:({_RATES})|(\d{{2,3}})\s?G\w*)\b[^\n,;]{{0,20}}?(?:per|/|\ba|each)\s*(?:node|host|server)",
    re.I,
)
_NUMBERS = {"one": 1, "single": 1, "two": 2, "four": 4, "eight": 8}
_EACH = re.compile(
    rf"\b(?:(\d{{2,3}})\s*G(?:b|bps|b/s|bit/s|E|bE)?|({_RATES}))\s*(?:\w+\s+)?(?:per|for each|/)\s*GPU", re.I
)
_TOTAL = re.compile(r"\b(\d(?:\.\d+)?)\s*T(?:bps|b/s|bit/s)\b|\b(\d{4})\s*G(?:bps|b/s|bit/s)\b", re.I)
_LOGGED = re.compile(r"NET/IB\s*:\s*\[(\d+)\]\s*[\w.-]+:\S+.*?\bspeed=(\d+)")
# What one GPU's NVLinks carry each way, as NCCL's graph search prints it, and whose they are.
_NVLINK = re.compile(r"\bNVL\[(\d+(?:\.\d+)?)\]|\btotalBw (\d+(?:\.\d+)?)")
_NVLINKS = re.compile(r"\bNV(\d{1,2})\b")
_LINK_GBPS = {
    18: 375.0,
    12: 240.0,
    6: 125.0,
}  # GPUs by the number of their links, as nvidia-smi's matrix has it
_NVLINK_OF = ((600.0, "B200"), (330.0, "H100"), (220.0, "A100"), (100.0, "V100"))


_CARD_NAMES = re.compile(
    r"\b(one|single|two|four|eight|\d{1,2})\s*(?:x|×|\*)?\s*(?:NVIDIA |Mellanox )?(?:ConnectX|CX)-?\s?([5678])\b",
    re.I,
)
_CARD_NAME_GBPS = {"5": 100.0, "6": 200.0, "7": 400.0, "8": 800.0}  # what they can do at most


def bridged_node(device: str, text: str) -> Node | None:
    """Of two boards that are joined by a bridge, as the text around their names says."""
    if not _BRIDGE.search(text) or _NO_BRIDGE.search(text):
        return None
    for pattern, name, rate in _BRIDGED:
        if re.search(pattern, device, re.IGNORECASE):
            node = catalog.node("h100-nvl-server")
            return replace(node, device=replace(node.device, name=name, link_bytes_per_s=rate))
    return None


def node_of(text: str) -> Node | None:
    for pattern, name, like, rate, card in _LIKE:
        if re.search(pattern, text, re.IGNORECASE):
            node = catalog.node(like)
            links = node.device.link_bytes_per_s if rate is None else rate
            device = replace(node.device, name=name, link_bytes_per_s=links)
            return replace(node, device=device, nic_bytes_per_s=card or node.nic_bytes_per_s)
    for pattern, name in _NODES:
        if re.search(pattern, text, re.IGNORECASE):
            return catalog.node(name)
    for pattern, gpu, _ in INSTANCES:
        if re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            return node_of(gpu)
    return _node_of_links(text)


def _node_of_links(text: str) -> Node | None:
    """Where no name is printed: what NCCL found of NVLink."""
    rates = [float(first or second) for first, second in _NVLINK.findall(text)]
    rates += [_LINK_GBPS.get(int(one), 0.0) for one in _NVLINKS.findall(text)]
    most = max(rates, default=0.0)
    return next((node_of(gpu) for least, gpu in _NVLINK_OF if most >= least), None)


def card_gbps_of(text: str, gpus: int) -> float | None:
    """Gbit/s of network for each of a node's `gpus`, where the text states it."""
    if found := _EACH.search(text):
        return float(found[1]) if found[1] else _GENERATION[found[2].lower()]
    best = 0.0
    for number, generation, rate in _NODE_CARDS.findall(text):
        count = _NUMBERS.get(number.lower()) or int(number)
        best = max(best, count * (float(rate) if rate else _GENERATION[generation.lower()]))
    for pattern in _CARDS:
        for cards, each in pattern.findall(text):
            gbps = float(each) if each.isdigit() else _GENERATION[each.lower()]
            best = max(best, (_NUMBERS.get(cards.lower()) or int(cards)) * gbps)
    if best:
        return best / gpus
    if named := _CARD_NAMES.search(text):
        cards = _NUMBERS.get(named[1].lower()) or int(named[1])
        return cards * _CARD_NAME_GBPS[named[2]] / gpus
    for terabits, gigabits in _TOTAL.findall(text):
        best = max(best, float(terabits) * 1000 if terabits else float(gigabits))
    if best:
        return best / gpus
    if logged := logged_cards_gbps(text):
        return sum(logged.values()) / gpus
    for name, _, gbps in INSTANCES:
        if re.search(rf"\b(?:{name})\b", text, re.IGNORECASE):
            return gbps
    return None


def logged_cards_gbps(text: str) -> dict[str, float]:
    """The rate of each card as NCCL prints it; of the host that has most of them the same numbers."""
    found: Counter[str] = Counter()
    for number, megabits in _LOGGED.findall(text):
        found[number] = max(found[number], int(megabits))
    return {number: megabits / 1e3 for number, megabits in found.items()}
