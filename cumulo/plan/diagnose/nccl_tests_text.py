"""The output of nccl-tests (and rccl-tests) as data: runs, their rows, ranks and devices. `diagnose` calls it.

Lines may have prefixes (mpirun's "[1,0]<stdout>:", a log's time), the in-place half may be missing, and
older versions print no root. The number of ranks is inferred from busbw/algbw, which is 2(n − 1)/n for an
all-reduce. A paste may hold several runs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.stated_ranks import StatedRanks, stated_ranks
from cumulo.plan.diagnose.table_rows import TestRow, table_row, table_rows

_DEVICE = re.compile(r"Rank\s+(\d+)\s+.*?on\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s*(.*?)\s*$", re.MULTILINE)
_OPERATIONS = {
    "all_reduce": ("all_reduce", "allreduce"),
    "all_gather": ("all_gather", "allgather"),
    "reduce_scatter": ("reduce_scatter", "reducescatter"),
    "all_to_all": ("alltoallv", "alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "send_recv": ("sendrecv", "send_recv"),
    "hypercube": ("hypercube",),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
}
# Lines after a table that still belong to it.
_ENDS = re.compile(
    r"^\W*$|Out of bounds|Avg bus bandwidth|Collective test concluded|NCCL WARN|NVRM|NCCL failure|pause|discard",
    re.IGNORECASE,
)
_OWN = re.compile(
    r"nThread|Using devices|Rank +\d|out-of-place|\bsize\b.*\bcount\b|\(B\)|\bNCCL\b|rccl-tests|nccl-tests"
)


@dataclass(frozen=True, slots=True)
class TestDevice:
    rank: int
    host: str
    number: int  # in its host
    name: str


@dataclass(frozen=True, slots=True)
class NcclTest:
    operation: str | None  # as printed; None: not said
    rows: tuple[TestRow, ...]
    devices: tuple[TestDevice, ...]
    asked_bytes: int  # the largest size that was asked for; 0: not said
    claimed: StatedRanks
    listed: int = 0  # ranks, where the list is whole
    named: bool = (
        True  # the program's name or the columns say the operation; otherwise it is mentioned somewhere
    )

    @property
    def hosts(self) -> int:
        return len({one.host for one in self.devices})

    @property
    def device(self) -> str:
        return self.devices[0].name if self.devices else ""

    @property
    def is_cut(self) -> bool:
        """It ends long before the largest message that was asked for."""
        return self.asked_bytes >= 16 * self.rows[-1].size_bytes

    @property
    def reducing(self) -> bool:
        """By its columns it reduces, and to no root."""
        return all(row.kind == "reducing" for row in self.rows)

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
        if ratio is None or not precise or self.operation in ("broadcast", "reduce", "send_recv"):
            return None
        error = 0.011 / precise[len(precise) // 2].algbw * max(1.0, ratio)
        whole = 2.0 if self.operation in (None, "all_reduce") and ratio > 1 - error else 1.0
        if self.operation == "all_reduce":
            whole = 2.0
        return self._ranks_of(ratio, error, whole)

    def other_ranks(self) -> tuple[float, float, float] | None:
        """As `inferred_ranks`, of the other collectives that this table may be of; None: it is sure."""
        ratio = self.ratio
        if self.named or ratio is None or ratio >= 1:
            return None
        error = 0.011 / max(row.algbw for row in self.rows)
        return self._ranks_of(ratio, error, 1.0 if self.operation == "all_reduce" else 2.0)

    @staticmethod
    def _ranks_of(ratio: float, error: float, whole: float) -> tuple[float, float, float] | None:
        if ratio >= whole - error:
            return None  # so many ranks that two digits do not tell, or a collective whose factor is 1
        return (
            whole / (whole - ratio),
            whole / (whole - max(0.0, ratio - error)),
            whole / (whole - ratio - error),
        )


@dataclass(frozen=True, slots=True)
class TestRun:
    """One table and the text that belongs to it."""

    text: str
    test: NcclTest

    @property
    def title(self) -> str:
        """The last words before its table that are not nccl-tests' own."""
        title = ""
        for line in self.text.splitlines():
            if (row := table_row(line)) is not None:
                title = row.label or title
                break
            words = line.strip(" #=-~*\t")
            if words and not _ENDS.search(words) and not _OWN.search(words):
                title = words[:120]
        return title


def nccl_test_runs(text: str) -> Iterator[TestRun]:
    """Each run; one that does not list its devices or name its collective has those of the run before it."""
    before: NcclTest | None = None
    for part in _parts(text):
        rows = list(table_rows(part))
        devices = _devices(part)
        listed = len(devices) if _all_listed(part, devices) else 0
        operation, named = _operation(part, rows)
        test = NcclTest(
            operation,
            tuple(sorted(rows, key=lambda row: row.size_bytes)),
            devices,
            _asked_bytes(part),
            stated_ranks(part, listed),
            listed,
            named,
        )
        if before is not None:
            test = replace(
                test,
                operation=test.operation or before.operation,
                devices=test.devices or before.devices,
            )
        before = test
        yield TestRun(part, test)


