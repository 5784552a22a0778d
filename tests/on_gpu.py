"""`make test-gpu`: all tests whose kernels run on a GPU, with what they need set.

    python -m tests.on_gpu [PYTEST OPTIONS]

Every file has a pytest process of its own, several at a time: compiling kernels takes the host longer than running
them takes the GPU. Ranks of tests share one GPU, for which symmetric memory must be told that they may, and CUDA's
multi-process service lets their kernels run side by side; it is started and ended here unless it runs already. It
needs torch, Triton and pytest alone: a file whose packages are not installed is skipped by name. As a pytest plugin
this module takes the place of conftest.py, which needs more.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import thorough
from tests.kernels.cuda.conftest import device  # noqa: F401

ROOT = Path(__file__).parents[1]
MARKS = ("kernels.cuda", "cuda_engine", "play.cuda", "mark.gpu")  # what a file of tests for GPUs has
PROCESSES = min(12, os.cpu_count() or 1)
SHARE_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
NO_TESTS = 5  # pytest's exit status where everything was left out


# -- as a plugin ----------------------------------------------------------------------------------------------
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also the many further cases marked thorough")


def pytest_configure(config: pytest.Config) -> None:
    thorough.chosen = config.getoption("--thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="one of many like it: run with --thorough"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that imports a package which is not installed is skipped."""
    report = yield
    missing = [line for line in str(report.longrepr).splitlines() if "ModuleNotFoundError: No module" in line]
    if report.failed and missing and "'cumulo" not in missing[-1] and "'tests" not in missing[-1]:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, missing[-1].partition("Error: ")[2])
    return report


# -- as a program ---------------------------------------------------------------------------------------------
@contextmanager
def shared_gpu() -> Iterator[dict[str, str]]:
    """The environment in which processes share the GPU."""
    environment = {**os.environ, SHARE_DEVICE: "1"}
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="cumulo-mps-") as folder:
        environment |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], env=environment, check=True)
        try:
            yield environment
        finally:
            subprocess.run([control], env=environment, input="quit\n", text=True, check=False)


def main(options: list[str]) -> int:
    files = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(mark in path.read_text("utf-8") for mark in MARKS)
    ]
    failed = []
    with shared_gpu() as environment, ThreadPoolExecutor(PROCESSES) as pool:

        def run(path: Path) -> tuple[Path, float, subprocess.CompletedProcess[str]]:
            command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "tests.on_gpu", str(path)]
            started_s = time.monotonic()
            done = subprocess.run(
                [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
            return path, time.monotonic() - started_s, done

        for path, seconds, done in pool.map(run, files):
            lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
            print(f"{path}: {lines[-1].strip('= ')} ({seconds:.0f} s)", flush=True)
            if done.returncode not in (0, NO_TESTS):
                failed.append(path)
                print("\n".join([*lines[-60:], done.stderr[-2000:]]), flush=True)
    print(
        f"{len(files) - len(failed)} of {len(files)} files passed"
        + "".join(f"\nFAILED {one}" for one in failed)
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
