"""The output of perftest (ib_write_bw, ib_read_lat, ...) and of the OSU micro-benchmarks (osu_bw, osu_bibw,
osu_latency) as data, of each test in a text. `diagnose` calls it.

A text is read line by line. A command, a banner or a heading begins a test, and rows belong to the test before;
any of these may be missing, and loops print one line for each card: "mlx5_3  391.2 Gb/s"."""

from dataclasses import dataclass, field, replace

from cumulo.base import quick_re as re

LINE_RATES_GBPS = (10.0, 25.0, 40.0, 50.0, 56.0, 100.0, 200.0, 400.0, 800.0)
_FIELD = re.compile(r"(Device|Mtu|Link type|Number of qps|GID index|PCIe relax order)\s*:\s*(\S+)")
_UNIT = re.compile(r"BW average\[(\w+)/sec\]")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)((?:\s+\d+(?:\.\d+)?)*)\s*$")
_LATENCY = re.compile(r"t_typical\[usec\]")
_BANNER = re.compile(r"\b(?:RDMA_Write|RDMA_Read|Send|Atomic\S*)\b.*\b(?:BW|Latency|Bidirectional)\b.*Test")
_COMMAND = re.compile(r"\bib_(write|read|send|atomic)_(bw|lat)\b(.*)")
_GPU = re.compile(
    r"use_cuda|use_rocm|GPU memory|cuda_dmabuf|CUDA (?:device|memory)|initializing CUDA|\bGPU buffer", re.I
)
_BOUND = re.compile(r"(?:numactl|taskset|--cpunodebind|--cpu-bind)\S*\s+(.*?)(?=\bib_)|numactl\s+(.*)")
# "n21->n22 mlx5_0  391.02 Gb/s", "mlx5_3: 196.9 Gbit/s"
_LISTED = re.compile(
    r"((?:(?<![\w.-])[\w.-]{1,40}\s{0,4}(?:->|-->|<->|→)\s{0,4}[\w.-]{1,40}\s{1,8})?\b(?:mlx5_\w+|bnxt_re\w+|rdmap\w+|ibp\w+|rocep\w+|"
    r"irdma\w+|hfi1_\d|rail ?\d+))"
    r"[^\n\d]{0,12}?\s(\d+(?:\.\d+)?)\s*(Gb/s|Gbps|Gbit/s|Gb/sec)",
    re.I,
)
_IPERF = re.compile(
    r"\[\s*(SUM|\d+)\]\s+0\.\d+-\s*\d+\.\d+\s+sec\s+[\d.]+ [KMGT]?Bytes\s+([\d.]+) ([GM])bits/sec(?:\s+\d+)?\s*"
    r"(sender|receiver)?"
)
_OSU_TITLE = re.compile(
    r"#\s*OSU MPI(-CUDA|-ROCM)?\S*\s+(Bandwidth|Bi-Directional Bandwidth|Multiple Bandwidth|Latency)"
)
# One row of a card's test after its name, as a loop prints it: "mlx5_3  1048576  2000  392.0  391.9  0.0467", and
# with the heading in each line: "mlx5_3  1048576  BW average[Gb/sec]  391.96".
_CARD = r"((?:mlx5|bnxt_re|rdmap|ibp|rocep|irdma|hfi1|efa)_?\w*)"
_NAMED_ROW = re.compile(
    rf"\b{_CARD}\b[\s:|,]+(\d+)\s+(\d+)\s+(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)\s+\d+\.\d+\s*$", re.M
)
_LABELLED = re.compile(rf"\b{_CARD}\b[^\n]*?\b(?:BW )?average\[(\w+)/sec\]\s*[:=]?\s*(\d+(?:\.\d+)?)", re.I)
_HEADING = re.compile(r"#bytes\s+#iterations")
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
    queue_pairs: int = 1
    bound: str = ""  # the sockets or cores that the command names
    relaxed: str = ""  # PCIe relax order
    tail_us: float | None = None  # what 99% of the messages take at most

    @property
    def line_rate(self) -> float | None:
        """The line rate that it reaches; None: none."""
        if self.gbps is None:
            return None
        return next((rate for rate in LINE_RATES_GBPS if 0.88 * rate <= self.gbps <= 1.02 * rate), None)


@dataclass(slots=True)
class _Part:
    """Of one test, as its lines are read."""

    command: str = ""
    bound: str = ""
    unit: str = ""  # Gb, MB, MiB; "": not said
    latency: bool = False
    two_ways: bool = False
    gpu: bool = False
    begun: bool = False  # its banner or heading was there
    fields: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[int, list[float]]] = field(default_factory=list)


def without_rows(text: str) -> str:
    """Without the rows of perftest's tables, which are no collective's."""
    kept, inside = [], False
    for line in text.splitlines():
        inside = bool(_HEADING.search(line)) or (inside and bool(_ROW.match(line)))
        if not inside or not _ROW.match(line):
            kept.append(line)
    return "\n".join(kept)


