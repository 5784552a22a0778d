"""This machine: what memory it has left, what this process takes, and its places for ranks (GPUs and CPU cores).

Read by the engine for its memory ledger, and where engines are started or planned.
"""

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cumulo.errors import CumuloError


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the least of what the system and every enclosing cgroup allow.

    `root` is where the system's files are looked up; tests put their own there.
    """
    limits = _cgroup_limits(root)
    # Free pages, and those that the system can reclaim without swapping.
    if (free_kib := _field(root / "proc/meminfo", "MemAvailable:")) is not None:
        limits.append(free_kib * 1024)
    if limits:
        return max(0, min(limits))
    # Not Linux: half of what is built in, for want of anything that says what is free.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def memory_file(name: str, size: int) -> int:
    """The descriptor of a new file in memory, of zeros, that other processes can map. It is gone when the last
    process that maps it is."""
    if not hasattr(os, "memfd_create"):
        raise CumuloError("processes that share memory need Linux: leave out the collective or the role")
    handle = os.memfd_create(name)
    os.ftruncate(handle, size)
    return handle


class PeakMemory:
    """Measures how much physical memory a piece of work takes at its peak beyond what was held before.

    >>> with PeakMemory() as peak:
    ...     work()
    >>> peak.bytes  # None where the system cannot say

    Memory an earlier peak left with the allocator is used again unseen, so the first run is the telling one.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._before: int | None = None

    def __enter__(self) -> "PeakMemory":
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present value
            self._before = _status_bytes("VmRSS:")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        peak = _status_bytes("VmHWM:")
        if self._before is not None and peak is not None:
            self.bytes = max(0, peak - self._before)


def _status_bytes(name: str) -> int | None:
    found_kib = _field(Path("/proc/self/status"), name)
    return None if found_kib is None else found_kib * 1024


def _field(path: Path, name: str) -> int | None:
    """The number behind a name at the start of a line; None if it is missing."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    return None


# Of both versions of cgroups: the controller in /proc/self/cgroup, the folder, limit, use, and the field of cached
# file pages, which count as used but are given back on demand.
_CGROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def _cgroup_limits(root: Path) -> list[int]:
    """Limit minus use of this process's cgroup and all above it; any of them may be the tightest."""
    found = []
    for controller, base, most, current, cached in _CGROUPS:
        own = next((path for names, path in _own_cgroups(root) if controller in names.split(",")), None)
        for folder in _with_parents(root / base, own) if own is not None else ():
            limit, used = _number(folder / most), _number(folder / current)
            if (
                limit is not None and used is not None and limit < 1 << 60
            ):  # version 1's number for "no limit"
                found.append(limit - used + (_field(folder / "memory.stat", cached) or 0))
    return found


def _own_cgroups(root: Path) -> list[tuple[str, str]]:
    """(controllers, path) of lines like "0::/user.slice" (version 2) or "4:memory:/docker/ab" (1)."""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        parts = [line.split(":", 2) for line in lines]
        return [(part[1], part[2]) for part in parts if len(part) == 3]
    return []


def _with_parents(base: Path, own: str) -> list[Path]:
    """The cgroup's folder and those above it. In a container its path may not exist: then the base is it."""
    folder = base / own.strip("/")
    return [folder, *(parent for parent in folder.parents if parent == base or base in parent.parents)]


def _number(path: Path) -> int | None:
    """The file's number; None if it is missing or says "max"."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


# So many ranks can be started on any CPU, to try a layout, even where they share cores.
LEAST_CPU_RANKS = 4


def gpus_here() -> list[str]:
    """Those that this process may use, as CUDA names them. Asks no driver, so that none is loaded."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [one.strip() for one in allowed.split(",") if one.strip()]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((number for number in found if number.isdecimal()), key=int)
