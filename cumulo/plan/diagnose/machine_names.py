"""Which GPUs and network cards a text names: drivers' names, clouds' instances, cards in people's own words, and
what NCCL prints of them. `diagnose` compares a run with a machine that has these."""

import re
from collections import Counter
from dataclasses import replace

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
    (r"\bA800", "a800", "dgx-a100", 200e9, None),
    (r"\bH20\b", "h20", "dgx-h100", 450e9, None),
    (r"\bV100[- ]?(?:PCI|FHHL)|\bP100[- ]?PCI", "v100-pcie", "l40s-server", 16e9, 6.25e9),
    # Two rings of three NVLinks each way round, of which 130 GB/s arrive on 8 GPUs.
    (r"\bV100", "v100", "dgx-a100", 182e9, 6.25e9),
    (r"\bMI325X", "mi325x", "mi300x-server", None, None),
    (r"RTX PRO 6000|RTX 6000 Blackwell", "rtx-pro-6000", "l40s-server", 64e9, None),
    (r"\b(?:L4|A10G)\b", "pcie-x8-gpu", "l40s-server", 16e9, None),
    (r"\b(?:L40|L20|A40|A10|A30|RTX A6000|RTX 6000 Ada)\b", "pcie-gpu", "l40s-server", 32e9, None),
    (r"Tesla T4|\bT4\b", "t4", "l40s-server", 16e9, None),
)
# Clouds' machines: the GPU, and Gbit/s of network for each.
_INSTANCES = (
    (r"p3dn", "V100", 12.5),
    (r"p4de", "A100", 50.0),
    (r"p4d", "A100 40GB", 50.0),
    (r"p5en|p5e", "H200", 400.0),
    (r"p5", "H100", 400.0),
    (r"p6-b200", "B200", 400.0),
    (r"ND96asr\w*", "A100 40GB", 200.0),
    (r"ND96amsr\w*|NDm_A100_v4", "A100", 200.0),
    (r"ND96isr_H100\w*|ND_?H100_v5", "H100", 400.0),
    (r"ND96isr_H200\w*|ND_?H200_v5", "H200", 400.0),
    (r"a2-ultragpu-8g|a2-highgpu-8g", "A100", 12.5),
    (r"a3-highgpu-8g", "H100", 100.0),
    (r"a3-megagpu-8g", "H100", 200.0),
    (r"a3-ultragpu-8g", "H200", 400.0),
    (r"a4-highgpu-8g", "B200", 400.0),
    (r"BM\.GPU4\.8|BM\.GPU\.B4\.8|BM\.GPU\.A100-v2\.8", "A100", 200.0),
    (r"BM\.GPU\.H100\.8", "H100", 400.0),
    (r"BM\.GPU\.MI300X\.8", "MI300X", 400.0),
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
    for pattern, gpu, _ in _INSTANCES:
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
    for name, _, gbps in _INSTANCES:
        if re.search(rf"\b(?:{name})\b", text, re.IGNORECASE):
            return gbps
    return None


def logged_cards_gbps(text: str) -> dict[str, float]:
    """The rate of each card as NCCL prints it; of the host that has most of them the same numbers."""
    found: Counter[str] = Counter()
    for number, megabits in _LOGGED.findall(text):
        found[number] = max(found[number], int(megabits))
    return {number: megabits / 1e3 for number, megabits in found.items()}
