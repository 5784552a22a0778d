"""Tables with one line for each GPU, as nvidia-smi prints them (--query-gpu, dmon), and what they say of a
GPU that is not like the others."""

from collections.abc import Iterator
from statistics import median

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import TOPO_STEP, WIDTH_STEP
from cumulo.plan.diagnose.named.fault import FAILED, SLOW, SLOW_NODE, Fault

CLOCKS_STEP = "run `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK,POWER` on that host during a run"
_BUSY = 0.75  # of the other GPUs' clock
# Of a field "Active" in these there is no doubt; a power cap of the software is usual under load.
_SLOWED = re.compile(r"(?:hw_?slowdown|thermal|power_?brake|hw slowdown)", re.I)
_BITS = 0x8 | 0x20 | 0x40 | 0x80  # of clocks_throttle_reasons.active
_STATED = re.compile(
    r"^[^\n]*\b(?:HW|SW|Hardware|Software)?[ _]?(?:Thermal|Power[ _]Brake|HW)[ _]?Slowdown\s*:\s*Active\b[^\n]*$",
    re.I | re.M,
)
_CLOCKS = re.compile(r"\b(?<!max\.)(?:clocks\.(?:current\.)?(?:sm|gr|graphics)|pclk)\b", re.I)
Row = dict[str, str]


def gpu_tables(text: str) -> Iterator[list[Row]]:
    lines = text.splitlines()
    for at, line in enumerate(lines):
        heads = _heads(line)
        if not heads:
            heads = _asked(line)
        if not heads:
            continue
        rows: list[Row] = []
        for below in lines[at + 1 : at + 66]:
            cells = _cells(below, heads)
            if cells is None:
                if rows:
                    break
                continue
            rows.append(dict(zip(heads, cells, strict=False)))
        if rows:
            yield rows


def _asked(line: str) -> list[str]:
    """The columns that a command asks for, where their names are left out of what it prints."""
    found = re.search(r"--query-gpu=([\w.,]+)", line)
    return found[1].lower().split(",") if found and "noheader" in line else []


def _heads(line: str) -> list[str]:
    """Of a line of column names, which is no command."""
    if "--query" in line or "nvidia-smi" in line:
        return []
    if "," in line and re.search(r"\b(?:index|pci\.bus_id|name|uuid|timestamp)\b", line):
        heads = [one.strip().lower() for one in line.strip("# ").split(",")]
        return heads if len(heads) > 1 else []
    if re.match(r"\s*#?\s*gpu\b.*\b(?:pwr|sm|mem|pclk)\b", line, re.I):
        return [one.lower() for one in line.strip("# ").split()]
    return []


def _cells(line: str, heads: list[str]) -> list[str] | None:
    if line.lstrip().startswith("#"):
        return None
    comma = "," in line
    cells = [one.strip() for one in line.split(",")] if comma else line.split()
    return cells if len(cells) == len(heads) and re.search(r"\d", cells[0]) else None


def gpu_faults(text: str) -> list[Fault]:
    found = []
    for rows in gpu_tables(text):
        found += [
            one
            for one in (_slowed(rows), _broken(rows), _slow_clock(rows), _narrow(rows), _fewer_watts(rows))
            if one is not None
        ]
    if not found and (stated := _STATED.search(text)):
        found.append(_throttled("A GPU", stated[0].strip()))
    return found


def _name(row: Row) -> str:
    return f"GPU {next(iter(row.values()))}" if "index" in row or "gpu" in row else next(iter(row.values()))


def _words(row: Row) -> str:
    return ", ".join(row.values())


def _throttled(who: str, words: str) -> Fault:
    return Fault(
        "slow-gpu",
        f"{who} is throttled (heat or power), and the others wait for it.",
        words,
        (CLOCKS_STEP, "check fans, cooling and power of that host, and leave the GPU out until then"),
        SLOW | {"late-rank"},
        against=True,
    )


