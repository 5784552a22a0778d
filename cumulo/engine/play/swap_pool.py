"""SwapPool: KV blocks that were moved to the host; those of a GPU in page-locked memory, so that copies run beside
the computation. Owned by a runner; which blocks move, the plan says."""

import time
from collections.abc import Iterator

import torch

from cumulo.engine.decide.plan import StepPlan
from cumulo.models.batch import KVCache

_PIECE_BYTES = 64 << 20  # gathered on the device at a time: a long context must not need gigabytes to leave


class SwapPool:
    """`blocks` blocks of a device cache. One block, all layers, keys and values, is contiguous: one copy each."""

    def __init__(self, cache: KVCache, blocks: int) -> None:
        self._cache, self.blocks = cache, blocks
        shapes = [(blocks, s.shape[0], *s.shape[2:]) for s in (cache.key_storage, cache.value_storage)]
        pinned = cache.key_storage.is_cuda
        self._keys, self._values = (
            torch.empty(shape, dtype=cache.key_storage.dtype, pin_memory=pinned) for shape in shapes
        )

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def views(self, block: int) -> list[torch.Tensor]:
        """Keys and values of one host block, to be read and written where no step uses it."""
        return [self._keys[block], self._values[block]]

    def copy_out(self, pairs: list[tuple[int, int]]) -> None:
        """Device block -> host block. Ordered with the stream's other work; returns at once."""
        for part in self._pieces(pairs):
            sources = self._on_device([source for source, _ in part])
            for storage, pool in self._sides():
                # Gathered on the device first: there a strided copy is cheap, over the bus it is not.
                gathered = storage.transpose(0, 1).index_select(0, sources)
                for index, (_, target) in enumerate(part):
                    pool[target].copy_(gathered[index], non_blocking=True)

    def give(self, pairs: list[tuple[int, int]]) -> None:
        """Host block -> device block, likewise."""
        for part in self._pieces(pairs):
            targets = self._on_device([target for _, target in part])
            for storage, pool in self._sides():
                arrived = torch.empty((len(part), *pool.shape[1:]), dtype=pool.dtype, device=storage.device)
                for index, (source, _) in enumerate(part):
                    arrived[index].copy_(pool[source], non_blocking=True)
                storage.transpose(0, 1).index_copy_(0, targets, arrived)

    def measure_s(self) -> float:
        """Seconds to move one block to the pool, measured while both caches are empty."""
        pairs = [(block, block) for block in range(min(4, self._cache.blocks, self.blocks))]
        self._move(pairs)  # touches the pages
        started_s = time.perf_counter()
        self._move(pairs)
        return (time.perf_counter() - started_s) / len(pairs)

    def _move(self, pairs: list[tuple[int, int]]) -> None:
        self.copy_out(pairs)
        if self._cache.key_storage.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _pieces(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        size = max(1, _PIECE_BYTES * self.blocks // max(1, self.nbytes))
        for first in range(0, len(pairs), size):
            yield pairs[first : first + size]

    def _on_device(self, blocks: list[int]) -> torch.Tensor:
        """From page-locked memory: a copy from anywhere else would make the host wait for the stream."""
        indices = torch.tensor(blocks)
        if self._keys.is_pinned():
            indices = indices.pin_memory()
        return indices.to(self._cache.key_storage.device, non_blocking=True)

    def _sides(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = [(self._cache.key_storage, self._keys), (self._cache.value_storage, self._values)]
        # 8-bit floats are moved as bytes: torch indexes those.
        return [
            (storage.view(torch.uint8), pool.view(torch.uint8)) if storage.itemsize == 1 else (storage, pool)
            for storage, pool in pairs
            if storage.numel()
        ]


def swap_blocks(plan: StepPlan, pool: SwapPool | None) -> None:
    """Move the blocks that a plan swaps."""
    if plan.swap_out or plan.swap_in:
        if pool is None:
            raise RuntimeError(f"step {plan.index} swaps blocks, but this runner has no host blocks")
        pool.copy_out(plan.swap_out)
        pool.give(plan.swap_in)
