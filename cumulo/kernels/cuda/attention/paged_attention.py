"""Paged attention on the GPU: decodes and prompt chunks of one step over the block tables. The GPU decoder
calls it.

Must move the keys and values of every sequence once, 2 * kv_heads * D numbers per position, and compute 4 *
heads * D FLOPs for every pair of a query and a position it sees. Sequences with one new token are bound by the
first and go to `paged_attention_decode`, longer ones by the second and go to `paged_attention_chunk`; a step
with both has two launches that write into one output.

An `AttentionPlan` belongs to one step shape (the bucket a CUDA graph is captured for). `prepare` builds the
step's work list on the device, `attend` runs one layer; neither waits for the device nor depends on anything
but shapes.

What holds about bits. Runs repeat bit for bit. With `invariant`, a request's numbers do not depend on what else
is in the batch. With `chunking_invariant` they also do not depend on how its context was cut into chunks and
decodes, at the price of long contexts not being split over programs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulo.errors import CumuloError
from cumulo.kernels.cuda.attention.config import chunk_config, decode_config
from cumulo.kernels.cuda.attention.paged_attention_chunk import ChunkConfig, launch_chunks
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig, launch_decode
from cumulo.kernels.cuda.attention.work_list import (
    INVARIANT_ITEMS,
    INVARIANT_TILES,
    ITEM_FIELDS,
    TILE_FIELDS,
    build_work_list,
)


class AttentionPlan:
    """Everything about attention that all layers of a step share. Build with `attention_plan`."""

    def __init__(
        self,
        *,
        tokens: int,
        sequences: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        max_blocks: int,
        decode_only: bool,
        invariant: bool,
        device: torch.device,
        chunking_invariant: bool,
        windows: Sequence[int | None],
        kv_dtype: torch.dtype,
        share_scratch_with: "AttentionPlan | None",
        decode: DecodeConfig | None,
        chunk: ChunkConfig | None,
    ) -> None:
        group = heads // kv_heads
        self.invariant, self.windows = invariant or chunking_invariant, tuple(dict.fromkeys(windows))
        multiprocessors = _multiprocessors(device)
        self.decode = decode or decode_config(
            group, head_dim, kv_dtype, sequences * kv_heads, multiprocessors, self.invariant
        )
        self.chunk = chunk or chunk_config(group, head_dim, kv_dtype, block_size, self.invariant)
        self.block_size = block_size
        self.chunk_from = 1 if chunking_invariant else 2  # new tokens from which a sequence is a chunk
        self.query_tile = self.chunk.query_tile(group)

        def records(count: int, fields: int) -> list[Tensor]:
            return [torch.zeros((count, fields), dtype=torch.int32, device=device) for _ in self.windows]

        self.items: list[Tensor] | None = None
        if not chunking_invariant:
            self.items = records(
                self._most_items(sequences, kv_heads, max_blocks * block_size, multiprocessors), ITEM_FIELDS
            )
        self.tiles: Tensor | None = None
        if chunking_invariant or not decode_only:
            chunks = min(sequences, tokens // self.chunk_from)
            self.tiles = torch.zeros(
                (tokens // self.query_tile + chunks, TILE_FIELDS), dtype=torch.int32, device=device
            )
        self._allocate(share_scratch_with, sequences, heads, kv_heads, head_dim, device)
        self.tables: Tensor | None = None

    def _most_items(self, sequences: int, kv_heads: int, longest: int, multiprocessors: int) -> int:
        most_tiles = -(-longest // self.decode.key_tile) + 1
        if self.invariant:
            return sequences * min(INVARIANT_ITEMS, -(-most_tiles // INVARIANT_TILES))
        wanted = -(-self.decode.items_per_sm * multiprocessors // kv_heads)
        # Half as many again as sequences: enough for the longer ones of a mixed batch to be split.
        return min(max(wanted, sequences + sequences // 2), sequences * most_tiles)

    def _allocate(
        self,
        other: "AttentionPlan | None",
        sequences: int,
        heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device,
    ) -> None:
        """Partial results and arrival counters; plans that never run at the same time may share them."""
        self.partial: Tensor
        self.partial_lse: Tensor
        self.arrivals: Tensor
        slots = len(self.items[0]) if self.items else 0
        sizes = slots * heads * dim, slots * heads, sequences * kv_heads
        if other is not None and all(
            have.numel() >= size and have.device == device
            for have, size in zip((other.partial, other.partial_lse, other.arrivals), sizes, strict=True)
        ):
            self.partial, self.partial_lse, self.arrivals = other.partial, other.partial_lse, other.arrivals
            return
        self.partial = torch.empty(sizes[0], dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(sizes[1], dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(sizes[2], dtype=torch.int32, device=device)

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
            tiles = self.tiles if index == 0 else None  # the same for every window
            if self.items is None and tiles is None:
                continue
            build_work_list(
                query_starts,
                context_lengths,
                block_tables,
                self.items[index] if self.items is not None else None,
                tiles,
                block_size=self.block_size,
                key_tile=self.decode.key_tile,
                query_tile=self.query_tile,
                min_tiles=self.decode.min_tiles,
                window=window,
                invariant=self.invariant,
                chunk_from=self.chunk_from,
            )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """One layer: query [T, H, D] over keys and values [blocks, KVH, block_size, D] into out [T, H, D].

        `query` and `out` may be strided views with contiguous heads' rows.
        """
        assert self.tables is not None, "prepare the plan first"
        if self.items is not None:
            if window not in self.windows:
                raise CumuloError(
                    f"attention was planned for windows {self.windows} but a layer asks for {window}: "
                    "name every window of the model in attention_plan(windows=...)"
                )
            launch_decode(
                query,
                keys,
                values,
                out,
                self.partial,
                self.partial_lse,
                self.arrivals,
                self.items[self.windows.index(window)],
                self.tables,
                scale,
                window,
                self.decode,
            )
        if self.tiles is not None:
            launch_chunks(
                query,
                keys,
                values,
                out,
                self.tiles,
                self.tables,
                scale,
                window,
                self.chunk,
            )
        return out


def attention_plan(
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
    chunking_invariant: bool = False,
    windows: Sequence[int | None] = (None,),
    kv_dtype: torch.dtype = torch.bfloat16,
    share_scratch_with: AttentionPlan | None = None,
    decode: DecodeConfig | None = None,
    chunk: ChunkConfig | None = None,
) -> AttentionPlan:
    """A plan for steps of at most `tokens` tokens of `sequences` sequences with `max_blocks` blocks each.

    `windows` lists every `window` that layers will ask for. `decode` and `chunk` override the tuned
    configurations.
    """
    if heads % kv_heads or heads // kv_heads > 64:
        raise CumuloError(
            f"{heads} query heads cannot share {kv_heads} kv heads: "
            "each needs equally many, and the kernels take up to 64"
        )
    if block_size < 16 or block_size & (block_size - 1):
        raise CumuloError(
            f"a KV block of {block_size} tokens has no kernel: choose a power of two from 16 up"
        )
    return AttentionPlan(
        tokens=tokens,
        sequences=sequences,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        max_blocks=max_blocks,
        decode_only=decode_only,
        invariant=invariant,
        device=torch.empty(0, device=device).device,  # "cuda" becomes "cuda:0"
        chunking_invariant=chunking_invariant,
        windows=windows,
        kv_dtype=kv_dtype,
        share_scratch_with=share_scratch_with,
        decode=decode,
        chunk=chunk,
    )


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The same in torch, one sequence after the other: out [T, H, Dv]."""
    tokens, heads, _ = query.shape
    block_size, group = keys.shape[2], heads // keys.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros((tokens, heads, values.shape[-1]))
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    for sequence, context in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        count = rows.stop - rows.start
        if not count or not context:
            continue
        table = block_tables[sequence, : -(-context // block_size)].long()

        def gathered(pages: Tensor, table: Tensor = table, context: int = context) -> Tensor:
            whole = pages.view(torch.uint8)[table].view(pages.dtype) if pages.itemsize == 1 else pages[table]
            picked = whole.transpose(0, 1).flatten(1, 2)[:, :context]  # [KVH, context, D]
            return picked.to(query.dtype).repeat_interleave(group, dim=0)

        scores = (query[rows].transpose(0, 1) @ gathered(keys).transpose(1, 2)).to(wide) * scale
        position = torch.arange(context, device=query.device)
        own = context - count + torch.arange(count, device=query.device)
        visible = position <= own[:, None]
        if window is not None:
            visible &= position > own[:, None] - window
        scores = scores.masked_fill(~visible, float("-inf"))
        out[rows] = (scores.softmax(-1).to(query.dtype) @ gathered(values)).transpose(0, 1)
    return out
