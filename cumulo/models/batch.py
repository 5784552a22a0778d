"""ForwardBatch and KVCache: what a runner hands a model for one step, and Model: what it is given back. Tokens of
all requests lie flat.

There is no batch dimension: a step is T tokens belonging to S sequences, `query_starts` says which.
A sequence's new tokens attend to its cached context (found through its block table) and to each other.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cumulo.base.machine import memory_file
from cumulo.kernels.cpu.paged_attention import bytes_of, encode, stored_columns
from cumulo.kernels.low_rank import AdapterRows
from cumulo.spec.model import ModelSpec


@dataclass(slots=True)
class ForwardBatch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset where each token's K and V are written
    query_starts: Tensor  # [S + 1] int32: tokens of sequence s are [query_starts[s], query_starts[s + 1])
    context_lengths: Tensor  # [S] int32: KV length of each sequence, this step's tokens included
    block_tables: Tensor  # [S, >= max blocks in use] int32; entries past a sequence's blocks are ignored
    logit_rows: Tensor  # [R] int64: token rows whose hidden state is wanted
    shares: tuple[int, ...] = ()  # tokens of the step on each data-parallel rank, where there are several
    adapters: AdapterRows | None = None  # which rows have an adapter; None: none has


class KVCache:
    """Keys and values of every layer in fixed-size blocks.

    `keys[layer]` is [blocks, kv_heads, block_size, key_dim] so that one block of one head is contiguous; in int8 it
    has a few bytes more, for a scale (kernels/cpu/paged_attention.py). With latent attention `values[layer]` is a
    view of the first kv_rank columns of the key.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shared: bool = False,
        files: Sequence[int] = (),
    ) -> None:
        """`shared`: in memory that other processes of this host can map (`descriptors`). `files`: descriptors of
        a cache of the same sizes that another process has made so; this is the same memory."""
        self.descriptors: list[int] = []  # of the files behind the storages, keys first
        self._files = list(files)
        # Told of each layer whose keys and values of the step are written; the model calls it.
        self.on_layer: Callable[[int], None] | None = None
        self.spec, self.blocks, self.block_size = spec, blocks, block_size
        heads = spec.kv_cache_heads
        make = self._shared_zeros if shared or files else lazy_zeros
        keys, values = (stored_columns(dim, dtype) for dim in (spec.kv_key_dim, spec.kv_value_dim))
        self.key_storage = make((spec.layers, blocks, heads, block_size, keys), dtype, device)
        self.value_storage = make((spec.layers, blocks, heads, block_size, values), dtype, device)
        self.keys = list(self.key_storage.unbind(0))
        if spec.mla:
            self.values = [key[..., : spec.mla.kv_rank] for key in self.keys]
        else:
            self.values = list(self.value_storage.unbind(0))

    def _shared_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """In a file without a name: it is gone when the last process that maps it is."""
        size = math.prod(shape) * dtype.itemsize
        if torch.device(device).type != "cpu" or size == 0:
            return lazy_zeros(shape, dtype, device)
        if self._files:
            self.descriptors.append(self._files.pop(0))
        else:
            self.descriptors.append(memory_file("cumulo-kv", size))
        return torch.frombuffer(mmap.mmap(self.descriptors[-1], size), dtype=dtype).view(shape)

    @property
    def nbytes(self) -> int:
        return self.key_storage.nbytes + self.value_storage.nbytes

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        """Store key [T, heads, key_dim] (and value) at flat slots."""
        block, offset = slots // self.block_size, slots % self.block_size
        dtype = self.key_storage.dtype
        bytes_of(self.keys[layer])[block, :, offset] = bytes_of(encode(key, dtype))
        if value is not None:
            bytes_of(self.values[layer])[block, :, offset] = bytes_of(encode(value, dtype))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy-on-write: block `source` to block `target` in every layer, pairs in order."""
        for source, target in pairs:
            self.key_storage[:, target] = self.key_storage[:, source]
            self.value_storage[:, target] = self.value_storage[:, source]


class RunnableModel(Protocol):
    """What a runner plays: any decoder, by whatever kernels."""

    @property
    def weight_bytes(self) -> int: ...

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute a step, write its keys and values; the normed hidden states [R, hidden] of `batch.logit_rows`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary]."""
        ...


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros that take memory only where they are written: torch.zeros touches every page, and a cache of
    several GiB would cost seconds at start and all of its memory for a short chat."""
    elements = math.prod(shape)
    if torch.device(device).type != "cpu" or elements == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype).view(shape)
