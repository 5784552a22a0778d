"""`pytest --cpu-times FILE`: the CPU seconds every test file costs, its servers and ranks included, as JSON.

Seconds of CPU, not of the clock: they are the same on a busy machine. `waited` has the seconds in which neither a
test nor any of its processes could compute, and `workers` when each of them began and ended its tests.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_BEGAN = "CUMULO_TESTS_BEGAN"  # in the environment, which the workers have from the controller


def spent() -> float:
    """CPU seconds of this process, of its children that ended, and of their descendants that still run."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _running(os.getpid())


def _running(parent: int) -> float:
    """CPU seconds of the descendants of `parent` that run, with their children that ended."""
    seconds = 0.0
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2].split()
                seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + _running(int(child))
        except OSError:  # it ended meanwhile
            continue
    return seconds


class CpuTimes:
    """Adds up what each test cost, with its fixtures; the workers of pytest-xdist hand theirs to the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.files: dict[str, float] = defaultdict(float)
        self.tests: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        _epoch()
        self.workers: dict[str, list[float]] = {}
        self.watch: mmap.mmap | None = None

    def _waited_s(self) -> float:
        """How long this process and all below it have waited since the first call (`waits.py`)."""
        if self.watch is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(8)
                self.watch = mmap.mmap(file.fileno(), 8)
                program = [sys.executable, "-IS", str(Path(__file__).with_name("waits.py"))]
                subprocess.Popen([*program, str(file.fileno()), str(os.getpid())], pass_fds=[file.fileno()])
        return float(struct.unpack("d", self.watch[:8])[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        waited_s, before = self._waited_s(), spent()
        name = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        times = self.workers.setdefault(name, [round(time.time() - _epoch(), 1)] * 2)
        result = yield
        cost = spent() - before
        times[1] = round(time.time() - _epoch(), 1)
        self.files[item.location[0]] += cost
        self.tests[item.nodeid] = round(cost, 2)
        self.waited[item.nodeid] = round(self._waited_s() - waited_s, 2)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", {})
        for kind in ("tests", "waited", "workers"):
            getattr(self, kind).update(output.get(f"cpu_{kind}", {}))
        for name, seconds in output.get("cpu_files", {}).items():
            self.files[name] += seconds

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            for kind in ("files", "tests", "waited", "workers"):
                self.config.workeroutput[f"cpu_{kind}"] = dict(getattr(self, kind))
            return
        report = {
            "total_s": round(sum(self.files.values()), 1),
            "waited_s": round(sum(self.waited.values()), 1),
            "workers": self.workers,
            "files": _longest(self.files, 0.0),
            "tests": _longest(self.tests, 0.5),
            "waited": _longest(self.waited, 0.3),
        }
        Path(self.config.getoption("--cpu-times")).write_text(json.dumps(report, indent=1) + "\n")


def _longest(seconds: dict[str, float], least_s: float) -> dict[str, float]:
    ordered = sorted(seconds.items(), key=lambda entry: -entry[1])
    return {name: round(value, 2) for name, value in ordered if value >= least_s}


def _epoch() -> float:
    """When the controller began, or this process where there is none."""
    return float(os.environ.setdefault(_BEGAN, str(time.time())))
