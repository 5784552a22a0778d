"""The processes of an engine's ranks, for tests that kill them."""

import contextlib
from pathlib import Path


def rank_pids(engine: int) -> list[int]:
    """All but rank 0, which is the engine itself: what the engine's fork server has forked."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [pid for pid, parent in parents.items() if parents.get(parent) == engine]
    return sorted(pid for pid in found if b"forkserver" in Path(f"/proc/{parents[pid]}/cmdline").read_bytes())
