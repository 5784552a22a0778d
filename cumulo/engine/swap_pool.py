"""SwapPool: KV blocks that were moved to the host, in page-locked memory so that copies run beside the computation.
Owned by CudaRunner; which blocks move, the plan says."""

import torch

from cumulo.models.batch import KVCache


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

    def take(self, pairs: list[tuple[int, int]]) -> None:
        """Device block -> host block. Ordered with the stream's other work; returns at once."""
        for storage, pool in self._sides():
            # Gathered on the device first: there a strided copy is cheap, over the bus it is not.
            gathered = storage[:, [source for source, _ in pairs]].transpose(0, 1).contiguous()
            for index, (_, target) in enumerate(pairs):
                pool[target].copy_(gathered[index], non_blocking=True)

    def give(self, pairs: list[tuple[int, int]]) -> None:
        """Host block -> device block."""
        for storage, pool in self._sides():
            arrived = torch.empty((len(pairs), *pool.shape[1:]), dtype=pool.dtype, device=storage.device)
            for index, (source, _) in enumerate(pairs):
                arrived[index].copy_(pool[source], non_blocking=True)
            storage[:, [target for _, target in pairs]] = arrived.transpose(0, 1)

    def _sides(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = [(self._cache.key_storage, self._keys), (self._cache.value_storage, self._values)]
        # 8-bit floats are moved as bytes: torch indexes those.
        return [
            (storage.view(torch.uint8), pool.view(torch.uint8)) if storage.itemsize == 1 else (storage, pool)
            for storage, pool in pairs
            if storage.numel()
        ]
