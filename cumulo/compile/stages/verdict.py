"""What limits a kernel, read from its stages: coalescing, bank conflicts, spills, occupancy, matrix units, and
operations per byte against what a device balances at. Pure; called by `cumulo compile stages` and its page.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cumulo.compile.stages.addresses import SECTOR, MemoryAccess, accesses
from cumulo.compile.stages.record import TARGETS, StagesRecord
from cumulo.spec.catalog import device

# By compute capability: registers and shared memory of a multiprocessor, its warps and its blocks (CUDA's tables).
_PROCESSOR = {
    80: (65_536, 164 << 10, 64, 32),
    86: (65_536, 100 << 10, 48, 16),
    89: (65_536, 100 << 10, 48, 24),
    90: (65_536, 228 << 10, 64, 32),
    100: (65_536, 228 << 10, 64, 32),
}
_EXAMPLE = {"sm_80": "a100-80gb", "sm_90a": "h100-sxm", "sm_100": "b200", "gfx942": "mi300x"}
_MANY = 32  # sectors, below which repeated requests cost nothing that anybody sees
_RESERVED = 1 << 10  # bytes of shared memory that each block costs beside its own


@dataclass(frozen=True, slots=True)
class Waste:
    """Something that costs time, and where."""

    kind: str
    line: int  # of the kernel's file; 0: the whole kernel
    text: str
    cost: float  # about how many times as much work as needed


@dataclass(frozen=True, slots=True)
class LineTraffic:
    """All accesses of one source line in one direction, of one block."""

    line: int
    space: str
    is_store: bool
    instruction: str
    count: int
    requested_sectors: int
    touched_sectors: int
    used_bytes: int
    ways: int
    judged: bool

    @property
    def efficiency(self) -> float:
        """The share of the fetched bytes that a thread uses."""
        return self.used_bytes / (SECTOR * self.touched_sectors) if self.touched_sectors else 1.0


@dataclass(frozen=True, slots=True)
class Occupancy:
    blocks: int
    share: float  # of a multiprocessor's warps
    limit: str


@dataclass(frozen=True, slots=True)
class BlockWork:
    """Of one block, in its heaviest loop if it has one."""

    flops: float
    bytes: float
    matrix: bool
    loop: bool
    whole: bool  # False: bulk copies (TMA) move bytes that are not counted


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    findings: list[Waste]
    traffic: list[LineTraffic]
    occupancy: Occupancy | None
    work: BlockWork | None
    matrix_instructions: dict[str, int]
    summary: str


def judge(one: StagesRecord) -> KernelVerdict:
    backend, arch, _ = TARGETS[one.target]
    traffic, work = [], None
    ptx = one.stage("ptx")
    if ptx is not None:
        lines = ptx.text.split("\n")
        found = accesses(lines, ptx.lines, one.resources.warps, _numbers(one, ptx.text))
        traffic = list(_by_line(found))
        work = _work(lines, found, one.resources.warps)
    occupancy = _occupancy(one, int(arch)) if backend == "cuda" else None
    matrix = _matrix_instructions(one)
    findings = sorted(_findings(one, traffic, occupancy, matrix), key=lambda it: -it.cost)
    return KernelVerdict(findings, traffic, occupancy, work, matrix, _summary(one, findings, work))


def _numbers(one: StagesRecord, ptx: str) -> list[int]:
    """A number for each parameter: pointers a TiB apart, other numbers what the user said, or 4096 where they are
    known to be divisible by 16 and 1001 where they are not."""
    launch = one.launch
    names = [name for name, kind in launch.signature.items() if kind != "constexpr"]
    indices = {name: str(index) for index, name in enumerate(launch.signature)}
    numbers = []
    for index, found in enumerate(re.finditer(r"^\s*\.param (.*?)\w+_param_\d+", ptx, re.MULTILINE)):
        name = names[index] if index < len(names) else ""
        if ".ptr" in found[1] or launch.signature.get(name, "").startswith("*"):
            numbers.append((index + 1) << 40)
        else:
            divisible = bool(launch.attributes.get(indices.get(name, "")))
            numbers.append(launch.numbers.get(name, 4096 if divisible else 1001))
    return numbers


def _by_line(found: list[MemoryAccess]) -> Iterator[LineTraffic]:
    groups: dict[tuple[int, str, bool], list[MemoryAccess]] = defaultdict(list)
    for access in found:
        groups[access.source_line, access.space, access.is_store].append(access)
    for (line, space, is_store), group in sorted(groups.items()):
        sectors = [one.sectors for one in group if one.sectors is not None]
        words = [one.used_bytes for one in group if one.used_bytes is not None]
        yield LineTraffic(
            line, space, is_store,
            instruction=" ".join(sorted({one.instruction for one in group})),
            count=len(group),
            requested_sectors=sum(map(len, sectors)),
            touched_sectors=len(np.unique(np.concatenate(sectors))) if sectors else 0,
            used_bytes=len(np.unique(np.concatenate(words))) if words else 0,
            ways=max(one.ways for one in group),
            judged=space == "shared" or len(sectors) == len(group),
        )  # fmt: skip


def _occupancy(one: StagesRecord, capability: int) -> Occupancy:
    registers, shared, most_warps, most_blocks = _PROCESSOR[capability]
    used, warps = one.resources, one.resources.warps
    per_warp = -(-max(used.registers, 1) * 32 // 256) * 256  # registers are given out 256 at a time
    limits = {
        "warps": most_warps // warps,
        "blocks": most_blocks,
        "registers": registers // (per_warp * warps),
        "shared memory": shared // (used.shared_bytes + _RESERVED),
    }
    limit = min(limits, key=lambda name: limits[name])
    blocks = limits[limit]
    return Occupancy(blocks, blocks * warps / most_warps, limit)


def _matrix_instructions(one: StagesRecord) -> dict[str, int]:
    machine = one.stage("sass") or one.stage("amdgcn")
    counts: dict[str, int] = {}
    for name in re.findall(
        r"\b([HIDQ]MMA|[HIQB]GMMA|UTC\w*MMA|v_mfma_\w+)\b", machine.text if machine else ""
    ):
        counts[name] = counts.get(name, 0) + 1
    return counts


def _work(lines: list[str], found: list[MemoryAccess], warps: int) -> BlockWork:
    """Floating-point operations and bytes of global memory in the heaviest innermost loop, or in all of it."""
    labels = {text.split(":")[0]: at for at, text in enumerate(lines) if re.match(r"\$L__BB\w+:", text)}
    loops = []
    for at, text in enumerate(lines):
        for name in re.findall(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)", text):
            if labels.get(name, at) < at:
                loops.append((labels[name], at))
    innermost = [
        (begin, end) for begin, end in loops
        if not any((begin, end) != other and begin <= other[0] and other[1] <= end for other in loops)
    ]  # fmt: skip
    spans = innermost or [(0, len(lines))]
    heaviest = max(spans, key=lambda span: _flops(lines[span[0] : span[1]], warps)[0])
    flops, matrix = _flops(lines[heaviest[0] : heaviest[1]], warps)
    moved = sum(
        len(one.used_bytes)
        for one in found
        if one.used_bytes is not None and heaviest[0] <= one.at < heaviest[1]
    )
    bulk = any("cp.async.bulk" in text for text in lines)
    return BlockWork(flops, moved, matrix, bool(innermost), not bulk)


def _flops(lines: list[str], warps: int) -> tuple[float, bool]:
    total, matrix = 0.0, False
    for text in lines:
        if found := re.search(r"\b(wgmma\.mma_async|mma)\.sync\S*\.m(\d+)n(\d+)k(\d+)", text):
            size = int(found[2]) * int(found[3]) * int(found[4])
            total += 2.0 * size * (warps / 4 if found[1].startswith("wgmma") else warps)
            matrix = True
        elif found := re.search(
            r"\b(fma|add|sub|mul|max|min|ex2|div|sqrt|rsqrt)\.[\w.]*f(16|32|64)(x2)?\b", text
        ):
            total += 32 * warps * (2 if found[1] == "fma" else 1) * (2 if found[3] else 1)
    return total, matrix


def _findings(
    one: StagesRecord, traffic: list[LineTraffic], occupancy: Occupancy | None, matrix: dict[str, int]
) -> Iterator[Waste]:
    used = one.resources
    if spilled := used.spill_store_bytes + used.spill_load_bytes:
        text = (
            f"registers spill: {used.spill_store_bytes} bytes stored and {used.spill_load_bytes} loaded per "
            f"thread, with {used.registers} registers. Smaller tiles or more warps need fewer."
        )
        yield Waste("spills", 0, text, 2.0 + spilled / 64)
    for row in traffic:
        where = "store" if row.is_store else "load"
        if row.space == "shared" and row.ways > 1:
            text = (
                f"shared-memory {where} with {row.ways}-way bank conflicts: it is repeated {row.ways} times."
            )
            yield Waste("bank conflicts", row.line, text, float(row.ways))
        elif row.space == "global" and row.judged and row.touched_sectors >= 4:
            if row.efficiency <= 0.5:
                text = (
                    f"uncoalesced {where}: of each {SECTOR}-byte sector that moves, "
                    f"{row.efficiency * SECTOR:.0f} bytes are used. Neighbouring threads should reach neighbouring "
                    "addresses."
                )
                yield Waste("uncoalesced", row.line, text, 1 / row.efficiency)
            elif row.requested_sectors >= 2 * row.touched_sectors >= _MANY:
                times = row.requested_sectors / row.touched_sectors
                text = (
                    f"this {where} asks for each sector {times:.0f} times: {row.count} × {row.instruction}."
                )
                yield Waste("repeated requests", row.line, text, 1 + times / 8)
    ttgir = one.stage("ttgir")
    if ttgir is not None and "tt.dot" in ttgir.text and not matrix:
        yield Waste("no matrix unit", 0, "a product of tiles is computed without matrix instructions.", 8.0)
    llir = one.stage("llir")
    if llir is not None and re.search(r"\bf(add|mul|div|sub) double\b", llir.text):
        yield Waste("float64", 0, "some arithmetic is in float64, which most GPUs do slowly.", 4.0)
    # Products of tiles keep matrix units busy from few warps.
    if occupancy is not None and occupancy.share < 0.25 and not matrix:
        text = (
            f"{occupancy.share:.0%} of a multiprocessor's warps fit at once ({occupancy.blocks} blocks), "
            f"limited by {occupancy.limit}: little hides the time of memory."
        )
        yield Waste("low occupancy", 0, text, 1.5)


def _summary(one: StagesRecord, findings: list[Waste], work: BlockWork | None) -> str:
    parts = []
    example = _EXAMPLE.get(one.target)
    if work is not None and work.bytes and work.whole and example is not None:
        known, intensity = device(example), work.flops / work.bytes
        balance = known.flops("bfloat16" if work.matrix else "float32") / known.memory_bytes_per_s
        kind = "memory" if intensity < balance else "arithmetic"
        where = "the inner loop has" if work.loop else "there are"
        unit = "matrix units" if work.matrix else "float32 units"
        parts.append(
            f"Limited by {kind}: {where} {intensity:.2g} operations per byte of global memory, and the {unit} "
            f"of an {example} need {balance:.0f} to be busy."
        )
    if work is not None and not work.whole:
        parts.append("Bulk copies (TMA) move what it reads, so that its bytes are not counted here.")
    if not findings:
        parts.append("Nothing was found that wastes time: accesses are coalesced, and no register spills.")
    return " ".join(parts)
