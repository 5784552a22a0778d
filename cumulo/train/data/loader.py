"""BatchLoader: a thread that has batches ready before the trainer asks, and says how long it was waited for."""

import queue
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from cumulo.train.data.packing import Batch, Packing


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch as tensors: tokens and targets [B, S] int64, positions [B, S], document starts [D + 1] int32."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_starts: Tensor
    documents: int
    loss_tokens: int


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    def move(array: object) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    starts = batch.document_starts
    return DeviceBatch(
        move(batch.tokens),
        move(batch.targets),
        move(batch.positions),
        move(starts),
        len(starts) - 1,
        batch.loss_tokens,
    )


class BatchLoader:
    """Yields batches of `count` samples from sample `first` on; use it with `with`, so that its thread ends."""

    def __init__(
        self, packing: Packing, first: int, count: int, depth: int, place: tuple[int, int] = (0, 1)
    ) -> None:
        """`place`: which of how many equal parts of every batch is wanted."""
        self.packing, self.first, self.count, self.place = packing, first, count, place
        self.stall_s = 0.0  # how long the trainer has waited in all
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="batch-loader", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        begin = time.perf_counter()
        item = self._ready.get()
        self.stall_s += time.perf_counter() - begin
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # a thread that waits for room sees that it should stop
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fetch(self) -> None:
        part, parts = self.place
        own = self.count // parts
        at = self.first + part * own
        while not self._stopped.is_set():
            try:
                item: Batch | BaseException = self.packing.batch(at, own)
            except BaseException as error:  # handed to the trainer, who must not wait for ever
                item = error
            self._ready.put(item)
            if isinstance(item, BaseException):
                return
            at += self.count
