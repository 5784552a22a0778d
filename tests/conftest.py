"""For all tests: hypothesis draws the same cases every time, and a slow machine is not a failure."""

import atexit
import functools
import gc
import os
import random
import ssl
import sys
from pathlib import Path

# Triton decides when it is first imported whether its interpreter plays the kernels, and any test may import it
# first. Where there is no GPU the interpreter must.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import settings

from tests import forked_ranks, forked_workers, thorough
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest files first, so that no worker is left with one when all others are done. `make test` keeps a file
    # together, and its order. The list is from `--cpu-times`.
    names = Path(__file__).with_name("longest.txt").read_text().split()
    rank = {name: number for number, name in enumerate(names)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
    if config.getoption("--long"):
        left_out = [item for item in items if not item.get_closest_marker("long")]
        items[:] = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    if not config.getoption("--thorough"):
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="one of many like it: run with --thorough"))
            elif item.get_closest_marker("long") and not config.getoption("--long"):
                item.add_marker(pytest.mark.skip(reason="takes long: run with --long"))
