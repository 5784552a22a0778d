"""The output of the OSU micro-benchmarks (osu_bw, osu_bibw, osu_latency) as a link's bandwidth. `diagnose` calls
it."""

import re
from dataclasses import dataclass

_TITLE = re.compile(
    r"#\s*OSU MPI(-CUDA|-ROCM)?\S*\s+(Bandwidth|Bi-Directional Bandwidth|Multiple Bandwidth|Latency)"
)
_ROW = re.compile(r"^\s*(\d+)\s+(\d+\.\d+)(?:\s+(\d+\.\d+))?\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OsuTest:
    gpu_memory: bool
    gbps: float | None  # each way, at the largest size
    size_bytes: int
    latency_us: float | None


def parse_osu(text: str) -> OsuTest | None:
    title = _TITLE.search(text)
    rows = _ROW.findall(text[title.end() :]) if title else []
    if title is None or not rows:
        return None
    gpu = bool(title[1]) or bool(re.search(r"\bD D\b|-d cuda", text))
    largest = max(rows, key=lambda row: int(row[0]))
    if title[2] == "Latency":
        smallest = min(rows, key=lambda row: int(row[0]))
        return OsuTest(gpu, None, int(largest[0]), float(smallest[1]))
    ways = 2 if title[2].startswith("Bi") else 1
    return OsuTest(gpu, float(largest[1]) * 8 / 1e3 / ways, int(largest[0]), None)  # OSU's MB are 10⁶
