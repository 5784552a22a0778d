"""How KV blocks get from one engine's cache into another's on one host: shared memory and CUDA IPC (between hosts:
transfer_tcp.py). The sender exports its cache, the receiver opens it and reads.

A way is two small classes, one for each end. Its export says in a greeting how the cache is reached; its source
reads runs of blocks of one layer straight into the receiver's own cache, and returns when they are there. Libraries
that read remote memory (NIXL, UCX) fit the same two.
"""

import json
import mmap
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cumulo.engine.decide.transfer.orders import BlockRuns
from cumulo.engine.play.transfer_wire import RankCaches, SentCache
from cumulo.errors import CumuloError
from cumulo.models.batch import KVCache


class BlockSource(Protocol):
    """The receiver's side: another engine's cache."""

    turn_bytes: int  # read before looking whether a transfer was given up
    turn_layers: int  # read at once

    def read(self, layer: int, runs: BlockRuns, layers: int = 1) -> int:
        """Copy blocks of some layers into this engine's cache; returns bytes. Raises OSError when the other end is
        gone."""
        ...

    def settle(self) -> None:
        """Return when everything that was read is there."""
        ...

    def close(self) -> None: ...


def byte_blocks(cache: SentCache) -> list[NDArray[np.uint8]]:
    """Keys and values as [layers, blocks, bytes of a block]; without values, where they lie in the keys. Of several
    ranks, one's after the other's."""
    layers, blocks = cache.spec.layers, cache.blocks
    ranks = cache.ranks if isinstance(cache, RankCaches) else [cache]
    storages = [one for rank in ranks for one in (rank.key_storage, rank.value_storage) if one.numel()]
    return [one.view(torch.uint8).view(layers, blocks, -1).numpy() for one in storages]


def copy_runs(source: NDArray[np.uint8], target: NDArray[np.uint8], runs: BlockRuns) -> int:
    """Between arrays of [blocks, bytes of a block]; returns bytes."""
    if runs.source_end > len(source) or runs.target_end > len(target) or min(runs.sources + runs.targets) < 0:
        raise OSError("a transfer names KV blocks that do not exist")
    for first, to, blocks in runs.runs:
        target[to : to + blocks] = source[first : first + blocks]
    return runs.blocks * int(source.shape[1])


# -- shared memory ---------------------------------------------------------------------------------------------
class SharedExport:
    name = "shared"

    def __init__(self, cache: SentCache) -> None:
        if not cache.descriptors:
            raise CumuloError("this engine's KV cache is not in shared memory: start it with a role")
        self._cache, self.descriptors = cache, cache.descriptors

    def reach(self) -> dict[str, Any]:
        return {"blocks": self._cache.blocks}


class SharedSource:
    """The sender's cache, mapped: it stays readable even if its process dies, so that no read can crash."""

    turn_bytes, turn_layers = 16 << 20, 1

    def __init__(self, cache: SentCache, reach: dict[str, Any], descriptors: list[int]) -> None:
        self._ours = byte_blocks(cache)
        self._theirs = []
        for ours, descriptor in zip(self._ours, descriptors, strict=True):
            shape = (ours.shape[0], int(reach["blocks"]), ours.shape[2])
            mapped = mmap.mmap(descriptor, shape[0] * shape[1] * shape[2], prot=mmap.PROT_READ)
            self._theirs.append(np.frombuffer(mapped, dtype=np.uint8).reshape(shape))

    def read(self, layer: int, runs: BlockRuns, layers: int = 1) -> int:
        copied = 0
        for ours, theirs in zip(self._ours, self._theirs, strict=True):
            for one in range(layer, layer + layers):
                copied += copy_runs(theirs[one], ours[one], runs)
        return copied

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._theirs = []


# -- CUDA IPC --------------------------------------------------------------------------------------------------
class CudaExport:
    """The device memory of the cache, which another process of this host opens by a handle."""

    name = "cuda"

    def __init__(self, cache: SentCache) -> None:
        self.descriptors: list[int] = []
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

    def read(self, layer: int, runs: BlockRuns, layers: int = 1) -> int:
        """Launched; it is there when it is settled."""
        return sum(rank.read(layer, runs, layers) for rank in self._ranks)

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

    def read(self, layer: int, runs: BlockRuns, layers: int) -> int:
        beyond = runs.source_end > self._their_blocks or runs.target_end > self._our_blocks
        if beyond or min(runs.sources) < 0 or min(runs.targets) < 0:
            raise OSError("a transfer names KV blocks that do not exist")
        blocks = runs.blocks
        if self._used + 2 * blocks > len(self._numbers):
            self.settle()
        torch.cuda.set_device(self._device)
        first, end = self._used, self._used + 2 * blocks
        self._numbers[first : first + blocks] = runs.sources
        self._numbers[first + blocks : end] = runs.targets
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
