"""SwapPool: blocks that leave and come back are what they were, in pieces of any size."""

import pytest
import torch

from cumulo.engine.play import swap_pool
from cumulo.engine.play.swap_pool import SwapPool
from cumulo.models.batch import KVCache
from cumulo.spec.model import ModelSpec

SPEC = ModelSpec("tiny", 50, 16, 3, 4, 2, 4, 24, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("piece_bytes", [1, 64 << 20])
def test_blocks_come_back_as_they_left(
    dtype: torch.dtype, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_pool, "_PIECE_BYTES", piece_bytes)
    cache, generator = KVCache(SPEC, 6, 4, dtype), torch.Generator().manual_seed(0)
    for storage in (cache.key_storage, cache.value_storage):
        storage.copy_(torch.randn(storage.shape, generator=generator).to(dtype))
    keys, values = cache.key_storage.float().clone(), cache.value_storage.float().clone()
    pool = SwapPool(cache, 5)
    pool.copy_out([(0, 4), (3, 1), (5, 0)])
    cache.key_storage.copy_(torch.zeros_like(cache.key_storage))
    cache.value_storage.copy_(torch.zeros_like(cache.value_storage))
    pool.give([(1, 0), (0, 1), (4, 2)])
    assert torch.equal(cache.key_storage.float()[:, :3], keys[:, [3, 5, 0]])
    assert torch.equal(cache.value_storage.float()[:, :3], values[:, [3, 5, 0]])
    assert not cache.key_storage.float()[:, 3:].any()
    pool.copy_out([])
    pool.give([])
