"""The output of perftest (ib_write_bw, ib_read_bw, ib_send_bw) as data, of each test in a text.

A command, a banner or a heading begins a test, and rows belong to the test before."""

import re
from dataclasses import dataclass, field

_FIELD = re.compile(r"(Device|Mtu|Link type)\s*:\s*(\S+)")
_UNIT = re.compile(r"BW average\[(\w+)/sec\]")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)(?:\s+\d+(?:\.\d+)?)*\s*$")
_BANNER = re.compile(r"\b(?:RDMA_Write|RDMA_Read|Send)\b.*\b(?:BW|Bidirectional)\b.*Test")
_COMMAND = re.compile(r"\bib_(?:write|read|send)_bw\b")
_GPU = re.compile(r"use_cuda|use_rocm|GPU memory|cuda_dmabuf|CUDA (?:device|memory)|initializing CUDA", re.I)


@dataclass(slots=True)
class Perftest:
    """One test of one card, filled in as its lines are read."""

    device: str = ""
    gpu_memory: bool = False
    gbps: float | None = None  # average at the largest size, each way
    size_bytes: int = 0
    unit: str = ""  # Gb, MB, MiB; "": no heading came yet
    two_ways: bool = False
    fields: dict[str, str] = field(default_factory=dict)


def parse_perftests(text: str) -> list[Perftest]:
    """Each test with a bandwidth, in the order of the text."""
    tests = [Perftest()]
    for line in text.splitlines():
        command, banner, unit = _COMMAND.search(line), _BANNER.search(line), _UNIT.search(line)
        if (command or banner or unit) and tests[-1].gbps is not None:
            tests.append(Perftest())
        test = tests[-1]
        if command and (card := re.search(r"\s-d\s*(\S+)", line)):
            test.device = card[1]
        test.two_ways |= "Bidirectional" in line or bool(command and re.search(r"\s-b\b", line))
        test.gpu_memory |= bool(_GPU.search(line))
        test.unit = unit[1] if unit else test.unit
        test.fields.update(_FIELD.findall(line))
        test.device = test.fields.get("Device", test.device)
        row = _ROW.match(line)
        if row and test.unit and int(row[1]) >= test.size_bytes:
            scale = 1.0 if test.unit.lower().startswith("gb") else 8 * 2**20 / 1e9  # perftest's MB are MiB
            test.size_bytes = int(row[1])
            test.gbps = float(row[4]) * scale / (2 if test.two_ways else 1)
    return [test for test in tests if test.gbps is not None]
