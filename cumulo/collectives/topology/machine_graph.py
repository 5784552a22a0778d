"""MachineGraph: the GPUs and network cards of a machine, and the kind of path between each two. The
readers make it; the report and the planner's catalogue entry come from it.

Path kinds are nvidia-smi's: NV# (so many NVLinks), PIX (one PCIe switch), PXB (several), PHB (through the
CPU), NODE (through its PCIe host bridges), SYS (through the link between CPUs)."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from cumulo.errors import ConfigError

# GB/s of an NVLink each way by the GPUs' generation, as NCCL 2.30 counts them (src/graph/topo.h).
NVLINK_GBPS = {60: 18.0, 70: 20.0, 80: 20.0, 86: 12.0, 90: 20.6, 100: 40.1}
ORDER = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
_BY_LINKS = {18: 90, 12: 80, 6: 70, 4: 60}  # what a number of links to every peer tells about the generation
_DEVICES = {70: "v100", 80: "a100-80gb", 86: "a10", 89: "l40s", 90: "h100-sxm", 100: "b200"}
_CARD_GBPS = {70: 100.0, 80: 200.0, 90: 400.0, 100: 400.0}  # where a description does not say a card's rate


@dataclass(frozen=True, slots=True)
class GpuPlace:
    name: str  # GPU0
    bus: str = ""
    numa: int | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class CardPlace:
    name: str  # mlx5_0
    gbps: float = 0.0
    numa: int | None = None
    bus: str = ""


@dataclass(frozen=True)
class MachineGraph:
    gpus: tuple[GpuPlace, ...]
    cards: tuple[CardPlace, ...]
    near: dict[tuple[int, int], str] = field(default_factory=dict)  # (GPU, GPU) -> kind
    card_near: dict[tuple[int, int], str] = field(default_factory=dict)  # (GPU, card) -> kind
    compute_capability: int | None = None  # 90 for Hopper
    numa_nodes: int = 1
    switched: bool = False  # NVLinks go to switches, so that any pair has all of them

    @cached_property
    def generation(self) -> int:
        """Compute capability; guessed from the number of links where it is not said."""
        if self.compute_capability is not None:
            return self.compute_capability
        most = max((links(kind) for kind in self.near.values()), default=0)
        return _BY_LINKS.get(most, 90 if most > 12 else 80)

    @cached_property
    def nvlink_gbps(self) -> float:
        known = [sm for sm in NVLINK_GBPS if sm <= self.generation]
        return NVLINK_GBPS[max(known)] if known else 20.0

    @property
    def domain(self) -> int:
        """GPUs that NVLink joins into one group, with GPU 0."""
        seen, open_ = {0}, [0]
        while open_:
            at = open_.pop()
            for other in range(len(self.gpus)):
                if other not in seen and links(self.near.get((at, other), "")):
                    seen.add(other)
                    open_.append(other)
        return len(seen) if self.gpus else 0

    def nearest_card(self, gpu: int) -> int | None:
        """The card that NCCL gives a GPU: the nearest; of equal ones, in turns."""
        ranked = sorted(
            (_rank(self.card_near.get((gpu, card), "SYS")), (card - gpu) % max(1, len(self.cards)), card)
            for card in range(len(self.cards))
        )
        return ranked[0][2] if ranked else None

    def entry(self, name: str, device: str | None = None) -> dict[str, object]:
        """An entry of the planner's catalogue (`nodes:`)."""
        if not self.gpus:
            raise ConfigError("the machine has no GPUs, so that there is no node to describe")
        used = {card for gpu in range(len(self.gpus)) if (card := self.nearest_card(gpu)) is not None}
        usual = _CARD_GBPS.get(self.generation, 100.0) if self.cards else 0.0
        gbps = sum(self.cards[card].gbps or usual for card in used)
        found: dict[str, object] = {
            "device": device or _DEVICES.get(self.generation, "h100-sxm"),
            "gpus": len(self.gpus),
            "scale_up_gpus": max(1, self.domain),
            "nic_bytes_per_s": gbps * 1e9 / 8 / len(self.gpus) or 1.25e9,
            "power_w": 0,
        }
        return {"nodes": {name: found}}

    def complaints(self) -> list[str]:
        """What a person would want to know before running on it."""
        found = []
        for gpu, place in enumerate(self.gpus):
            card = self.nearest_card(gpu)
            if card is not None and self.card_near.get((gpu, card), "SYS") == "SYS":
                found.append(
                    f"{place.name} reaches every network card through the link between CPUs (SYS): no "
                    f"GPUDirect RDMA"
                )
        kinds = {self.near[pair] for pair in self.near}
        if (
            kinds
            and self.gpus
            and any(links(kind) for kind in kinds)
            and not all(links(kind) for kind in kinds)
        ):
            found.append("Some pairs of GPUs have NVLink and some do not")
        return found


def links(kind: str) -> int:
    """NVLinks of a path kind; 0: none."""
    match = re.fullmatch(r"NV(\d+)", kind)
    return int(match[1]) if match else 0


def _rank(kind: str) -> int:
    return 0 if links(kind) else ORDER.index(kind) if kind in ORDER else len(ORDER)


def shared_bridges(one: list[str], other: list[str]) -> int:
    """How many parts of two paths from the CPU agree, from the first on; the last part is the device itself."""
    pairs = zip(one[:-1], other[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
