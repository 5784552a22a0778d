"""The output of perftest (ib_write_bw, ib_read_lat, ...) as data. `diagnose` calls it."""

import re
from dataclasses import dataclass

LINE_RATES_GBPS = (10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0)
_FIELD = re.compile(r"(Device|Mtu|Link type|Number of qps|GID index)\s*:\s*(\S+)")
_UNIT = re.compile(r"BW average\[(\w+)/sec\]")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)(?:\s+([\d.]+))?", re.MULTILINE)
_RATE = re.compile(r"\b[Rr]ate\s*:\s*(\d+)|\b(?:rate|speed)\s*:\s*(\d+)\s*Gb", re.MULTILINE)
_SPEED = re.compile(r"Speed:\s*(\d+)\s*Mb/s")
_LATENCY = re.compile(r"t_typical\[usec\]")


@dataclass(frozen=True, slots=True)
class Perftest:
    device: str
    mtu: int | None
    link: str
    gpu_memory: bool
    gbps: float | None  # average at the largest size
    size_bytes: int
    latency_us: float | None
    port_down: bool
    stated: float | None  # Gbit/s of the port, where the text says it (ibstat, ethtool, ibv_devinfo)

    @property
    def line_rate(self) -> float | None:
        """The line rate that it reaches; None: none."""
        if self.gbps is None:
            return None
        return next((rate for rate in LINE_RATES_GBPS if 0.88 * rate <= self.gbps <= 1.02 * rate), None)


def parse_perftest(text: str) -> Perftest | None:
    down = bool(re.search(r"Port number \d+ state is (?:Down|Init)|port state is (?:DOWN|INIT)", text, re.I))
    unit, latency = _UNIT.search(text), _LATENCY.search(text)
    if unit is None and latency is None and not down:
        return None
    fields = dict(_FIELD.findall(text))
    heading = unit or latency
    rows = _ROW.findall(text[heading.end() :]) if heading else []
    gbps, size, latency_us = None, 0, None
    if rows and unit is not None:
        best = max(rows, key=lambda row: int(row[0]))
        size = int(best[0])
        scale = 1.0 if unit[1].lower().startswith("gb") else 8 * 2**20 / 1e9  # perftest's MB are MiB
        gbps = float(best[3]) * scale
    elif rows:
        latency_us = float(rows[0][4] or rows[0][2])
    mtu = re.match(r"\d+", fields.get("Mtu", ""))
    return Perftest(
        fields.get("Device", ""),
        int(mtu[0]) if mtu else None,
        fields.get("Link type", ""),
        "cuda" in text.lower(),
        gbps,
        size,
        latency_us,
        down,
        _stated(text),
    )


def _stated(text: str) -> float | None:
    rates = [float(first or second) for first, second in _RATE.findall(text)]
    rates += [float(one) / 1e3 for one in _SPEED.findall(text)]
    return max((rate for rate in rates if rate >= 10), default=None)
