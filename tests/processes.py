"""Starts `cumulo`, a module or a program as a process of its own, as users do."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]


def start(
    arguments: Sequence[str],
    *,
    stdout: IO[Any],
    stderr: IO[Any],
    stdin: IO[Any] | None = None,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """`cumulo ARGUMENTS...`; without `stdin` it reads an empty one."""
    return subprocess.Popen(
        [sys.executable, "-m", "cumulo.cli", *arguments],
        stdin=stdin or subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=cwd, env=_environment(env),
    )  # fmt: skip


def start_module(
    name: str, *arguments: str, stdout: IO[Any], stdin: IO[Any] | None = None
) -> subprocess.Popen[bytes]:
    """`python -m NAME ARGUMENTS...` with our standard error."""
    return subprocess.Popen(
        [sys.executable, "-m", name, *arguments],
        stdin=stdin or subprocess.DEVNULL, stdout=stdout, cwd=ROOT, env=_environment(None),
    )  # fmt: skip


def run_program(path: Path, cwd: Path = ROOT, timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
    """`python PATH` with what it prints; a program that does not end is killed."""
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True, text=True, cwd=cwd, timeout=timeout_s, env=_environment(None),
    )  # fmt: skip


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """A process that starts in another folder imports this checkout, too, and the tests' modules."""
    environment = dict(os.environ if given is None else given)
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}
