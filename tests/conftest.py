"""For all tests: hypothesis draws the same cases every time, and a slow machine is not a failure."""

import atexit
import functools
import gc
import os
import random
import ssl
import sys
from pathlib import Path
from typing import Any

# Triton decides when it is first imported whether its interpreter plays the kernels, and any test may import it
# first. Where there is no GPU the interpreter must.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import settings

from tests import forked_ranks, forked_workers, short_reports, thorough
from tests.cpu_times import CpuTimes

settings.register_profile("cumulo", deadline=None, derandomize=True, max_examples=thorough.examples(100))
settings.register_profile("thorough", deadline=None, derandomize=True)
# Other cases than always: pytest --hypothesis-profile=hunt --hypothesis-seed=1
settings.register_profile("hunt", deadline=None)
settings.load_profile("cumulo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also the many further cases marked thorough")
    parser.addoption(
        "--long", action="store_true", help="only the tests marked long, which are left out else"
    )
    parser.addoption("--cpu-times", metavar="FILE", help="write the CPU seconds of every test file there")


def pytest_configure(config: pytest.Config) -> None:
    # Every HTTP client reads the machine's certificates, 50 ms each time, and tests make thousands of clients.
    ssl.create_default_context = functools.cache(ssl.create_default_context)
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(config))
    if short_reports.are_enough(config):
        config.pluginmanager.register(short_reports.ShortReports())
    forked_ranks.prepare()
    forked_workers.prepare(config)
    # Every garbage collection would walk over the 600,000 objects of all that is imported, half a second each time.
    # They are put aside when the tests are collected (below), and stay there.
    # At the very end extensions report what is never freed; pytest itself collects twice before.
    gc.disable()
    atexit.register(gc.unfreeze)
    gc.unfreeze = lambda: None
    thorough.chosen = config.getoption("--thorough")
    if thorough.chosen and not config.getoption("--hypothesis-profile"):
        settings.load_profile("thorough")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own is the same every time, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        import tests.quick_triton  # noqa: F401
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A worker does not even make the cases that are left out: there are thousands, and each worker makes all."""
    if not hasattr(metafunc.config, "workerinput") or metafunc.config.getoption("--thorough"):
        return
    marks = metafunc.definition.own_markers
    for number, mark in enumerate(marks):
        if mark.name == "parametrize" and len(mark.args) == 2:
            marks[number] = _without_thorough_cases(mark)


def _without_thorough_cases(mark: pytest.Mark) -> pytest.Mark:
    names, cases, ids = mark.args[0], list(mark.args[1]), mark.kwargs.get("ids")
    kept = [
        number
        for number, case in enumerate(cases)
        if all(one.name != "thorough" for one in getattr(case, "marks", ()))
    ]
    kept = kept or list(range(len(cases)))  # all of them: they are left out below
    more = dict(mark.kwargs)
    if ids is not None and not callable(ids):
        labels = list(ids)
        more["ids"] = [labels[number] for number in kept]
    return pytest.mark.parametrize(names, [cases[number] for number in kept], **more).mark


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest files first, so that no worker is left with one when all others are done. `make test` keeps a file
    # together, and its order. The list is from `--cpu-times`.
    names = Path(__file__).with_name("longest.txt").read_text().split()
    rank = {name: number for number, name in enumerate(names)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
    reasons = {id(item): reason for item in items if (reason := _why_not(item, config))}
    if hasattr(
        config, "workerinput"
    ):  # to tell the controller of thousands that are skipped takes CPU seconds
        items[:] = [item for item in items if id(item) not in reasons]
        config.workeroutput["left_out"] = config.workeroutput.get("left_out", 0) + len(reasons)
    for item in items:
        if reason := reasons.get(id(item)):
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(item: pytest.Item, config: pytest.Config) -> str:
    """Why a test is left out; nothing, if it is not."""
    long = item.get_closest_marker("long") is not None
    if config.getoption("--long") and not long:
        return "not one of those that take long: run without --long"
    if config.getoption("--thorough"):
        return ""
    if item.get_closest_marker("thorough"):
        return "one of many like it: run with --thorough"
    return "takes long: run with --long" if long and not config.getoption("--long") else ""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not config.getoption("--thorough"):
        terminalreporter.write_line(
            "Left out: what takes long (--long), and most of like cases (--thorough)."
        )
