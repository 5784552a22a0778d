"""diagnose(): the likely cause of a slow or stuck collective from a pasted text, on what evidence, and what to run
next. `cumulo diagnose` calls it.

A parser for each tool turns the text into facts, and the signs of causes are looked for in these facts. Where
none is found the answer is "I cannot tell", with what was read and what would tell."""

import re
from dataclasses import dataclass, field, replace

from cumulo.diagnose.case import RunCase
from cumulo.diagnose.diagnosis import Diagnosis, message_verdict, verdict
from cumulo.diagnose.flight_recorder import RankProgress, parse_progress
from cumulo.diagnose.host_tools import HostFacts, host_facts
from cumulo.diagnose.machine import port_gbps_of
from cumulo.diagnose.nccl_log import parse_nccl_log
from cumulo.diagnose.nccl_tests import TestRun, nccl_test_runs
from cumulo.diagnose.plain_text import plain_text
from cumulo.diagnose.signs import judge

_FIELD = re.compile(r"(Device|Mtu|Link type)\s*:\s*(\S+)")
_UNIT = re.compile(r"BW average\[(\w+)/sec\]")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)(?:\s+\d+(?:\.\d+)?)*\s*$")
_BANNER = re.compile(r"\b(?:RDMA_Write|RDMA_Read|Send)\b.{0,40}\b(?:BW|Bidirectional)\b.{0,40}Test")
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


# Of several runs the worst counts.
_MILD = ("unknown", "small-messages", "healthy")
_SLOWER = 0.8  # of another run, or of another card's test
_OF_PORT = 0.85  # of a port's rate, that a healthy link reaches
_MATRIX = re.compile(r"^\s*GPU0\s+GPU1\s", re.M)


def diagnose(text: str) -> Diagnosis:
    text = plain_text(text)
    if (progress := parse_progress(text)) is not None:
        return _progress_verdict(progress)
    runs, host = list(nccl_test_runs(text)), host_facts(text)
    if (message := message_verdict(text, measured=bool(runs))) is not None:
        return message
    if runs:
        return _runs_verdict(runs, text, host)
    if tests := parse_perftests(text):
        return _perftest_verdict(tests, text, host)
    if (log := parse_nccl_log(text)) is not None:
        return judge(RunCase(text, text, None, log, host))
    return _nothing_measured(text, host)


def _runs_verdict(runs: list[TestRun], text: str, host: HostFacts) -> Diagnosis:
    cases = [
        RunCase(run.text, text, run, parse_nccl_log(run.text if len(runs) > 1 else text), host)
        for run in runs
    ]
    found = [judge(case) for case in cases]
    at = min(
        range(len(found)),
        key=lambda number: (*_MILD, "").index(found[number].cause) if found[number].cause in _MILD else -1,
    )
    worst = found[at]
    if len(runs) == 1:
        return worst
    others = ", ".join(f"{number + 1}: {one.cause}" for number, one in enumerate(found) if number != at)
    which = f"this is run {at + 1} of {len(found)} in the text ({others})"
    return replace(worst, evidence=(which, *worst.evidence))


def _perftest_verdict(tests: list[Perftest], text: str, host: HostFacts) -> Diagnosis:
    """Cards against each other, GPU memory against host memory, and all against the port's stated rate."""
    if host.port_down:
        return verdict("port-down", said=host.port_down)
    reached = [(test, test.gbps or 0.0) for test in tests if test.size_bytes >= 4096]
    if not reached:
        return verdict("small-perftest")
    evidence = tuple(f"{test.device or 'a card'}{' (GPU memory)' * test.gpu_memory}: {gbps:.0f} Gbit/s"
                     for test, gbps in reached[:8])  # fmt: skip
    from_gpu = [gbps for test, gbps in reached if test.gpu_memory]
    from_host = [gbps for test, gbps in reached if not test.gpu_memory]
    if from_gpu and from_host and max(from_gpu) < _SLOWER * max(from_host):
        return verdict("slow-gpu-memory", *evidence)
    if host.narrow_link:
        return verdict("narrow-link", *evidence, said=host.narrow_link)
    slowest, fastest = min(reached, key=lambda one: one[1]), max(gbps for _, gbps in reached)
    cards = {test.device for test, _ in reached}
    if len(cards) > 1 and slowest[1] < _SLOWER * fastest:
        return verdict("slow-card", *evidence, card=slowest[0].device, share=slowest[1] / fastest)
    rate = port_gbps_of(text)
    if rate is None or fastest > 1.05 * rate:
        return verdict("unknown-port", *evidence, gbps=fastest)
    share = slowest[1] / rate
    return verdict(
        "port-reached" if share >= _OF_PORT else "port-not-reached", *evidence, share=share, rate=rate
    )


def _progress_verdict(found: RankProgress) -> Diagnosis:
    """What a flight recorder or a watchdog says."""
    if not found.collective:
        return _in_step(found)
    name = f"{found.collective} number {found.sequence}"
    waiting = f"{len(found.waiting)} of the ranks" if found.waiting else "the other ranks"
    evidence = (f"{waiting} wait in {name}", *((f"called at {found.where}",) if found.where else ()))
    if found.differ:
        return verdict("ranks-differ", *evidence, differ=f"{found.differ[0].upper()}{found.differ[1:]}")
    if found.missing:
        return verdict("rank-missing", *evidence, who=", ".join(map(str, found.missing)), name=name)
    if found.ranks:
        return verdict("all-came", *evidence, ranks=found.ranks, name=name)
    return verdict("some-rank-missing", *evidence)


def _in_step(found: RankProgress) -> Diagnosis:
    if found.slow:
        return verdict("straggler", slow=found.slow, ranks=found.ranks)
    if found.ranks < max(2, found.world):
        return verdict("dumps-missing")
    return verdict("in-step", ranks=found.ranks)


def _nothing_measured(text: str, host: HostFacts) -> Diagnosis:
    if host.port_down:
        return verdict("port-down", said=host.port_down, confidence="medium")
    said = [one for one in (host.narrow_link, host.link_errors, host.throttled, host.no_peermem) if one]
    evidence = (f"the text says: {one}" for one in said)
    found = verdict("fault-without-run" if said else "nothing-read", *evidence)
    # The matrix of `nvidia-smi topo -m` is a map of the machine, not a measurement; another command reads it.
    read_it = "run `cumulo topology FILE` on this file: it reads such a matrix"
    return replace(found, more_steps=(read_it,)) if _MATRIX.search(text) else found