def parse_perftests(text: str) -> list[Perftest]:
    """Each test, in the order of the text."""
    found = [test for part in _parts(text) if (test := _test(part)) is not None]
    return found or _named_rows(text) or _listed(text) or _iperf(text)


def _parts(text: str) -> list[_Part]:
    parts: list[_Part] = []
    part = _Part()
    for line in text.splitlines():
        command, banner, unit = _COMMAND.search(line), _BANNER.search(line), _UNIT.search(line)
        heading = unit or _LATENCY.search(line)
        if command and not banner:
            parts.append(part)
            bound = _BOUND.search(line)
            part = _Part(command=line, bound=(bound[1] or bound[2] or "").strip() if bound else "")
            part.latency = command[2] == "lat"
            part.unit = "Gb" if "report_gbits" in line or " -R" in line else ""
        elif (banner and (part.begun or part.rows)) or (heading and part.rows):
            parts.append(part)
            part = replace(part, rows=[], begun=False, fields={}) if heading and not banner else _Part()
        if banner or heading:
            part.begun = True
            part.two_ways = part.two_ways or "Bidirectional" in line
            part.latency = part.latency or "Latency" in line or bool(_LATENCY.search(line))
            part.unit = unit[1] if unit else part.unit
        part.gpu = part.gpu or bool(_GPU.search(line))
        part.fields.update((name, value) for name, value in _FIELD.findall(line))
        if (row := _ROW.match(line)) and (part.begun or part.command):
            part.rows.append((int(row[1]), [float(one) for one in (row[3], row[4], *row[5].split())]))
    return [*parts, part]


def _test(part: _Part) -> Perftest | None:
    if not part.rows:
        return None
    fields, command = part.fields, part.command
    gbps = latency_us = tail_us = None
    size, numbers = max(part.rows, key=lambda row: row[0])
    if part.latency:
        size, numbers = part.rows[0]
        latency_us = numbers[2] if len(numbers) > 2 else numbers[0]
        tail_us = numbers[5] if len(numbers) > 5 else None
    else:
        scale = 1.0 if part.unit.lower().startswith("gb") else 8 * 2**20 / 1e9  # perftest's MB are MiB
        ways = 2 if part.two_ways or re.search(r"\s-b\b", command) else 1
        gbps = numbers[1] * scale / ways
    device = re.search(r"\s-d\s*(\S+)", command)
    pairs = re.search(r"\s(?:-q|--qp)[ =]?(\d+)", command)
    mtu = re.match(r"\d+", fields.get("Mtu", ""))
    stated = fields.get("Number of qps", "")
    return Perftest(
        fields.get("Device", device[1] if device else ""),
        int(mtu[0]) if mtu else None,
        fields.get("Link type", ""),
        part.gpu,
        gbps,
        size,
        latency_us,
        int(stated) if stated.isdecimal() else int(pairs[1]) if pairs else 1,
        part.bound,
        fields.get("PCIe relax order", ""),
        tail_us,
    )


def _named_rows(text: str) -> list[Perftest]:
    """Rows that begin with their card's name; the unit is the heading's or the command's."""
    gbits = "report_gbits" in text or bool(re.search(r"Gb/sec", text))
    found = [
        (name, int(size), float(rate), "Gb" if gbits else "MB")
        for name, size, _, _, rate in _NAMED_ROW.findall(text)
    ]
    found += [(name, 1 << 20, float(rate), unit) for name, unit, rate in _LABELLED.findall(text)]
    return [
        Perftest(name, None, "", False, rate * (1.0 if unit.lower() == "gb" else 8 * 2**20 / 1e9), size, None)
        for name, size, rate, unit in found
    ]


def _listed(text: str) -> list[Perftest]:
    """What a loop over cards or pairs prints: a name and a rate each."""
    found = [
        Perftest(re.sub(r"\s+", " ", name), None, "", False, float(rate), 1 << 20, None)
        for name, rate, _ in _LISTED.findall(text)
    ]
    return found if len(found) >= 3 else []


def _iperf(text: str) -> list[Perftest]:
    """iperf3's sum at the receiver."""
    found = _IPERF.findall(text)
    sums = [one for one in found if one[0] == "SUM"] or found
    if not sums:
        return []
    _, rate, unit, _ = next((one for one in sums if one[3] == "receiver"), sums[-1])
    return [
        Perftest(
            "TCP (iperf3)", None, "TCP", False, float(rate) * (1.0 if unit == "G" else 1e-3), 1 << 20, None
        )
    ]


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
        smallest = min(rows, key=lambda row: int(row[0]) or 1 << 40)  # no bytes need no memory
        return OsuTest(gpu, None, int(largest[0]), float(smallest[1]))
    ways = 2 if title[2].startswith("Bi") else 1
    return OsuTest(gpu, float(largest[1]) * 8 / 1e3 / ways, int(largest[0]), None)  # OSU's MB are 10⁶
