"""Paged attention on the GPU: decodes and prompt chunks of one step over the block tables. The GPU decoder
calls it.

Must move the keys and values of every sequence once, 2 * kv_heads * D numbers per position, and compute 4 *
heads * D FLOPs for every pair of a query and a position it sees. Sequences with one new token are bound by the
first and go to `paged_attention_decode`, longer ones by the second and go to `paged_attention_chunk`; a step
with both has two launches that write into one output. Latent attention has kernels of its own for both.

An `AttentionPlan` belongs to one step shape (the bucket a CUDA graph is captured for). `prepare` builds the
step's work list on the device, `attend` runs one layer; neither waits for the device nor depends on anything
but shapes.

Runs repeat bit for bit. With `invariant`, a request's numbers depend neither on what else is in the batch nor on
how its context was cut into chunks and decodes, at the price of long contexts not being split over programs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulo.errors import CumuloError
from cumulo.kernels.cuda.attention.config import chunk_config, decode_config
from cumulo.kernels.cuda.attention.mla_chunk import MlaChunkConfig, launch_mla_chunks
from cumulo.kernels.cuda.attention.mla_decode import MlaConfig, default_config, launch_mla_decodes
from cumulo.kernels.cuda.attention.paged_attention_chunk import ChunkConfig, launch_chunks
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig, launch_decode
from cumulo.kernels.cuda.attention.work_list import FIELDS, build_work_list


class AttentionPlan:
    """Everything about attention that all layers of a step share, which has at most `tokens` tokens of `sequences`
    sequences with `max_blocks` blocks each."""

    def __init__(
        self,
        tokens: int,
        sequences: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        max_blocks: int,
        decode_only: bool,
        invariant: bool,
        device: torch.device | str,
        *,
        rank: int = 0,
        windows: Sequence[int | None] = (None,),
        kv_dtype: torch.dtype = torch.bfloat16,
        share_scratch_with: "AttentionPlan | None" = None,
        decode: DecodeConfig | MlaConfig | None = None,
        chunk: ChunkConfig | MlaChunkConfig | None = None,
    ) -> None:
        """`rank`: of latent attention, whose values are the keys' first columns; otherwise 0. `windows` lists every
        `window` that layers will ask for. Plans that never run at the same time may share the memory of partial
        results. `decode` and `chunk` override the tuned configurations."""
        if block_size < 16 or block_size & (block_size - 1):
            raise CumuloError(
                f"a KV block of {block_size} tokens has no kernel: choose a power of two from 16 up"
            )
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        group, multiprocessors = heads // kv_heads, 1
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.rank, self.windows, self.block_size = rank, tuple(dict.fromkeys(windows)), block_size
        self.decode: DecodeConfig | MlaConfig
        self.chunk: ChunkConfig | MlaChunkConfig
        if rank:
            self.decode, self.chunk = decode or default_config(heads), chunk or MlaChunkConfig()
        else:
            self.decode = decode or decode_config(
                group, head_dim, kv_dtype, sequences * kv_heads, multiprocessors
            )
            self.chunk = chunk or chunk_config(group, head_dim, kv_dtype, block_size, invariant)
        self.chunk_from = 1 if invariant else 2  # new tokens from which a sequence is a chunk
        self.query_tile = self.chunk.query_tile(group)

        def records(count: int) -> Tensor:
            return torch.zeros((count, FIELDS), dtype=torch.int32, device=device)

        self.items: list[Tensor] | None = None
        if not invariant:
            most_tiles = -(-max_blocks * block_size // self.decode.key_tile) + 1
            programs = -(-heads // self.decode.rows) if isinstance(self.decode, MlaConfig) else kv_heads
            wanted = -(-self.decode.items_per_sm * multiprocessors // programs)
            # Half as many again as sequences: enough for the longer ones of a mixed batch to be split.
            most = min(max(wanted, sequences + sequences // 2), sequences * most_tiles)
            self.items = [records(most) for _ in self.windows]
        self.tiles: Tensor | None = None
        if invariant or not decode_only:
            chunks = min(sequences, tokens // self.chunk_from)
            self.tiles = records(tokens // self.query_tile + chunks)
        # Partial results, their log-sums, and how many of a sequence have arrived.
        slots, other = len(self.items[0]) if self.items else 0, share_scratch_with
        sizes = slots * heads * (rank or head_dim), slots * heads, sequences * kv_heads
        self.partial: Tensor
        self.partial_lse: Tensor
        self.arrivals: Tensor
        if other is not None and all(
            have.numel() >= size and have.device == device
            for have, size in zip((other.partial, other.partial_lse, other.arrivals), sizes, strict=True)
        ):
            self.partial, self.partial_lse, self.arrivals = other.partial, other.partial_lse, other.arrivals
        else:
            self.partial, self.partial_lse = (torch.empty(size, device=device) for size in sizes[:2])
            self.arrivals = torch.zeros(sizes[2], dtype=torch.int32, device=device)
        self.tables: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Device memory it keeps, shared scratch included."""
        owned = [*(self.items or []), self.tiles, self.partial, self.partial_lse, self.arrivals]
        return sum(int(tensor.nbytes) for tensor in owned if tensor is not None)

    def prepare(self, query_starts: Tensor, context_lengths: Tensor, block_tables: Tensor) -> None:
        """Build this step's work list; once per step, all tensors int32 on the device and at fixed addresses.

        Padding sequences have context 0 and the last query start; they cost nothing and write nothing.
        """
        self.tables = block_tables
        for index, window in enumerate(self.windows):
            items = None if self.items is None else self.items[index]
            tiles = self.tiles if index == 0 else None  # chunks look at the window themselves
            if items is not None or tiles is not None:
                build_work_list(
                    query_starts, context_lengths, block_tables, items, tiles, block_size=self.block_size,
                    key_tile=self.decode.key_tile, query_tile=self.query_tile, min_tiles=self.decode.min_tiles,
                    window=window, chunk_from=self.chunk_from,
                )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """One layer: query [T, H, D] over keys and values [blocks, KVH, block_size, D] into out [T, H, D]. Latent
        attention reads keys alone, and out is [T, H, rank].

        `query` and `out` may be strided views with contiguous heads' rows.
        """
        assert self.tables is not None, "prepare the plan first"
        if window not in self.windows:
            raise CumuloError(
                f"attention was planned for windows {self.windows} but a layer asks for {window}: "
                "name every window of the model in AttentionPlan(windows=...)"
            )
        partial, tables = (self.partial, self.partial_lse), self.tables
        if self.items is not None:
            items = self.items[self.windows.index(window)]
            if isinstance(self.decode, MlaConfig):
                launch_mla_decodes(query, keys, out, *partial, items, tables, scale, window, self.decode)
            else:
                launch_decode(
                    query,
                    keys,
                    values,
                    out,
                    *partial,
                    self.arrivals,
                    items,
                    tables,
                    scale,
                    window,
                    self.decode,
                )
        if self.tiles is not None:
            if isinstance(self.chunk, MlaChunkConfig):
                launch_mla_chunks(query, keys, out, self.tiles, tables, scale, window, self.chunk)
            else:
                launch_chunks(query, keys, values, out, self.tiles, tables, scale, window, self.chunk)
        return out
