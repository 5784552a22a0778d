"""The output of nccl-tests and rccl-tests as data: runs with their rows, devices and ranks asked for.

The in-place half of a row may be missing, and older versions print no root. The number of ranks is inferred from
busbw/algbw, which is 2(n - 1)/n for an all-reduce. A text may hold several runs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

# What may stand between two words has a greatest length, so that a long text takes time in proportion to it.
_DEVICE = re.compile(
    r"Rank\s+(\d+)\s+.{0,200}?on\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]{0,200}\]\s*(.*?)\s*$", re.M
)
_JSON = re.compile(
    r'"size"\s*:\s*(\d+)[^{}]{0,500}?"out_of_place"\s*:\s*\{[^{}]{0,500}?"time"\s*:\s*([\d.]+)'
    r'[^{}]{0,500}?"alg_bw"\s*:\s*([\d.]+)[^{}]{0,500}?"bus_bw"\s*:\s*([\d.]+)'
    r'(?:[^{}]{0,500}?"nwrong"\s*:\s*"?(\d+))?'
)
_SEPARATORS = re.compile(r"[\s|;,]+")  # also of tables in Markdown and CSV
_REDUCTIONS = ("sum", "prod", "min", "max", "avg", "mulsum")
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|sendrecv|hypercube|reduce|gather|scatter)_perf"
)
_OPERATIONS = {"alltoall": "all_to_all", "alltoallv": "all_to_all", "sendrecv": "send_recv"}
_LEAST_ERROR = 0.02  # of the old versions' column of differences: more is no rounding, in any type
_PROCESSES = re.compile(r"(?:^|\s)(?:-np?|--np|--ntasks)[\s=]*(\d+)\b")
_NODES = re.compile(r"(?:^|\s)(?:-N|--nodes)[\s=]*(\d+)\b")
_EACH_NODE = re.compile(r"(?:--ntasks-per-node|-npernode|--npernode|-ppn|--map-by ppr:)[\s=]*(\d+)")
_GPUS = re.compile(r"(?:^|\s)(?:-g|--ngpus)[\s=]*(\d+)\b")
_THREADS = re.compile(r"(?:^|\s)(?:-t|--nthreads)[\s=]*(\d+)\b")
_LAUNCH = re.compile(r"\b(?:mpirun|mpiexec|srun)\b(.{0,4000}?)_perf\b(.*)")
_ALONE = re.compile(r"(?:^|[\s/$])\w+_perf\b(.*)", re.M)
_LARGEST = re.compile(r"\bmaxBytes\s+(\d+)()|_perf\b.{0,1000}?\s(?:-e|--maxbytes)[\s=]*(\d+)([KMG]?)")


@dataclass(frozen=True, slots=True)
class TestRow:
    size_bytes: int
    time_us: float
    algbw: float  # GB/s
    busbw: float
    wrong: int = 0  # elements that are not what they should be, in either half
    kind: str = ""  # by its columns: reducing, rooted, moving; "": they do not say


@dataclass(frozen=True, slots=True)
class TestDevice:
    rank: int
    host: str
    number: int  # in its host
    name: str


@dataclass(frozen=True, slots=True)
class TestRun:
    """One table, and the text that belongs to it."""

    text: str
    rows: tuple[TestRow, ...]  # by size
    devices: tuple[TestDevice, ...] = ()
    asked_ranks: int = 0  # by the command; 0: it is not in the text
    asked_bytes: int = 0  # the largest message that was asked for; 0: not said
    operation: str = field(default="")  # as nccl-tests calls it; "": neither its name nor its columns say it

    @property
    def hosts(self) -> int:
        return len({one.host for one in self.devices})

    @property
    def all_listed(self) -> bool:
        """The list of devices is whole: it begins with rank 0, has no gap, and no dots follow it."""
        cut = re.search(r"Rank +\d+ .*\n.*(?:\.\.\.|…|more\b|omitted|truncated)", self.text)
        in_order = [one.rank for one in self.devices] == list(range(len(self.devices)))
        return bool(self.devices) and in_order and not cut

    @property
    def ratio(self) -> float | None:
        """busbw over algbw, where both are printed with digits enough."""
        precise = [row for row in self.rows if row.algbw >= 1]
        return median(row.busbw / row.algbw for row in precise[-8:]) if precise else None

    def inferred_ranks(self) -> tuple[float, float, float] | None:
        """Best, least and most number of ranks; None: the ratio does not say."""
        ratio = self.ratio
        if ratio is None or self.operation in ("", "broadcast", "reduce", "send_recv"):
            return None
        error = 0.011 / median(row.algbw for row in self.rows if row.algbw >= 1) * max(1.0, ratio)
        whole = 2.0 if self.operation == "all_reduce" else 1.0
        if ratio >= whole - error:
            return None  # so many ranks that two digits do not tell
        low, high = max(0.0, ratio - error), ratio + error
        return whole / (whole - ratio), whole / (whole - low), whole / (whole - high)


def nccl_test_runs(text: str) -> Iterator[TestRun]:
    """Each run; one that does not list its devices or give a command has those of the run before it."""
    devices: tuple[TestDevice, ...] = ()
    program = command = largest = None
    for part in _parts(text):
        rows = _rows(part)
        found = {int(rank): TestDevice(int(rank), host, int(number), name)
                 for rank, host, number, name in _DEVICE.findall(part)}  # fmt: skip
        devices = tuple(found[rank] for rank in sorted(found)) or devices
        program = _PROGRAM.search(part) or program
        command = _asked_ranks(part) or command
        largest = _LARGEST.search(part) or largest
        operation = _OPERATIONS.get(program[1], program[1]) if program else _operation(rows)
        yield TestRun(part, rows, devices, command or 0, _bytes(largest), operation)


def _parts(text: str) -> list[str]:
    """The text of each run: a table ends where sizes begin again."""
    lines = text.splitlines()
    rows = [(at, row) for at, line in enumerate(lines) if (row := table_row(line)) is not None]
    if not rows:
        return [text] if _JSON.search(text) else []
    cuts = [at + 1 for (at, row), (_, later) in pairwise(rows) if later.size_bytes < row.size_bytes]
    return ["\n".join(lines[a:b]) for a, b in zip([0, *cuts], [*cuts, len(lines)], strict=True)]


def _rows(text: str) -> tuple[TestRow, ...]:
    found = [row for line in text.splitlines() if (row := table_row(line)) is not None]
    found = found or [
        TestRow(int(size), float(time_us), float(algbw), float(busbw), int(wrong or 0))
        for size, time_us, algbw, busbw, wrong in _JSON.findall(text)
    ]
    return tuple(sorted(found, key=lambda row: row.size_bytes))


def table_row(line: str) -> TestRow | None:
    """Columns differ between versions: a row is a size, and after it a time with the bandwidths that follow from
    the two."""
    if "NCCL INFO" in line:
        return None
    words = _SEPARATORS.split(line.strip("| \t"))
    for at, word in enumerate(words[:8]):
        if not word.isdecimal() or len(word) > 15 or int(word) < 1:
            continue
        size = int(word)
        for first in range(at + 1, min(at + 7, len(words) - 2)):
            if (half := _half(size, words[first:])) is not None:
                rest = words[first + 3 :]
                if _half(size, rest) is not None:  # one column of errors for both halves
                    wrong = _wrong(rest[3:4])
                else:
                    wrong = max(_wrong(rest[:1]), _wrong(rest[4:5]))
                return TestRow(size, *half, wrong, _kind(words[at + 1 : first]))
    return None


def _half(size: int, words: list[str]) -> tuple[float, float, float] | None:
    """Time and bandwidths at the beginning of `words`, if they agree with the size."""
    if len(words) < 3 or "." not in words[1] or "." not in words[2]:
        return None
    try:
        time_us, algbw, busbw = (float(one) for one in words[:3])
    except ValueError:
        return None
    if time_us <= 0:
        return None
    exact = size / time_us / 1e3
    # The factor is at least a half (two ranks), or 0 for one rank.
    possible = busbw == 0 or 0.49 * algbw - 0.011 <= busbw <= 2 * algbw + 0.011
    return (time_us, algbw, busbw) if abs(algbw - exact) <= 0.0051 + 0.01 * exact and possible else None


def _kind(columns: list[str]) -> str:
    """By the columns between size and time. The column of elements is a number, too, so that a root is the last
    of three or more."""
    if len(columns) >= 3 and columns[-1].isdecimal():
        return "rooted"
    return "reducing" if set(columns) & set(_REDUCTIONS) else "moving" if "none" in columns else ""


def _wrong(words: list[str]) -> int:
    """The column #wrong, or the old versions' largest difference."""
    if not words:
        return 0
    if words[0].isdecimal():
        return int(words[0])
    try:
        return int(float(words[0]) > _LEAST_ERROR)
    except ValueError:
        return 0


