"""This machine as a MachineGraph: PCIe tree, NUMA nodes and network cards through sysfs, NVLink through
nvidia-smi."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from cumulo.collectives.topology.machine_graph import CardPlace, GpuPlace, MachineGraph, shared_bridges
from cumulo.collectives.topology.topo_text import parse_topo
from cumulo.errors import ConfigError

_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")
_GPU_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}


def read_machine(root: Path = Path("/sys")) -> MachineGraph:
    """`root`: where sysfs is; tests give a copy."""
    gpus, cards = _gpus(root), _cards(root)
    numa = len(list((root / "devices/system/node").glob("node[0-9]*"))) or 1
    found = MachineGraph(
        tuple(place for place, _ in gpus),
        tuple(place for place, _ in cards),
        {
            (one, other): _kind(path, other_path, gpus[one][0].numa, gpus[other][0].numa)
            for one, (_, path) in enumerate(gpus)
            for other, (_, other_path) in enumerate(gpus)
            if one != other
        },
        {
            (gpu, card): _kind(path, card_path, gpus[gpu][0].numa, cards[card][0].numa)
            for gpu, (_, path) in enumerate(gpus)
            for card, (_, card_path) in enumerate(cards)
        },
        numa_nodes=numa,
    )
    return _with_nvlink(found) if root == Path("/sys") else found


def _with_nvlink(found: MachineGraph) -> MachineGraph:
    """nvidia-smi knows NVLinks, which are no PCI devices."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return found
    text = subprocess.run([path, "topo", "-m"], capture_output=True, text=True, check=False).stdout
    try:
        told = parse_topo(text)
    except ConfigError:
        return found
    if len(told.gpus) != len(found.gpus):
        return told
    return replace(found, near=told.near, switched=told.switched)


def _gpus(root: Path) -> list[tuple[GpuPlace, list[str]]]:
    found: list[tuple[GpuPlace, list[str]]] = []
    for device in sorted((root / "bus/pci/devices").glob("*")):
        maker = _GPU_MAKERS.get(_text(device / "vendor"))
        if maker in ("NVIDIA", "AMD") and _text(device / "class")[:6] in _GPU_CLASSES:
            place = GpuPlace(f"GPU{len(found)}", device.name, _numa(device), maker or "")
            found.append((place, _path(device)))
    return found


def _cards(root: Path) -> list[tuple[CardPlace, list[str]]]:
    found = []
    for card in sorted((root / "class/infiniband").glob("*")):
        rate = re.match(r"[\d.]+", _text(card / "ports/1/rate"))
        device = card / "device"
        place = CardPlace(card.name, float(rate[0]) if rate else 0.0, _numa(device), device.resolve().name)
        found.append((place, _path(device)))
    known = {place.bus for place, _ in found}
    for card in sorted((root / "class/net").glob("*")):
        device = card / "device"
        if not device.exists() or device.resolve().name in known:
            continue  # virtual, or an RDMA card's own interface
        speed = _text(card / "speed")
        gbps = int(speed) / 1000 if speed.isdigit() else 0.0
        found.append((CardPlace(card.name, gbps, _numa(device), device.resolve().name), _path(device)))
    return found


def _path(device: Path) -> list[str]:
    """The PCI devices above it, host bridge first, itself last."""
    return [part for part in device.resolve().parts if re.match(r"(pci)?[0-9a-f]{4}:[0-9a-f]{2}", part)]


def _kind(one: list[str], other: list[str], numa: int | None, other_numa: int | None) -> str:
    if numa is not None and other_numa is not None and numa != other_numa:
        return "SYS"
    shared = shared_bridges(one, other)
    if shared == 0:
        return "NODE"
    if shared == 1:
        return "PHB"
    return "PIX" if max(len(one), len(other)) - 1 - shared <= 1 else "PXB"


def _numa(device: Path) -> int | None:
    text = _text(device / "numa_node")
    return max(0, int(text)) if re.fullmatch(r"-?\d+", text) else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
