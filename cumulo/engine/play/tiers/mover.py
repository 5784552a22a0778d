"""TierMover: writes KV blocks of host memory to disk and reads them back, in threads of its own. The engine's loop
takes its news in between two steps; no step ever waits for a disk.
"""

import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.tiers.tiers import (
    FilesRead,
    FilesSeen,
    FileWritten,
    ReadFiles,
    TierEvent,
    WriteFile,
)
from cumulo.engine.play.mailbox import Mailbox
from cumulo.engine.play.swap_pool import SwapPool
from cumulo.engine.play.tiers.kv_files import KvFiles
from cumulo.models.batch import KVCache

_LOOK_EVERY_S = 5.0  # for files of other engines,
_LOOK_SHARE = 50  # and no more often than this many times as long as it takes
HostBlock = Callable[[int], list[torch.Tensor]]  # the storages of one host block, to be read and written


class TierMover:
    def __init__(self, files: KvFiles, host_block: HostBlock, scheduler: Scheduler) -> None:
        self.files, self._host_block, self._scheduler = files, host_block, scheduler
        self.news: Mailbox[TierEvent] = Mailbox()
        self._known = files.scan()
        tiers = scheduler.tiers
        assert tiers is not None
        self._tiers = tiers
        tiers.on_disk.update(self._known)
        self._block_bytes = sum(part.nbytes for part in self._views(tiers.host.first))
        self._writes: queue.SimpleQueue[WriteFile | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[ReadFiles | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"cumulo-kv-{name}", daemon=True)
            for name, target in (("writer", self._write_all), ("reader", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine's thread ------------------------------------------------------------------------------
    def exchange(self, now_s: float) -> None:
        """Take in what was written and read, and hand out what is ordered."""
        for event in self.news.take_all():
            self._tiers.enter_event(event, now_s)
        orders = self._tiers.orders
        for order in orders:
            if isinstance(order, WriteFile):
                self._writes.put(order)
            else:
                self._reads.put(order)
        orders.clear()

    def save(self, submit: Callable[[StepPlan], object], patience_s: float) -> None:
        """An idle engine ends: what is still on the device goes to disk, too, as far as there is time."""
        pool, ends_s = self._scheduler.pool, time.monotonic() + patience_s
        left = [(h, block) for h, block in pool.block_of.items() if h not in self._tiers.on_disk]
        index = -1
        while (left or self._tiers.writing) and time.monotonic() < ends_s:
            part, left = left[:16], left[16:]
            plan = StepPlan(index)
            self._tiers.spill(part, plan)
            if plan.swap_out:
                submit(plan)
            self._tiers.played(index)
            index -= 1
            self.exchange(0.0)
            while self._tiers.writing and time.monotonic() < ends_s:
                self.news.wait(0.1)
                self.exchange(0.0)

    def close(self) -> None:
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self.news.close()

    # -- the mover's threads ------------------------------------------------------------------------------
    def _views(self, block: int) -> list[NDArray[np.uint8]]:
        """A host block as bytes."""
        return [part.view(torch.uint8).numpy() for part in self._host_block(block) if part.numel()]

    def _write_all(self) -> None:
        next_look_s = time.monotonic() + _LOOK_EVERY_S
        while True:
            try:
                order = self._writes.get(timeout=_LOOK_EVERY_S)
                if order is None:
                    return
                parts = [part.tobytes() for part in self._views(order.block)]
                ok = self.files.write(order.block_hash, parts)
                if ok:
                    self._known.add(order.block_hash)
                self.news.put(FileWritten(order.block_hash, order.block, ok))
            except queue.Empty:
                pass
            if (now_s := time.monotonic()) >= next_look_s:
                self._look()
                took_s = time.monotonic() - now_s
                next_look_s = now_s + max(_LOOK_EVERY_S, _LOOK_SHARE * took_s)

    def _look(self) -> None:
        found = self.files.scan()
        came, went = found - self._known, self._known - found
        self._known = found
        if came or went:
            self.news.put(FilesSeen(tuple(came), tuple(went)))

    def _read_all(self) -> None:
        while (order := self._reads.get()) is not None:
            started_s = time.perf_counter()
            good = tuple(self._read(h, block) for h, block in zip(order.hashes, order.blocks, strict=True))
            self.news.put(FilesRead(order.number, good, time.perf_counter() - started_s))

    def _read(self, block_hash: bytes, block: int) -> bool:
        data = self.files.read(block_hash, self._block_bytes)
        if data is None:
            return False
        start = 0
        for view in self._views(block):
            view[...] = np.frombuffer(data[start : start + view.nbytes], dtype=np.uint8).reshape(view.shape)
            start += view.nbytes
        return True


def host_block_of(runner: object) -> HostBlock:
    """How to reach a runner's host blocks: those of a CPU lie layer by layer, a GPU's block by block."""
    cache, pool = getattr(runner, "host_cache", None), getattr(runner, "pool", None)
    if isinstance(cache, KVCache):
        return lambda block: [cache.key_storage[:, block], cache.value_storage[:, block]]
    if isinstance(pool, SwapPool):
        return pool.views
    raise RuntimeError(f"{type(runner).__name__} has no host blocks")