def unwrapped(text: str) -> str:
    """A text copied from a terminal whose lines were broken at its width: joined again."""
    lines = text.splitlines()
    width = max(map(len, lines), default=0)
    full = [at for at, line in enumerate(lines) if len(line) == width]
    if len(full) < 4 or width < 60 or len(full) > 0.7 * len(lines):
        return text
    joined: list[str] = []
    goes_on = False
    for line in lines:
        begins = re.match(r"\s*(?:#|\d{4,}\s)", line) or table_row(line) is not None
        if goes_on and not begins:
            joined[-1] += line
        else:
            joined.append(line)
        goes_on = len(line) == width
    return "\n".join(joined)


def _parts(text: str) -> list[str]:
    """The text of each run: a table ends where sizes begin again."""
    lines = text.splitlines()
    sizes = [(at, row.size_bytes) for at, line in enumerate(lines) if (row := table_row(line)) is not None]
    if not sizes:
        return [text] if any(table_rows(text)) else []
    cuts = _sweep_cuts(lines)
    if cuts:
        sizes = [one for one in sizes if one[0] >= cuts[-1]]
    cuts = cuts or [0]
    for (last, size), (first, next_size) in pairwise(sizes):
        if next_size < size or (next_size == size and first - last > 4):
            begins = [at for at in range(last + 1, first) if not _ENDS.search(lines[at])]
            if begins:
                cuts.append(begins[0])
    return ["\n".join(lines[a:b]) for a, b in zip(cuts, [*cuts[1:], len(lines)], strict=True)]


def _sweep_cuts(lines: list[str]) -> list[int]:
    """Where a table has lines of the same size for several hosts or pairs, named in each line: each begins a run.

    Lines of one name follow each other; processes that print at the same time mix theirs."""
    labelled = [
        (at, row) for at, line in enumerate(lines) if (row := table_row(line)) is not None and row.label
    ]
    begins = [
        at
        for number, (at, row) in enumerate(labelled)
        if not number or row.label != labelled[number - 1][1].label
    ]
    names = {row.label for _, row in labelled}
    if len(names) < 3 or len(begins) != len(names):
        return []
    sizes = [{row.size_bytes for _, row in labelled if row.label == name} for name in names]
    return [0, *begins[1:]] if len(set.intersection(*sizes)) > 0 else []


def _operation(text: str, rows: list[TestRow]) -> tuple[str | None, bool]:
    """By the program's name, then by the columns, and otherwise by any mention outside of logs that the columns
    allow: people also speak of other collectives. Whether it is sure."""
    lower = text.lower()
    for name, words in _OPERATIONS.items():
        if any(re.search(rf"(?<![a-z_]){word}_perf", lower) for word in words):
            return name, True
    kinds = {row.kind for row in rows}
    if kinds == {"reduced"}:
        return "reduce", True
    if kinds == {
        "rooted"
    }:  # a broadcast's factor is 1; what gathers or scatters leaves out the root's own part
        return "broadcast" if all(row.busbw > 0.995 * row.algbw - 0.011 for row in rows) else "gather", True
    plain = "\n".join(line for line in lower.splitlines() if "nccl info" not in line)
    for name, words in list(_OPERATIONS.items())[:6]:
        reduces = name in ("all_reduce", "reduce_scatter")
        fits = "moving" not in kinds if reduces else "reducing" not in kinds
        fits = fits or name == "send_recv"  # it prints an operation that it does not do
        if fits and any(word in plain for word in words if name != "broadcast"):
            return name, False
    return None, False


def _devices(text: str) -> tuple[TestDevice, ...]:
    found = {
        int(rank): TestDevice(int(rank), host, int(number), name.strip())
        for rank, host, number, name in _DEVICE.findall(text)
    }
    return tuple(found[rank] for rank in sorted(found))


def _asked_bytes(text: str) -> int:
    if found := re.search(r"\bmaxBytes\s+(\d+)", text):
        return int(found[1])
    found = re.search(r"_perf\b.*?\s(?:-e|--maxbytes)[\s=]*(\d+)([KMG]?)", text)
    return int(found[1]) << 10 * ("KMG".find(found[2]) + 1 if found[2] else 0) if found else 0


def _all_listed(text: str, devices: tuple[TestDevice, ...]) -> bool:
    """No line of the list is cut off: it begins with rank 0, has no gap and no dots, and the table follows it."""
    if not devices or [one.rank for one in devices] != list(range(len(devices))):
        return False
    ends = [match.end() for match in _DEVICE.finditer(text)]
    after = text[ends[-1] :].lstrip("\n").splitlines()[:2]
    return not any(
        re.search(r"\.\.\.|…|<snip|\b(?:cut|snip|truncated|omitted|more)\b", line) for line in after
    )
