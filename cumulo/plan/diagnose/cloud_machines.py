"""Clouds' machines by name: their GPUs, and their network. `diagnose` expects what these carry."""

from cumulo.base import quick_re as re

# Clouds' machines: the GPU, and Gbit/s of network for each.
INSTANCES = (
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
# Clouds' machines without RDMA: Gbit/s of the whole machine.
_TCP_INSTANCES = (
    (r"g4dn\.(?:xlarge|2xlarge)\b", 10.0),
    (r"g4dn\.4xlarge\b", 20.0),
    (r"g4dn\.(?:8|12|16)xlarge\b", 50.0),
    (r"g[56]\.(?:2?xlarge)\b", 10.0),
    (r"g[56]\.(?:4|8|16)xlarge\b", 25.0),
    (r"g[56]\.12xlarge\b", 40.0),
    (r"g[56]\.24xlarge\b", 50.0),
    (r"g[56]\.48xlarge\b", 100.0),
    (r"g6e\.(?:2?|4)xlarge\b", 20.0),
    (r"g6e\.(?:8|16)xlarge\b", 25.0),
    (r"g6e\.12xlarge\b", 100.0),
    (r"p3\.(?:2|8)xlarge\b", 10.0),
    (r"p3\.16xlarge\b", 25.0),
    (r"a2-(?:high|ultra)gpu-1g\b", 24.0),
    (r"a2-(?:high|ultra)gpu-2g\b", 32.0),
    (r"a2-(?:high|ultra)gpu-4g\b", 50.0),
    (r"a2-(?:high|ultra|mega)gpu-(?:8|16)g\b", 100.0),
    (r"g2-standard-96\b", 100.0),
    (r"g2-standard-48\b", 50.0),
    (r"g2-standard-(?:24|32)\b", 32.0),
    (r"(?:Standard_)?NC24ads_A100", 20.0),
    (r"(?:Standard_)?NC48ads_A100", 40.0),
    (r"(?:Standard_)?NC96ads_A100", 80.0),
    (r"(?:Standard_)?NC40ads_H100", 40.0),
    (r"(?:Standard_)?NC80adis_H100", 80.0),
)
# Network cards (EFA) of whole machines.
_EFA_CARDS = ((r"p5en\.48xl", 16), (r"p5e?\.48xl", 32), (r"p6-b[23]00\.48xl", 8), (r"p4de?[.-]24xl", 4))
_RDMA = re.compile(
    r"\bmlx[45]_|infiniband|\bIB(?:_HCA)?\b(?!\s*:\s*No device)|ConnectX|\bCX-?[4-8]\b|\befa\b|\b[NHEFX]DR\d*\b|"
    r"\bRoCE|"
    r"\birdma|bnxt_re|\brail|\bp[45](?:de?|en?)?\.|\bp3dn\b|\bND(?:96|m)|\ba3-|\ba4-|BM\.GPU|ibdev|ibstat|TCPX|"
    r"\bDGX|\bHGX",
    re.I,
)
_SPEED = re.compile(r"\b[Ss]peed\s*[:=\n]\s*(\d{4,6})(?:\s*Mb/s)?\b")
_ETHERNET = re.compile(
    r"\b(1|2\.5|10|20|25|32|40|50|80|100|200)[ -]?(?:GbE|GigE|Gigabit(?: Ethernet)?|Gbit(?:/s)?|Gbps|Gb/s|G)\b"
    r"(?!\w)",
    re.I,
)


def efa_cards_of(text: str) -> int | None:
    return next((cards for pattern, cards in _EFA_CARDS if re.search(rf"\b{pattern}", text, re.I)), None)


def tcp_machine_gbps(text: str) -> float | None:
    """Of a cloud's machine that has no RDMA, where the text speaks of no other kind: Gbit/s of all of it."""
    found = [gbps for pattern, gbps in _TCP_INSTANCES if re.search(rf"\b{pattern}", text, re.IGNORECASE)]
    return found[0] if len(set(found)) == 1 and not _RDMA.search(text) else None


def tcp_gbps_of(text: str) -> float | None:
    """Gbit/s of a node's Ethernet, of a machine that has no RDMA; None: the text says nothing, or names RDMA."""
    for pattern, gbps in _TCP_INSTANCES:
        if re.search(rf"\b{pattern}", text, re.IGNORECASE):
            return gbps
    if _RDMA.search(text):
        return None
    speeds = [float(one) / 1e3 for one in _SPEED.findall(text)]
    speeds += [float(one) for one in _ETHERNET.findall(text)]
    return max(speeds, default=None)
