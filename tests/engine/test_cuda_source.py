"""CudaSource: KV of several ranks is copied to each rank's own memory, any blocks of any layers, and what does not
exist is refused. Without a GPU Triton's interpreter plays the copy, and memory that a GPU would open is at hand."""

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from cumulo.engine.decide.transfer.orders import LayerPiece
from cumulo.engine.play import transfer_cuda
from cumulo.engine.play.transfer_cuda import CudaSource
from cumulo.engine.play.transfer_wire import RankCaches
from cumulo.models.batch import KVCache
from tests.engine.tiny_engine import SPECS

OURS, THEIRS = 7, 9  # blocks


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, KVCache]:
    """What handles open, by their text."""
    found: dict[str, KVCache] = {}
    stream = SimpleNamespace(synchronize=lambda: None)
    for name in ("current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)

    def open_one(handles: str, like: KVCache, blocks: int) -> Any:
        assert found[handles].blocks == blocks
        return transfer_cuda._words_of(found[handles])

    monkeypatch.setattr(transfer_cuda, "_opened", open_one)
    return found


def caches(count: int, blocks: int, seed: int) -> list[KVCache]:
    made = [KVCache(SPECS["dense"], blocks, 8) for _ in range(count)]
    generator = torch.Generator().manual_seed(seed)
    for cache in made:
        for storage in (cache.key_storage, cache.value_storage):
            storage.copy_(torch.randn(storage.shape, generator=generator))
    return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU opens real handles")
def test_every_rank_gets_its_own_blocks_and_nothing_else_changes(opened: dict[str, KVCache]) -> None:
    ours, theirs = caches(2, OURS, 1), caches(2, THEIRS, 2)
    opened |= {"our 1": ours[1], "their 0": theirs[0], "their 1": theirs[1]}
    expected = [(one.key_storage.clone(), one.value_storage.clone()) for one in ours]
    reach = json.loads(json.dumps({"blocks": THEIRS, "ranks": ["their 0", "their 1"]}))
    source = CudaSource(RankCaches(ours[:1], ["our 0", "our 1"]), reach)
    layers, copied = ours[0].spec.layers, 0
    assert source.turn_layers == layers >= 2
    for layer, count, pairs in ((0, layers, [(8, 0), (3, 6)]), (1, 1, [(0, 2), (1, 3), (5, 5)])):
        copied += source.read(LayerPiece(layer, count, *zip(*pairs, strict=True)))
        for (keys, values), sender in zip(expected, theirs, strict=True):
            for first, to in pairs:
                keys[layer : layer + count, to] = sender.key_storage[layer : layer + count, first]
                values[layer : layer + count, to] = sender.value_storage[layer : layer + count, first]
    source.settle()
    block = ours[0].key_storage[0, 0].nbytes + ours[0].value_storage[0, 0].nbytes
    assert copied == 2 * block * (2 * layers + 3)
    for one, (keys, values) in zip(ours, expected, strict=True):
        assert torch.equal(one.key_storage, keys) and torch.equal(one.value_storage, values)
    for wrong in ((THEIRS, 0), (0, OURS), (-1, 0), (0, -1)):
        with pytest.raises(OSError, match="do not exist"):
            source.read(LayerPiece(0, 1, *zip(*[wrong], strict=True)))