def _slowed(rows: list[Row]) -> Fault | None:
    for row in rows:
        for name, cell in row.items():
            active = cell.lower() == "active" and _SLOWED.search(name)
            bits = re.match(r"0x([0-9a-f]+)$", cell, re.I) if "reasons.active" in name else None
            if active or (bits and int(bits[1], 16) & _BITS):
                return _throttled(_name(row), _words(row))
    return None


def _numbers(rows: list[Row], pattern: re.Pattern) -> list[tuple[Row, float]]:
    found = []
    for row in rows:
        for name, cell in row.items():
            if pattern.search(name) and (number := re.match(r"\d+(?:\.\d+)?", cell)):
                found.append((row, float(number[0])))
                break
    return found


def _broken(rows: list[Row]) -> Fault | None:
    """Errors of memory that could not be corrected."""
    counts = _numbers(
        rows, re.compile(r"ecc\.errors\.uncorrected|retired_pages\.(?:dbe|pending)|remapped_rows\.uncorr")
    )
    row, most = max(counts, key=lambda one: one[1], default=({}, 0.0))
    if most < 1:
        return None
    return Fault(
        "gpu-fault",
        f"{_name(row)} has errors of memory that could not be corrected.",
        _words(row),
        ("reset or replace that GPU, and run `dcgmi diag -r 3`",),
        SLOW | FAILED | {"wrong-results"},
        against=True,
        sure=True,
    )


def _slow_clock(rows: list[Row]) -> Fault | None:
    clocks = _numbers(rows, _CLOCKS)
    if len(clocks) < 2:
        return None
    usual = median(clock for _, clock in clocks)
    row, least = min(clocks, key=lambda one: one[1])
    most = max((one for _, one in _numbers(rows, re.compile(r"clocks\.max"))), default=usual)
    if least >= _BUSY * usual and usual >= 0.5 * most:
        return None
    odd = least < _BUSY * usual
    return Fault(
        "slow-gpu",
        f"{_name(row)} runs at {least:.0f} MHz and the others at {usual:.0f}: all wait for it."
        if odd
        else f"All GPUs run at {usual:.0f} MHz, and could at {most:.0f}.",
        _words(row),
        (CLOCKS_STEP, "run `nvidia-smi -rgc`, and check power and cooling"),
        SLOW | {"late-rank"},
        against=odd,
    )


def _fewer_watts(rows: list[Row]) -> Fault | None:
    limits = _numbers(rows, re.compile(r"power\.limit|enforced\.power"))
    if len(limits) < 3:
        return None
    usual = median(limit for _, limit in limits)
    row, least = min(limits, key=lambda one: one[1])
    if least >= 0.8 * usual:
        return None
    return Fault(
        "slow-gpu",
        f"{_name(row)} may use {least:.0f} W and the others {usual:.0f}: all wait for it.",
        _words(row),
        (f"run `nvidia-smi -pl {usual:.0f}` for it", CLOCKS_STEP),
        SLOW | {"late-rank"},
    )


def _narrow(rows: list[Row]) -> Fault | None:
    for row in rows:
        now, most = (_cell(row, "width.current"), _cell(row, "width.max"))
        gen, best = (_cell(row, "gen.current") or _cell(row, "gen.gpucurrent"), _cell(row, "gen.max"))
        few = now is not None and most is not None and now < most
        slow = gen is not None and best is not None and 1 < gen < best
        others = [width for one in rows if (width := _cell(one, "width.current")) is not None]
        few = few or (now is not None and most is None and now <= max(others) / 2)
        if few or slow:
            how = (
                f"x{now} instead of x{most or max(others)}" if few else f"generation {gen} instead of {best}"
            )
            return Fault(
                "slow-link",
                f"The PCIe link of {_name(row)} is degraded: {how}.",
                _words(row),
                (WIDTH_STEP, "reseat the card or riser, and check the BIOS settings of that slot", TOPO_STEP),
                SLOW_NODE | {"no-gdr"},
                against=True,
            )
    return None


def _cell(row: Row, name: str) -> int | None:
    for head, cell in row.items():
        if name in head and cell.isdecimal():
            return int(cell)
    return None