def _operation(rows: tuple[TestRow, ...]) -> str:
    """Where no program is named: by the columns, and by the ratio of the bandwidths."""
    kinds = {row.kind for row in rows}
    above = any(row.busbw > row.algbw + 0.02 for row in rows)
    if above or (kinds == {"reducing"} and all(row.busbw > 0.97 * row.algbw for row in rows)):
        return "all_reduce"
    return (
        {"reducing": "reduce_scatter", "moving": "all_gather"}.get(kinds.pop(), "") if len(kinds) == 1 else ""
    )


def _asked_ranks(text: str) -> int | None:
    """The ranks that a command asks for: processes × threads × GPUs of each."""
    joined = re.sub(r"\\\s*\n\s*", " ", text)  # a command over several lines
    if launch := _LAUNCH.search(joined):
        before, after = launch[1], launch[2]
        nodes, each = _NODES.search(before), _EACH_NODE.search(before)
        by_node = int(nodes[1]) * int(each[1]) if nodes and each else 0
        processes = int(found[1]) if (found := _PROCESSES.search(before)) else by_node
        return processes * _of_each(after) or None
    if (alone := _ALONE.search(joined)) and _GPUS.search(alone[1]):
        return _of_each(alone[1])
    return None


def _of_each(arguments: str) -> int:
    gpus, threads = _GPUS.search(arguments), _THREADS.search(arguments)
    return (int(gpus[1]) if gpus else 1) * (int(threads[1]) if threads else 1)


def _bytes(found: re.Match[str] | None) -> int:
    if found is None:
        return 0
    return int(found[1]) if found[1] else int(found[3]) << 10 * (" KMG".index(found[4] or " "))
