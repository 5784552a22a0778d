"""`pytest --cpu-times FILE`: the CPU seconds every test file costs, its servers and ranks included, as JSON.

Seconds of CPU, not of the clock: they are the same on a busy machine. `waited` has the seconds in which neither a
test nor any of its processes could compute, and `workers` when each of them began and ended its tests. `machine`
says how long the cores computed and stood idle until the first test and from then on, whoever used them: where
nothing else runs, cores that are idle while tests run say that another worker would help.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass
from pathlib import Path

import pytest

_BEGAN = "CUMULO_TESTS_BEGAN"  # in the environment, which the workers have from the controller


def spent(but: int = 0) -> float:
    """CPU seconds of this process, of its children that ended, and of their descendants that still run; without
    those of the child `but`."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ticks = _running(str(os.getpid()).encode(), str(but).encode())
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + ticks / os.sysconf("SC_CLK_TCK")


def _running(parent: bytes, but: bytes) -> int:
    """Ticks of the descendants of `parent` that run, with their children that ended. Plain system calls: this is
    done after every test."""
    ticks = 0
    with contextlib.suppress(OSError):  # it ended meanwhile
        for task in os.listdir(b"/proc/%b/task" % parent):  # noqa: PTH208
            for child in _read(b"/proc/%b/task/%b/children" % (parent, task)).split():
                if child != but and (stat := _read(b"/proc/%b/stat" % child)):
                    ticks += sum(map(int, stat.rpartition(b") ")[2].split()[11:15])) + _running(child, but)
    return ticks


def _read(path: bytes) -> bytes:
    """What there is to read; nothing, where the process has ended."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 65536)
    except OSError:
        return b""
    finally:
        os.close(file)


@dataclass(frozen=True)
class _Cores:
    """What the clock and the machine's cores say."""

    clock_s: float
    computed_s: float
    idle_s: float

    @classmethod
    def now(cls) -> _Cores:
        ticks = [int(word) for word in _read(b"/proc/stat").split(b"\n")[0].split()[1:9]]
        idle = sum(ticks[3:5])  # waiting for a disk is idle, too
        per_s = os.sysconf("SC_CLK_TCK")
        return cls(time.time(), (sum(ticks) - idle) / per_s, idle / per_s)

    def until(self, later: _Cores) -> dict[str, float]:
        return {name: round(value - getattr(self, name), 1) for name, value in vars(later).items()}


class CpuTimes:
    """Adds up what each test cost, with its fixtures; the workers of pytest-xdist hand theirs to the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.files: dict[str, float] = defaultdict(float)
        self.tests: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        _epoch()
        self.began = _Cores.now()
        self.first_test: _Cores | None = None
        self.workers: dict[str, list[float]] = {}
        self.watch: mmap.mmap | None = None
        self.watcher = 0
        self.before: float | None = None

    def _waited_s(self) -> float:
        """How long this process and all below it have waited since the first call (`waits.py`)."""
        if self.watch is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(8)
                self.watch = mmap.mmap(file.fileno(), 8)
                program = [sys.executable, "-IS", str(Path(__file__).with_name("waits.py"))]
                command = [*program, str(file.fileno()), str(os.getpid())]
                self.watcher = subprocess.Popen(command, pass_fds=[file.fileno()]).pid
        return float(struct.unpack("d", self.watch[:8])[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        waited_s = self._waited_s()
        before = spent(self.watcher) if self.before is None else self.before
        name = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        times = self.workers.setdefault(name, [round(time.time() - _epoch(), 1)] * 2)
        result = yield
        self.before = spent(self.watcher)
        cost = self.before - before
        times[1] = round(time.time() - _epoch(), 1)
        self.files[item.location[0]] += cost
        self.tests[item.nodeid] = round(cost, 2)
        self.waited[item.nodeid] = round(self._waited_s() - waited_s, 2)
        return result

    def pytest_runtest_logreport(self) -> None:
        self.first_test = self.first_test or _Cores.now()

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
        first_test = self.first_test or _Cores.now()
        report = {
            "machine": {
                "until the first test": self.began.until(first_test),
                "tests": first_test.until(_Cores.now()),
            },
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
