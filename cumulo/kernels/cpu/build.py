"""Compile the C++ kernels once per machine and find them again. Called by `cumulo.kernels.cpu.library`.

The source has no dependency but a C++17 compiler. The result is cached under a name that hashes the source,
the flags, the compiler and the CPU, so a change of any of them compiles anew and nothing is ever overwritten.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parents[1] / "native"
COMPILERS = ("g++", "c++", "clang++")


class BuildFailed(Exception):
    """The kernels could not be compiled; the message says why. Callers fall back to torch."""


def flags() -> list[str]:
    """-ffp-contract=off: every fused operation is written out, so all tile sizes round alike."""
    tune = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return ["-O3", tune, "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]


@lru_cache(maxsize=1)
def cpu_identity() -> str:
    """The lines of /proc/cpuinfo that decide what -march=native means."""
    wanted = ("flags", "Features", "model name", "CPU part", "CPU implementer", "CPU variant")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def find_compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def default_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cumulo" / "native"


def source_files() -> list[Path]:
    return sorted(path for path in SOURCE_FOLDER.iterdir() if path.suffix in (".h", ".cpp"))


def library_name(compiler_version: str) -> str:
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join([*flags(), compiler_version, cpu_identity(), platform.machine()]).encode())
    return f"kernels-{digest.hexdigest()[:20]}.so"


def build(cache_folder: Path | None = None, announce: bool = True) -> Path:
    """The path of the compiled kernels, compiling them first if this machine has not yet."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    folder = cache_folder or default_cache_folder()
    target = folder / library_name(version)
    if target.exists():
        return target
    if announce:
        print(
            "cumulo: compiling CPU kernels for this machine (once, about 20 s) ...",
            file=sys.stderr,
            flush=True,
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not target.exists():  # another process may have compiled it meanwhile
                _compile(compiler, target)
    except OSError as error:
        raise BuildFailed(f"cannot write to the cache folder {folder}: {error}") from error
    return target


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: ranks, engines and servers of a first start all want the kernels at once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then each compiles for itself
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(compiler: str, target: Path) -> None:
    # Compiled beside its final place, then renamed: another process sees all of it or nothing.
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [compiler, *flags(), str(SOURCE_FOLDER / "library.cpp"), "-o", temporary]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildFailed(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        Path(temporary).chmod(0o755)
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
