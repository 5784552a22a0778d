"""Machines as MachineGraphs: this one through sysfs and nvidia-smi, others from the table of `nvidia-smi topo -m`
or from NCCL's topology file (NCCL_TOPO_DUMP_FILE). `cumulo topology` reads them."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from cumulo.collectives.topology.machine_graph import CardPlace, GpuPlace, MachineGraph, links, shared_bridges
from cumulo.errors import ConfigError

_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")
_GPU_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}


def read_machine(root: Path = Path("/sys")) -> MachineGraph:
    """This machine: PCIe tree, NUMA nodes and network cards through sysfs, NVLink through nvidia-smi. `root`: where
    sysfs is; tests give a copy."""
    gpus, cards = _gpus(root), _cards(root)
    numa = len(list((root / "devices/system/node").glob("node[0-9]*"))) or 1
    found = MachineGraph(
        tuple(place for place, _ in gpus),
        tuple(place for place, _ in cards),
        {
            (one, other): _link_kind(path, other_path, gpus[one][0].numa, gpus[other][0].numa)
            for one, (_, path) in enumerate(gpus)
            for other, (_, other_path) in enumerate(gpus)
            if one != other
        },
        {
            (gpu, card): _link_kind(path, card_path, gpus[gpu][0].numa, cards[card][0].numa)
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
            place = GpuPlace(f"GPU{len(found)}", device.name, _numa_of(device), maker or "")
            found.append((place, _path(device)))
    return found


def _cards(root: Path) -> list[tuple[CardPlace, list[str]]]:
    found = []
    for card in sorted((root / "class/infiniband").glob("*")):
        rate = re.match(r"[\d.]+", _text(card / "ports/1/rate"))
        device = card / "device"
        place = CardPlace(card.name, float(rate[0]) if rate else 0.0, _numa_of(device), device.resolve().name)
        found.append((place, _path(device)))
    known = {place.bus for place, _ in found}
    for card in sorted((root / "class/net").glob("*")):
        device = card / "device"
        if not device.exists() or device.resolve().name in known:
            continue  # virtual, or an RDMA card's own interface
        speed = _text(card / "speed")
        gbps = int(speed) / 1000 if speed.isdigit() else 0.0
        found.append((CardPlace(card.name, gbps, _numa_of(device), device.resolve().name), _path(device)))
    return found


def _path(device: Path) -> list[str]:
    """The PCI devices above it, host bridge first, itself last."""
    return [part for part in device.resolve().parts if re.match(r"(pci)?[0-9a-f]{4}:[0-9a-f]{2}", part)]


def _link_kind(one: list[str], other: list[str], numa: int | None, other_numa: int | None) -> str:
    if numa is not None and other_numa is not None and numa != other_numa:
        return "SYS"
    shared = shared_bridges(one, other)
    if shared == 0:
        return "NODE"
    if shared == 1:
        return "PHB"
    return "PIX" if max(len(one), len(other)) - 1 - shared <= 1 else "PXB"


def _numa_of(device: Path) -> int | None:
    text = _text(device / "numa_node")
    return max(0, int(text)) if re.fullmatch(r"-?\d+", text) else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_LEGEND = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)", re.MULTILINE)
_KIND = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|mlx\d_\w+|\w*(?:roce|bnxt_re|irdma|efa)\w*")


def parse_topo(text: str) -> MachineGraph:
    plain = _ESCAPE.sub("", text)
    lines = [line for line in plain.splitlines() if line.strip()]
    header = next((line for line in lines if len(re.findall(r"GPU\d+", line)) and not _row(line)), None)
    if header is None:
        raise ConfigError("the text has no table of `nvidia-smi topo -m`: no line that names GPU0, GPU1, ...")
    columns = _DEVICE.findall(header.split("CPU Affinity")[0])
    rows = {match[0]: match[1] for line in lines if (match := _row(line)) is not None}
    legend = dict(_LEGEND.findall(plain))
    gpus = [name for name in columns if name.startswith("GPU")]
    cards = [name for name in columns if not name.startswith("GPU")]
    near, card_near, numa = {}, {}, {}
    for gpu, name in enumerate(gpus):
        if name not in rows:
            raise ConfigError(f"the table has no row for {name}")
        kinds, rest = rows[name]
        for column, kind in zip(columns, kinds, strict=False):
            if kind == "X":
                continue
            if column in gpus:
                near[gpu, gpus.index(column)] = kind
            else:
                card_near[gpu, cards.index(column)] = kind
        numa[gpu] = _numa(rest)
    pairs = [links(kind) for kind in near.values()]
    return MachineGraph(
        tuple(GpuPlace(name, numa=numa.get(at)) for at, name in enumerate(gpus)),
        tuple(CardPlace(legend.get(name, name)) for name in cards),
        near,
        card_near,
        numa_nodes=len({one for one in numa.values() if one is not None}) or 1,
        switched=len(gpus) > 4 and bool(pairs) and min(pairs) == max(pairs) > 0,
    )


def _row(line: str) -> tuple[str, tuple[list[str], str]] | None:
    words = line.split()
    if len(words) < 2 or not _DEVICE.fullmatch(words[0]) or not _KIND.fullmatch(words[1]):
        return None
    kinds = []
    for word in words[1:]:
        if not _KIND.fullmatch(word):
            break
        kinds.append(word)
    return words[0], (kinds, " ".join(words[1 + len(kinds) :]))


def _numa(rest: str) -> int | None:
    words = rest.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


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
    """The kind of a link, by how far the paths from the CPU agree."""
    if one[0] != other[0]:
        return "SYS"
    shared = shared_bridges(one, other)
    if shared <= 1:
        return "PHB"
    far = max(len(one), len(other)) - 1 - shared
    return "PIX" if far <= 0 else "PXB"
