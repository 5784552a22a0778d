"""The output of nccl-tests (and rccl-tests) as data: rows, ranks, devices. `diagnose` calls it.

Lines may have prefixes (mpirun's "[1,0]<stdout>:", a log's time), the in-place half may be missing, and
older versions print no root. The number of ranks is inferred from busbw/algbw, which is 2(n − 1)/n for an
all-reduce."""

import re
from dataclasses import dataclass
from statistics import median

_BENCH = re.compile(r"\|\s*([\d.]+)\s*([KMG])i?B?\s*\|\s*([\d.]+)\s*GBps\s*\|\s*([\d.]+)\s*GBps\s*\|")
_DEVICE = re.compile(r"Rank\s+(\d+)\s+.*?on\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s*(.*?)\s*$", re.MULTILINE)
_OPERATIONS = {
    "all_reduce": ("all_reduce_perf", "all_reduce", "allreduce"),
    "all_gather": ("all_gather_perf", "all_gather", "allgather"),
    "reduce_scatter": ("reduce_scatter_perf", "reduce_scatter", "reducescatter"),
    "all_to_all": ("alltoall_perf", "all_to_all", "alltoall"),
    "broadcast": ("broadcast_perf",),
    "send_recv": ("sendrecv_perf", "sendrecv"),
}
_CLAIMED = (
    re.compile(r"-np?\s+(\d+)\b"),
    re.compile(r"\bnranks\s+(\d+)", re.IGNORECASE),
    re.compile(
        r"\b(\d+)\s*(?:x|×)\s*(?:NVIDIA\s+)?(?:H100|H200|A100|B200|GB200|MI300X|V100)\b", re.IGNORECASE
    ),
    re.compile(r"\b(\d+)\s+(?:GPUs|ranks)\b", re.IGNORECASE),
    re.compile(r"\branks\s+0\s*(?:\.\.|-|to)\s*(\d+)", re.IGNORECASE),
)


@dataclass(frozen=True, slots=True)
class TestRow:
    size_bytes: int
    time_us: float
    algbw: float  # GB/s
    busbw: float


@dataclass(frozen=True, slots=True)
class NcclTest:
    operation: str | None  # as printed; None: not said
    rows: tuple[TestRow, ...]
    devices: tuple[tuple[int, str, str], ...]  # rank, host, name
    claimed: tuple[int, ...]  # numbers of ranks that the text states

    @property
    def hosts(self) -> int:
        return len({host for _, host, _ in self.devices})

    @property
    def device(self) -> str:
        return self.devices[0][2] if self.devices else ""

    @property
    def large(self) -> tuple[TestRow, ...]:
        """Rows that show bandwidth."""
        return tuple(row for row in self.rows if row.size_bytes >= 64 << 20)

    @property
    def ratio(self) -> float | None:
        """busbw over algbw, where both are printed with digits enough."""
        precise = [row for row in self.rows if row.algbw >= 1]
        return median(row.busbw / row.algbw for row in precise[-8:]) if precise else None

    def inferred_ranks(self) -> tuple[float, float, float] | None:
        """Best, least and most; None: the ratio does not say."""
        precise = sorted((row for row in self.rows if row.algbw >= 1), key=lambda row: -row.algbw)[:8]
        ratio = self.ratio
        if ratio is None or not precise:
            return None
        error = 0.011 / precise[len(precise) // 2].algbw * max(1.0, ratio)
        whole = 2.0 if self.operation in (None, "all_reduce") and ratio > 1 - error else 1.0
        if self.operation == "all_reduce":
            whole = 2.0
        if ratio >= whole - error:
            return None  # so many ranks that two digits do not tell, or a collective whose factor is 1
        return tuple(whole / (whole - one) for one in (ratio, max(0.0, ratio - error), ratio + error))  # type: ignore[return-value]


def parse_nccl_tests(text: str) -> NcclTest | None:
    rows = [row for line in text.splitlines() if "NCCL INFO" not in line and (row := _row(line)) is not None]
    rows = rows or [row for line in _BENCH.findall(text) if (row := _bench_row(*line)) is not None]
    if not rows:
        return None
    devices = {int(rank): (host, name.strip()) for rank, host, _, name in _DEVICE.findall(text)}
    found = tuple((rank, host, name) for rank, (host, name) in sorted(devices.items()))
    return NcclTest(
        _operation(text), tuple(sorted(rows, key=lambda row: row.size_bytes)), found, _claimed(text, found)
    )


def _row(line: str) -> TestRow | None:
    """Columns differ between versions: a row is a size, and after it a time with the bandwidths that
    follow from the two."""
    words = line.replace("|", " ").replace(">:", ">: ").split()
    for at, word in enumerate(words[:6]):
        if not word.isdigit() or int(word) < 1:
            continue
        size = int(word)
        for first in range(at + 1, min(at + 7, len(words) - 2)):
            time_us, algbw, busbw = (_number(one) for one in words[first : first + 3])
            if time_us is None or algbw is None or busbw is None or time_us <= 0:
                continue
            if "." not in words[first + 1] or "." not in words[first + 2]:
                continue
            exact = size / time_us / 1e3
            if abs(algbw - exact) <= 0.0051 + 0.01 * exact and busbw <= 2 * algbw + 0.011:
                return TestRow(size, time_us, algbw, busbw)
        if at + 4 < len(words):
            return None  # the first number that could be a size is one, or there is none
    return None


def _bench_row(size: str, unit: str, busbw: str, algbw: str) -> TestRow | None:
    """A row of the table that all_reduce_bench.py prints: | 16GB | 480.21GBps | 274.40GBps |."""
    size_bytes = round(float(size) * 2 ** (10 * "KMG".index(unit[0].upper()) + 10))
    if float(algbw) <= 0:
        return None
    return TestRow(size_bytes, size_bytes / float(algbw) / 1e3, float(algbw), float(busbw))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _operation(text: str) -> str | None:
    lower = text.lower()
    for name, words in _OPERATIONS.items():
        if words[0] in lower:
            return name
    for name, words in _OPERATIONS.items():
        if any(word in lower for word in words[1:]):
            return name
    return None


def _claimed(text: str, devices: tuple[tuple[int, str, str], ...]) -> tuple[int, ...]:
    found: list[int] = []
    plain = "\n".join(line for line in text.splitlines() if not _DEVICE.search(line))
    for number, pattern in enumerate(_CLAIMED):
        found += [int(one) + (number == len(_CLAIMED) - 1) for one in pattern.findall(plain)]
    if devices:
        found.append(len(devices))
    return tuple(dict.fromkeys(one for one in found if one > 0))
