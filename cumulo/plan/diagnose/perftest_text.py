"""The output of perftest (ib_write_bw, ib_read_lat, ...) and of the OSU micro-benchmarks (osu_bw, osu_bibw,
osu_latency) as data, of each test in a text. `diagnose` calls it."""

import re
from dataclasses import dataclass
from itertools import pairwise

LINE_RATES_GBPS = (10.0, 25.0, 40.0, 50.0, 56.0, 100.0, 200.0, 400.0, 800.0)
_FIELD = re.compile(r"(Device|Mtu|Link type|Number of qps|GID index)\s*:\s*(\S+)")
_UNIT = re.compile(r"BW average\[(\w+)/sec\]")
_ROW = re.compile(r"^[^\S\n]*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)(?:\s+([\d.]+))?", re.MULTILINE)
_LATENCY = re.compile(r"t_typical\[usec\]")
_BANNER = re.compile(
    r"^.*\b(?:RDMA_Write|RDMA_Read|Send|Atomic\S*)\b.*\b(?:BW|Latency|Bidirectional)\b.*Test", re.M
)
_COMMAND = re.compile(r"^.*\bib_(?:write|read|send)_(?:bw|lat)\b.*$", re.MULTILINE)
_OSU_TITLE = re.compile(
    r"#\s*OSU MPI(-CUDA|-ROCM)?\S*\s+(Bandwidth|Bi-Directional Bandwidth|Multiple Bandwidth|Latency)"
)
_OSU_ROW = re.compile(r"^\s*(\d+)\s+(\d+\.\d+)(?:\s+(\d+\.\d+))?\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Perftest:
    device: str
    mtu: int | None
    link: str
    gpu_memory: bool
    gbps: float | None  # average at the largest size, each way
    size_bytes: int
    latency_us: float | None

    @property
    def line_rate(self) -> float | None:
        """The line rate that it reaches; None: none."""
        if self.gbps is None:
            return None
        return next((rate for rate in LINE_RATES_GBPS if 0.88 * rate <= self.gbps <= 1.02 * rate), None)


def parse_perftests(text: str) -> list[Perftest]:
    """Each test that has a heading, in the order of the text."""
    return [found for part in _parts(text) if (found := _parse(part)) is not None]


def _parts(text: str) -> list[str]:
    """A test begins with its command or its banner; where neither is pasted, with its heading."""
    starts = [match.start() for match in _BANNER.finditer(text)]
    if len(starts) < 2:
        headings = [match.start() for match in re.finditer(r"^.*(?:BW average|t_typical).*$", text, re.M)]
        starts = headings if len(headings) > len(starts) else starts
    commands = [match.start() for match in _COMMAND.finditer(text)]
    cuts = [0]
    for before, start in pairwise(starts):
        cuts.append(max([at for at in commands if before < at < start], default=start))
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _parse(text: str) -> Perftest | None:
    unit, latency = _UNIT.search(text), _LATENCY.search(text)
    heading = unit or latency
    if heading is None:
        return None
    fields = dict(_FIELD.findall(text))
    rows = _ROW.findall(text[heading.end() :])
    gbps, size, latency_us = None, 0, None
    if rows and unit is not None:
        best = max(rows, key=lambda row: int(row[0]))
        size = int(best[0])
        scale = 1.0 if unit[1].lower().startswith("gb") else 8 * 2**20 / 1e9  # perftest's MB are MiB
        gbps = float(best[3]) * scale / (2 if "Bidirectional" in text else 1)
    elif rows:
        latency_us = float(rows[0][4] or rows[0][2])
    mtu = re.match(r"\d+", fields.get("Mtu", ""))
    gpu = re.search(
        r"use_cuda|use_rocm|GPU memory|cuda_dmabuf|CUDA (?:device|memory)|initializing CUDA", text, re.I
    )
    return Perftest(
        fields.get("Device", ""),
        int(mtu[0]) if mtu else None,
        fields.get("Link type", ""),
        gpu is not None,
        gbps,
        size,
        latency_us,
    )


@dataclass(frozen=True, slots=True)
class OsuTest:
    gpu_memory: bool
    gbps: float | None  # each way, at the largest size
    size_bytes: int
    latency_us: float | None


def parse_osu(text: str) -> OsuTest | None:
    title = _OSU_TITLE.search(text)
    rows = _OSU_ROW.findall(text[title.end() :]) if title else []
    if title is None or not rows:
        return None
    gpu = bool(title[1]) or bool(re.search(r"\bD D\b|-d cuda", text))
    largest = max(rows, key=lambda row: int(row[0]))
    if title[2] == "Latency":
        smallest = min(rows, key=lambda row: int(row[0]))
        return OsuTest(gpu, None, int(largest[0]), float(smallest[1]))
    ways = 2 if title[2].startswith("Bi") else 1
    return OsuTest(gpu, float(largest[1]) * 8 / 1e3 / ways, int(largest[0]), None)  # OSU's MB are 10⁶
