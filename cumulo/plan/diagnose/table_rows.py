"""Rows of tables of collectives, as nccl-tests of any version, its JSON and other programs print them: size, time
and bandwidths. `diagnose` reads them through nccl_tests_text."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log2

from cumulo.base import quick_re as re

_BENCH = re.compile(r"\|\s*([\d.]+)\s*([KMG])i?B?\s*\|\s*([\d.]+)\s*GBps\s*\|\s*([\d.]+)\s*GBps\s*\|")
_JSON = re.compile(
    r'"size"\s*:\s*(\d+)[^{}]*?"out_of_place"\s*:\s*\{[^{}]*?"time"\s*:\s*([\d.]+)[^{}]*?"alg_bw"\s*:\s*([\d.]+)'
    r'[^{}]*?"bus_bw"\s*:\s*([\d.]+)(?:[^{}]*?"nwrong"\s*:\s*"?(\d+))?'
)
_SEPARATORS = re.compile(
    r"[\s|;,]+|(?<=>):\s*"
)  # also of tables in Markdown and CSV, and after mpirun's prefix
# Of a table whose title names the size, as of a sweep over pairs.
_NO_SIZE = re.compile(r"^(?!.*\b(?:size|bytes|count)\b).*\btime\b.*\balg_?bw\b.*\bbus_?bw\b", re.I)
_SIZELESS = re.compile(r"^(\s*[A-Za-z]\S*(?:\s+\S+)?)\s+(\d+(?:\.\d+)?)\s+(\d+\.\d+)\s+(\d+\.\d+)(\s.*)?$")
_REDUCTIONS = ("sum", "prod", "min", "max", "avg", "mulsum")
_LEAST_ERROR = 0.02  # of the old versions' column of differences: more is no rounding, in any type
_LEAST_FACTOR = 0.49
_UNITS = (0.125, 2**30 / 1e9)  # GB/s of what may be printed: Gbit/s, GiB/s
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TIMES_US = {
    "": 1.0,
    "us": 1.0,
    "µs": 1.0,
    "usec": 1.0,
    "ns": 1e-3,
    "ms": 1e3,
    "msec": 1e3,
    "s": 1e6,
    "sec": 1e6,
}
_VALUE = r"\s*[=:]\s*\"?(\d+(?:\.\d+)?(?:e[+-]?\d{1,2})?)\s*"
_KEYED_SIZE = re.compile(
    rf"\b(?:n?bytes|(?:msg|message|buffer|payload)?[_ ]?size(?:_bytes)?)\"?{_VALUE}([KMG]?i?)B?\b", re.I
)
_KEYED_TIME = re.compile(
    rf"\b(?:t|time|lat|latency|avg|duration|elapsed)(?:_(us|ms|s|ns))?\"?{_VALUE}([nuµm]?s(?:ec)?)?\b", re.I
)
_RATE = rf"(?:_bw|bw|_?bandwidth)(?:_gbps)?\"?{_VALUE}(G(?:i?B|bit|b)(?:/s|ps))?"
_GB = r"(\d+(?:\.\d+)?)\s*(G(?:i?B|bit|b)(?:/s|ps))"
# "all_reduce  1.00 GiB  3.95 ms  271.8 GB/s  475.7 GB/s"
_WITH_UNITS = re.compile(
    rf"^(.*?)(?<![\w.])(\d+(?:\.\d+)?)\s*([KMG])i?B\b(?!/s|ps).{{0,20}}?(?<![\w.])(\d+(?:\.\d+)?)\s*"
    rf"([nuµm]?s(?:ec)?)\b.{{0,12}}?{_GB}.{{0,12}}?{_GB}",
    re.I,
)
_KEYED_ALG = re.compile(rf"\balg(?:o|orithm)?[_ ]?{_RATE}", re.I)
_KEYED_BUS = re.compile(rf"\bbus[_ ]?{_RATE}", re.I)


@dataclass(frozen=True, slots=True)
class TestRow:
    size_bytes: int
    time_us: float
    algbw: float  # GB/s
    busbw: float
    wrong: int = 0  # elements that are not what they should be, in either half
    in_place: float | None = None  # busbw
    # By its columns: "reducing", "reduced" (to a root), "rooted", "moving" (neither); "": they do not say.
    kind: str = ""
    label: str = ""  # words before or after the numbers: the hosts of one line of a sweep


def table_rows(text: str) -> Iterator[TestRow]:
    found = [row for line in text.splitlines() if (row := table_row(line)) is not None]
    found = found or [row for line in _BENCH.findall(text) if (row := _bench_row(*line)) is not None]
    yield from found or (
        TestRow(int(size), float(time_us), float(algbw), float(busbw), int(wrong or 0))
        for size, time_us, algbw, busbw, wrong in _JSON.findall(text)
    )


def with_sizes(text: str) -> str:
    """Rows that have no size, since all are of one: it follows from the time and algbw."""
    lines = text.splitlines()
    if not any(_NO_SIZE.match(line) for line in lines):
        return text
    return "\n".join(_sized(line) for line in lines)


def _sized(line: str) -> str:
    row = _SIZELESS.match(line)
    if row is None or table_row(line) is not None:
        return line
    size = float(row[2]) * float(row[3]) * 1e3
    if size < 1:
        return line
    power = 1 << round(log2(size))
    size = power if abs(size - power) < 0.01 * power else round(size)
    return f"{row[1]} {size} {row[2]} {row[3]} {row[4]}{row[5] or ''}"


@lru_cache(maxsize=4096)
def table_row(line: str) -> TestRow | None:
    """Columns differ between versions: a row is a size, and after it a time with the bandwidths that
    follow from the two."""
    if "NCCL INFO" in line:
        return None
    words = _SEPARATORS.split(line.strip())
    for at, word in enumerate(words[:8]):
        if not word.isdecimal() or len(word) > 15 or int(word) < 1:
            continue
        size = int(word)
        for first in range(at + 1, min(at + 7, len(words) - 2)):
            if (half := _half(size, words[first:])) is not None:
                kind, label = _kind(words[at + 1 : first]), _label(words[:at], words[first:])
                rest = words[first + 3 :]
                if (other := _half(size, rest)) is not None:  # one column of errors for both
                    return TestRow(size, *half, _wrong(rest[3:4]), other[2], kind, label)
                other = _half(size, rest[1:])
                wrong = max(_wrong(rest[:1]), _wrong(rest[4:5]) if other else 0)
                return TestRow(size, *half, wrong, other[2] if other else None, kind, label)
    return _keyed_row(line) or _row_with_units(line)


def _kind(columns: list[str]) -> str:
    """By the columns between the size and the time: a reduction, and a root that is a rank. The column of elements
    is a number, too, so that a root is the last of three or more."""
    reduces = any(one in _REDUCTIONS for one in columns)
    if len(columns) < 3 or not columns[-1].isdecimal():
        return "reducing" if reduces else "moving" if "none" in columns else ""
    return "reduced" if reduces else "rooted"


def _label(before: list[str], after: list[str]) -> str:
    words = [one for one in (*before, *after) if one and _number(one) is None and one != "N/A"]
    return " ".join(words).strip("[]<>:#-= ")


def _half(size: int, words: list[str]) -> tuple[float, float, float] | None:
    """Time and bandwidths at the beginning of `words`, if they agree with the size."""
    if len(words) < 3 or "." not in words[1] or "." not in words[2]:
        return None
    time_us, algbw, busbw = (_number(one) for one in words[:3])
    if time_us is None or algbw is None or busbw is None or time_us <= 0:
        return None
    exact = size / time_us / 1e3
    for unit in _UNITS:
        if algbw >= 1 and abs(algbw * unit - exact) <= 0.01 * exact < abs(algbw - exact):
            algbw, busbw = algbw * unit, busbw * unit
    # The factor is at least a half (two ranks), or none for one rank.
    possible = busbw == 0 or _LEAST_FACTOR * algbw - 0.011 <= busbw <= 2 * algbw + 0.011
    if abs(algbw - exact) <= 0.0051 + 0.01 * exact and possible:
        return time_us, algbw, busbw
    return None


def _wrong(words: list[str]) -> int:
    """The column #wrong, or the old versions' largest difference."""
    if not words:
        return 0
    if words[0].isdecimal() and len(words[0]) < 20:
        return int(words[0])
    difference = _number(words[0])
    return int(difference is not None and not difference <= _LEAST_ERROR)


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


