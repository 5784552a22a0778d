"""KV blocks from one engine's GPU into another's on one host, by CUDA IPC (everything else:
transfer_stream.py). The sender exports its cache, the receiver opens it and reads.

A way is two small classes, one for each end. Its export says in a greeting how the cache is reached; its source
reads runs of blocks of one layer straight into the receiver's own cache, and returns when they are there. Libraries
that read remote memory (NIXL, UCX) fit the same two.
"""

import json
from typing import Any, Protocol

import torch

from cumulo.engine.decide.transfer.orders import LayerPiece
from cumulo.engine.play.transfer_wire import RankCaches, SentCache
from cumulo.models.batch import KVCache


class BlockSource(Protocol):
    """The receiver's side: another engine's cache."""

    turn_bytes: int  # read before looking whether a transfer was given up
    turn_layers: int  # read at once

    def read(self, piece: LayerPiece) -> int:
        """Copy blocks of some layers into this engine's cache; returns bytes. Raises OSError when the other end is
        gone."""
        ...

    def settle(self) -> None:
        """Return when everything that was read is there."""
        ...

    def close(self) -> None: ...


class CudaExport:
    """The device memory of the cache, which another process of this host opens by a handle."""

    name = "cuda"

    def __init__(self, cache: SentCache) -> None:
        self._cache = cache

    def reach(self) -> dict[str, Any]:
        ranks = self._cache.handles if isinstance(self._cache, RankCaches) else [cuda_handles(self._cache)]
        return {"blocks": self._cache.blocks, "ranks": ranks}


def cuda_handles(cache: KVCache) -> str:
    """What another process of this host opens keys and values by."""
    handles = []
    for one in (cache.key_storage, cache.value_storage):
        if one.numel():
            device, *rest = one.untyped_storage()._share_cuda_()
            fields = [part.hex() if isinstance(part, bytes) else part for part in rest]
            handles.append({"device": device, "fields": fields, "offset": one.storage_offset()})
    return json.dumps(handles)


def _opened(handles: str, like: KVCache, blocks: int) -> list[torch.Tensor]:
    """Another process's keys and values, of so many blocks, as words."""
    found = []
    storages = [one for one in (like.key_storage, like.value_storage) if one.numel()]
    for ours, handle in zip(storages, json.loads(handles), strict=True):
        shape = (ours.shape[0], blocks, *ours.shape[2:])
        fields = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle["fields"]]
        storage = torch.UntypedStorage._new_shared_cuda(handle["device"], *fields)
        theirs = torch.empty(0, dtype=ours.dtype, device=storage.device)
        theirs.set_(storage, handle["offset"], shape)  # type: ignore[call-overload]
        found.append(_word_tensor(theirs))
    return found


class CudaSource:
    """The sender's device memory. Copies run on a stream of their own, beside this engine's steps; those of several
    ranks on each one's GPU.

    A gigabyte takes half a millisecond, so the host must not take as long: all layers that are ready go in one
    launch, and what a launch needs is on the device or in page-locked memory before the first transfer.
    """

    turn_bytes = 8 << 30  # waiting for the device costs more than copying this

    def __init__(self, cache: SentCache, reach: dict[str, Any]) -> None:
        """Called by the thread that reads: the streams become that thread's own."""
        blocks, self.turn_layers = int(reach["blocks"]), cache.spec.layers
        own, ours = cache.ranks[0] if isinstance(cache, RankCaches) else cache, words_by_rank(cache)
        self._ranks = [
            _RankSource(mine, _opened(theirs, own, blocks))
            for mine, theirs in zip(ours, reach["ranks"], strict=True)
        ]

    def read(self, piece: LayerPiece) -> int:
        """Launched; it is there when it is settled."""
        return sum(rank.read(piece) for rank in self._ranks)

    def settle(self) -> None:
        for rank in self._ranks:
            rank.settle()

    def close(self) -> None:
        self._ranks = []


class _RankSource:
    """The copies of one rank, from the sender's memory into this engine's."""

    def __init__(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        from cumulo.kernels.cuda.collective import block_copy  # Triton is there on machines with a GPU only

        self._ours, self._theirs, self._copy_blocks = ours, theirs, block_copy.copy_blocks
        self._device = ours[0].device
        torch.cuda.set_device(self._device)
        if torch.cuda.current_stream() == torch.cuda.default_stream():  # else one of another sender
            torch.cuda.set_stream(torch.cuda.Stream())
        self._stream = torch.cuda.current_stream()
        # A look at a tensor costs microseconds.
        self._our_blocks, self._their_blocks = ours[0].shape[1], theirs[0].shape[1]
        self._block_bytes = sum(one[0, 0].nbytes for one in ours)
        words = 2 * _aligned_words(self._our_blocks)
        self._places = torch.zeros(words, dtype=torch.int32, device=self._device)
        self._page_locked = torch.zeros(words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._numbers = self._page_locked.numpy()
        self._used = 0  # of these, by copies that may not have ended
        for one in ours:
            block_copy.load(one.device, one.dtype, one.shape[2])
        self._places.copy_(self._page_locked, non_blocking=True)
        self._stream.synchronize()

    def read(self, piece: LayerPiece) -> int:
        layer, layers, sources, targets = piece
        beyond = max(sources) >= self._their_blocks or max(targets) >= self._our_blocks
        if beyond or min(sources) < 0 or min(targets) < 0:
            raise OSError("a transfer names KV blocks that do not exist")
        blocks = len(sources)
        if self._used + 2 * blocks > len(self._numbers):
            self.settle()
        torch.cuda.set_device(self._device)
        first, end = self._used, self._used + 2 * blocks
        self._numbers[first : first + blocks] = sources
        self._numbers[first + blocks : end] = targets
        places = self._places[first:end]
        places.copy_(self._page_locked[first:end], non_blocking=True)
        self._copy_blocks(self._theirs, self._ours, places, blocks, layer, layers)
        self._used = _aligned_words(end)
        return blocks * layers * self._block_bytes

    def settle(self) -> None:
        self._stream.synchronize()
        self._used = 0


def words_by_rank(cache: SentCache) -> list[list[torch.Tensor]]:
    """Keys and values of every rank, each as [layers, blocks, numbers of a block]; those that other processes of
    this host hold on GPUs are opened."""
    if not isinstance(cache, RankCaches):
        return [_words_of(cache)]
    own = cache.ranks[0]
    return [*map(_words_of, cache.ranks), *(_opened(one, own, own.blocks) for one in cache.handles[1:])]


def _words_of(cache: KVCache) -> list[torch.Tensor]:
    return [_word_tensor(one) for one in (cache.key_storage, cache.value_storage) if one.numel()]


def _aligned_words(words: int) -> int:
    """The number of words, rounded up to addresses that the copy was compiled for."""
    return -(-words // 64) * 64


def _word_tensor(storage: torch.Tensor) -> torch.Tensor:
    """[layers, blocks, numbers of a block], as the widest numbers that fit: they are only copied."""
    layers, blocks = storage.shape[:2]
    wide = storage.nbytes // (layers * blocks) % 8 == 0
    return storage.view(torch.uint8).view(layers, blocks, -1).view(torch.int64 if wide else torch.uint8)
