"""NCCL's topology file (NCCL_TOPO_DUMP_FILE) as a MachineGraph."""

import re
from xml.etree import ElementTree

from cumulo.collectives.topology.machine_graph import CardPlace, GpuPlace, MachineGraph, shared_bridges
from cumulo.errors import ConfigError


def parse_nccl_xml(text: str) -> MachineGraph:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ConfigError("a topology file of NCCL has no document type; this file is refused")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"the file is not valid XML: {error}") from error
    if root.tag != "system":
        raise ConfigError(f"a topology file of NCCL begins with <system>, this one with <{root.tag}>")
    gpus: list[tuple[GpuPlace, list[str], ElementTree.Element]] = []
    cards: list[tuple[CardPlace, list[str]]] = []
    for cpu in root.iter("cpu"):
        numa = int(cpu.get("numaid", "0"))
        _walk(cpu, [f"cpu {numa}"], numa, gpus, cards)
    gpus.sort(key=lambda one: int(one[2].get("rank", one[2].get("dev", "0"))))
    by_bus = {place.bus.lower(): at for at, (place, _, _) in enumerate(gpus)}
    near, switched = {}, False
    for one, (_, path, element) in enumerate(gpus):
        for other, (_, other_path, _) in enumerate(gpus):
            if one != other:
                near[one, other] = _kind(path, other_path)
        to_switch = 0
        for nvlink in element.iter("nvlink"):
            count, target = int(nvlink.get("count", "1")), nvlink.get("target", "").lower()
            if target in by_bus:
                near[one, by_bus[target]] = f"NV{count}"
            elif nvlink.get("tclass", "").startswith("0x0680"):
                to_switch += count
        if to_switch:
            switched = True
            for other in range(len(gpus)):
                if other != one:
                    near[one, other] = f"NV{to_switch}"
    card_near = {
        (gpu, card): _kind(path, card_path)
        for gpu, (_, path, _) in enumerate(gpus)
        for card, (_, card_path) in enumerate(cards)
    }
    generation = next((int(element.get("sm", "0")) for _, _, element in gpus), 0) or None
    return MachineGraph(
        tuple(place for place, _, _ in gpus), tuple(place for place, _ in cards), near, card_near, generation,
        len(list(root.iter("cpu"))), switched,
    )  # fmt: skip


def _walk(
    element: ElementTree.Element,
    path: list[str],
    numa: int,
    gpus: list[tuple[GpuPlace, list[str], ElementTree.Element]],
    cards: list[tuple[CardPlace, list[str]]],
) -> None:
    for child in element:
        if child.tag == "pci":
            _walk(child, [*path, child.get("busid", "")], numa, gpus, cards)
        elif child.tag == "gpu":
            bus = path[-1]
            gpus.append((GpuPlace(f"GPU{child.get('dev', len(gpus))}", bus, numa), path, child))
        elif child.tag == "nic":
            for net in child.iter("net"):
                speed = float(re.sub(r"[^\d.]", "", net.get("speed", "0")) or 0) / 1000
                cards.append((CardPlace(net.get("name", f"NIC{len(cards)}"), speed, numa, path[-1]), path))


def _kind(one: list[str], other: list[str]) -> str:
    """By how far their paths from the CPU agree."""
    if one[0] != other[0]:
        return "SYS"
    shared = shared_bridges(one, other)
    if shared <= 1:
        return "PHB"
    far = max(len(one), len(other)) - 1 - shared
    return "PIX" if far <= 0 else "PXB"
