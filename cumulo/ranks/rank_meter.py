"""RankMeter: what a rank of an engine has done, where all ranks can see it: its steps and their time, how often and
how long it waited for others, and what it holds. The engine finds the rank that the others wait for by it, and
/metrics shows it.

A rank's numbers are one cache line of memory that all ranks map, so that counting costs some nanoseconds and no
message.
"""

import contextlib
import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORDS = 8  # of a rank
READ, WAITS, STEPS, STEP_NS, WAIT_NS, HELD_BYTES, PID, ROUTED = range(WORDS)
Words = NDArray[np.uint64]


class RankTable:
    """The memory: a row of words for each rank of this host."""

    def __init__(self, path: Path, world: int) -> None:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self.progress: Words = np.frombuffer(memory, np.uint64, WORDS * world).reshape(world, WORDS)

    @staticmethod
    def create(world: int) -> Path:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        handle, name = tempfile.mkstemp(prefix="cumulo-ranks-", dir=folder)
        os.ftruncate(handle, 8 * WORDS * world)
        os.close(handle)
        return Path(name)


@dataclass(frozen=True, slots=True)
class RankState:
    """Since the rank's process began."""

    rank: int
    pid: int
    steps: int
    step_s: float  # in all steps
    wait_s: float  # of these: for other ranks
    memory_bytes: int  # of its process, or what it holds on its GPU
    routed_tokens: int = 0  # choices of tokens, layer by layer, that fell on experts of this rank


class RankMeter:
    """A context that is entered to wait for other ranks."""

    def __init__(self, words: Words) -> None:
        """`words`: this rank's."""
        self._words = words
        self._wait_ns = self._since_ns = 0
        words[PID] = os.getpid()

    def __enter__(self) -> None:
        # Before it waits: the rank with the fewest is the one that the others wait for.
        self._words[WAITS] += 1
        self._since_ns = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        self._wait_ns += time.perf_counter_ns() - self._since_ns

    def holds(self, held_bytes: int) -> None:
        """On its device, where no other process can look."""
        self._words[HELD_BYTES] = held_bytes

    def routed(self, tokens: int) -> None:
        """Counts choices of tokens that fell on experts of this rank."""
        self._words[ROUTED] += tokens

    def step(self, seconds: float) -> None:
        """A step has ended."""
        words = self._words
        words[STEPS] += 1
        words[STEP_NS] += int(1e9 * seconds)
        words[WAIT_NS] = self._wait_ns


def rank_states(table: Words, on_gpu: bool) -> list[RankState]:
    """Of all ranks of this host, by rank. On a CPU memory is what the system says of each process."""
    return [
        RankState(
            rank,
            int(words[PID]),
            int(words[STEPS]),
            int(words[STEP_NS]) / 1e9,
            int(words[WAIT_NS]) / 1e9,
            int(words[HELD_BYTES]) if on_gpu else _resident_bytes(int(words[PID])),
            int(words[ROUTED]),
        )
        for rank, words in enumerate(table.copy())
        if words[PID]
    ]


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