def _rate(match: re.Match[str]) -> float:
    return _gbytes(match[1], match[2] or "GB/s")


def _gbytes(number: str, unit: str) -> float:
    return float(number) * (2**30 / 1e9 if "iB" in unit else 0.125 if unit[1] == "b" else 1.0)


def _row_with_units(line: str) -> TestRow | None:
    """Cells with their units, in the order of nccl-tests. MB may be 10⁶ or 2²⁰: the time tells."""
    if (row := _WITH_UNITS.match(line)) is None:
        return None
    time_us = float(row[4]) * _TIMES_US[row[5].lower()]
    algbw, busbw = _gbytes(row[6], row[7]), _gbytes(row[8], row[9])
    power = "KMG".index(row[3].upper()) + 1
    for size in (float(row[2]) * 1024**power, float(row[2]) * 1000**power):
        exact = size / time_us / 1e3 if time_us else 0.0
        if abs(algbw - exact) <= 0.03 * exact and _LEAST_FACTOR * algbw <= busbw <= 2 * algbw:
            return TestRow(round(size), time_us, algbw, busbw, label=row[1].strip(" #|-:"))
    return None


def _keyed_row(line: str) -> TestRow | None:
    """A row of names and values: size=1073741824 time=2.9ms algbw=367.2 GB/s busbw=344.3 GB/s. Of time and algbw
    one may be missing."""
    if "bus" not in line.lower():
        return None
    size, bus = _KEYED_SIZE.search(line), _KEYED_BUS.search(line)
    if size is None or bus is None:
        return None
    size_bytes = round(float(size[1]) * _SIZES.get(size[2].lower(), 1))
    alg, time = _KEYED_ALG.search(line), _KEYED_TIME.search(line)
    time_us = float(time[2]) * _TIMES_US[(time[3] or time[1] or "").lower()] if time else 0.0
    algbw = _rate(alg) if alg else size_bytes / time_us / 1e3 if time_us else 0.0
    if size_bytes < 1 or algbw <= 0:
        return None
    label = line[: min(size.start(), bus.start())].split("=")[0].strip(' #|-:{,"')
    return TestRow(size_bytes, time_us or size_bytes / algbw / 1e3, algbw, _rate(bus), label=label)
