"""`pytest --cpu-times FILE`: the CPU seconds every test file costs, its servers and ranks included, as JSON.

Seconds of CPU, not of the clock: they are the same on a busy machine. `elapsed` has the clock's, too, for the tests
in which they are much more than the CPU's: on an idle machine those wait.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest


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
        self.elapsed: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before, began_s = spent(), time.monotonic()
        result = yield
        self.elapsed[item.nodeid] = round(time.monotonic() - began_s, 2)
        cost = spent() - before
        self.files[item.location[0]] += cost
        self.tests[item.nodeid] = round(cost, 2)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", {})
        self.tests.update(output.get("cpu_tests", {}))
        self.elapsed.update(output.get("elapsed", {}))
        for name, seconds in output.get("cpu_files", {}).items():
            self.files[name] += seconds

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            ours = {"cpu_files": dict(self.files), "cpu_tests": self.tests, "elapsed": self.elapsed}
            self.config.workeroutput |= ours
            return
        longest = sorted(self.files.items(), key=lambda entry: -entry[1])
        tests = sorted(self.tests.items(), key=lambda entry: -entry[1])
        report = {
            "total_s": round(sum(self.files.values()), 1),
            "files": {name: round(seconds, 1) for name, seconds in longest},
            "tests": {name: seconds for name, seconds in tests if seconds >= 0.5},
            "elapsed": {
                name: seconds
                for name, seconds in self.elapsed.items()
                if seconds > 1 + 1.5 * self.tests[name]
            },
        }
        Path(self.config.getoption("--cpu-times")).write_text(json.dumps(report, indent=1) + "\n")
