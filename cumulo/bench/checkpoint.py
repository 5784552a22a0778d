"""What `cumulo bench checkpoint` measures: how long an asynchronous save holds training up, beside one that is
waited for, of the same state to the same disk. Between the save and the next change of the state there is a step's
time, in which the copy is made."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from cumulo.base.report import Row
from cumulo.checkpoint.play.held import Held, held_whole
from cumulo.checkpoint.play.memory import MemoryStore
from cumulo.checkpoint.play.saver import Saver
from cumulo.checkpoint.play.store import CheckpointStore, Store
from cumulo.ranks.team import Team

STALL_SHARE = 0.05  # of a synchronous save
STEP_S = 0.2


def measure(mebibytes: int, repeats: int, folder: Path | None, tell: Callable[[str], None]) -> list[Row]:
    """Rows for a state of that size in tensors of 16 MiB, as weights and optimizer of a small model are."""
    state = held_whole({f"model.{n}": torch.randn(2048, 2048) for n in range(max(1, mebibytes // 16))})
    size_gib = sum(held.tensor.nbytes for held in state.values()) / 2**30
    with TemporaryDirectory(dir=folder) as name, TemporaryDirectory(dir=_memory()) as memory:
        heard: list[str] = []
        saver, store = Saver(0, heard.append), CheckpointStore(Path(name), 1, heard.append)
        waited_s, stalled_s = [], []
        saver.save(0, state, {}, [store], later=True)  # the memory for copies is taken once
        saver.wait()
        for repeat in range(repeats):
            tell(f"{size_gib:.2g} GiB, round {repeat + 1}")
            waited_s.append(saver.save(2 * repeat + 1, state, {}, [store], later=False))
            stall_s = saver.save(2 * repeat + 2, state, {}, [store], later=True)
            time.sleep(STEP_S)  # a device computes the next step's gradients
            stalled_s.append(stall_s + saver.settle())
            saver.wait()
        in_memory_s = _in_memory_s(saver, state, MemoryStore(Path(memory), heard.append, Team()))
        begin = time.perf_counter()
        checkpoint = store.latest()
        if checkpoint is not None:
            store.load(checkpoint, state)
        load_s = time.perf_counter() - begin
    waited, stalled = statistics.median(waited_s), statistics.median(stalled_s)
    return [
        Row("stall of an asynchronous save", 100 * stalled / waited, "% of a synchronous one", "lower",
            must=100 * STALL_SHARE, note=f"{1000 * stalled:.0f} ms of {waited:.2f} s, {size_gib:.2g} GiB; "
            f"{STEP_S:g} s until the state changes"),
        Row("synchronous save", size_gib / waited, "GiB/s", note="hashed and forced to disk"),
        Row("save to memory", size_gib / in_memory_s, "GiB/s", note="one process, no peer"),
        Row("verified load", size_gib / load_s, "GiB/s"),
    ]  # fmt: skip


def _in_memory_s(saver: Saver, state: dict[str, Held], memory: Store) -> float:
    return min(saver.save(step, state, {}, [memory], later=False) for step in range(3))


def _memory() -> Path | None:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None
