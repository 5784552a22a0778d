"""For all tests: hypothesis draws the same cases every time, and a slow machine is not a failure."""

import os
import random
import sys
from pathlib import Path

# Triton decides when it is first imported whether its interpreter plays the kernels, and any test may import it
# first. Where there is no GPU the interpreter must.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

# Models that the person at this machine has pulled are no part of the tests.
os.environ["XDG_DATA_HOME"] = f"/tmp/cumulo-no-data-{os.getpid()}"

import pytest
from hypothesis import settings

from tests import thorough

settings.register_profile("cumulo", deadline=None, derandomize=True, max_examples=thorough.examples(100))
settings.register_profile("thorough", deadline=None, derandomize=True)
# Other cases than always: pytest --hypothesis-profile=hunt --hypothesis-seed=1
settings.register_profile("hunt", deadline=None)
settings.load_profile("cumulo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also the tests marked long or thorough")
    parser.addoption(
        "--long", action="store_true", help="only the tests marked long, which are skipped otherwise"
    )


def pytest_configure(config: pytest.Config) -> None:
    thorough.chosen = config.getoption("--thorough")
    if thorough.chosen and not config.getoption("--hypothesis-profile"):
        settings.load_profile("thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what `--long` and `--thorough` do not ask for."""
    if config.getoption("--thorough"):
        return
    only_long = config.getoption("--long")
    wanted, others = [], []
    for item in items:
        is_long = item.get_closest_marker("long") is not None
        is_wanted = is_long == only_long and item.get_closest_marker("thorough") is None
        (wanted if is_wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = wanted


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own is the same every time, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)
