"""Saver: copies a rank's state aside and writes the copy, in a thread, while training goes on. The trainer owns it.

A state changes only when the optimizer moves it. So the copy, too, is made while the next step's gradients are
computed, and only `settle`, before that step moves anything, waits for it.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cumulo.checkpoint.play.held import Held, Part, own_parts
from cumulo.checkpoint.play.store import Store
from cumulo.ranks.team import FAILURES, cause


class Saver:
    def __init__(self, rank: int, tell: Callable[[str], None]) -> None:
        """`tell` hears of what went wrong and was survived."""
        self.rank, self.tell = rank, tell
        self.failed: str | None = None  # why the latest save did not succeed
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()

    def prepare(self, state: Mapping[str, Held]) -> None:
        """Have the memory for a GPU's state before the first save wants it: pinning it takes longer than a step."""
        parts = [part for part in own_parts(state, self.rank) if part.tensor.is_cuda]
        if parts:
            self._thread = threading.Thread(target=self._reserve, args=(parts,), name="checkpoint-memory")
            self._thread.start()

    def save(
        self,
        step: int,
        state: Mapping[str, Held],
        facts: Mapping[str, Any],
        stores: Sequence[Store],
        later: bool,
    ) -> float:
        """Save into each of `stores`; `later`: return at once, and `settle` before the state changes. Returns the
        seconds it took."""
        begin = time.perf_counter()
        self.wait()
        parts = own_parts(state, self.rank)
        if not later:
            self._write(step, parts, dict(facts), stores)
            return time.perf_counter() - begin
        self._copied.clear()
        moved = torch.cuda.Event() if any(part.tensor.is_cuda for part in parts) else None
        if moved is not None:
            moved.record()
        self._thread = threading.Thread(
            target=self._copy_and_write,
            args=(step, parts, dict(facts), stores, moved),
            name="checkpoint-writer",
        )
        self._thread.start()
        return time.perf_counter() - begin

    def settle(self) -> float:
        """Before the state changes: until its copy is made. Returns the seconds it took."""
        begin = time.perf_counter()
        self._copied.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Until what is being written is in its place, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy_and_write(
        self,
        step: int,
        parts: Sequence[Part],
        facts: Mapping[str, Any],
        stores: Sequence[Store],
        moved: torch.cuda.Event | None,
    ) -> None:
        try:
            if moved is None:
                copies = self._copies_of(parts)
            else:  # beside the stream that computes, but after what it has moved
                stream = torch.cuda.Stream()
                stream.wait_event(moved)
                with torch.cuda.stream(stream):
                    copies = self._copies_of(parts)
                stream.synchronize()
        except FAILURES as error:  # no memory for the copies
            self._tell_failure(step, "memory", error)
            return
        finally:
            self._copied.set()
        self._write(step, copies, facts, stores)

    def _reserve(self, parts: Sequence[Part]) -> None:
        try:
            for part in parts:
                self._copy_of(part)
        except FAILURES as error:
            self.tell(
                f"there is no memory for a copy of the state yet ({cause(error)}): the next save tries again"
            )

    def _copies_of(self, parts: Sequence[Part]) -> list[Part]:
        """In memory that is kept from save to save: allocating and pinning it is slower than the copy."""
        here = {(part.name, part.offset) for part in parts}
        for gone in self._copies.keys() - here:  # experts that moved on
            del self._copies[gone]
        found: list[Part] = []
        for part in parts:
            copy = self._copy_of(part).copy_(part.tensor.detach(), non_blocking=True)
            found.append(Part(part.name, part.whole, part.offset, copy))
        return found

    def _copy_of(self, part: Part) -> Tensor:
        key, tensor = (part.name, part.offset), part.tensor
        if key not in self._copies:
            self._copies[key] = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
            )
        return self._copies[key]

    def _write(
        self, step: int, parts: Sequence[Part], facts: Mapping[str, Any], stores: Sequence[Store]
    ) -> None:
        self.failed = None
        for store in stores:
            try:
                store.write(step, parts, facts)
            except FAILURES as error:  # disk full, no permission, ...: the run need not die of it
                self._tell_failure(step, store.place, error)

    def _tell_failure(self, step: int, place: str, error: BaseException) -> None:
        self.failed = f"the checkpoint of step {step} could not be written to {place}: {cause(error)}"
        self.tell(f"{self.failed}; training continues, and the previous checkpoint is kept")
