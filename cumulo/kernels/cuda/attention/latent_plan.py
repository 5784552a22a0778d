"""LatentPlan: what all latent-attention layers of a step share, as AttentionPlan is for grouped heads. The GPU
decoder makes one for each step shape; decodes go to `mla_decode`, chunks to `mla_chunk`, both write one output.

Neither `prepare` nor `attend` waits for the device or depends on anything but shapes, so both can be captured.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.errors import CumuloError
from cumulo.kernels.cuda.attention.mla_chunk import MlaChunkConfig, chunk_tiles, launch_mla_chunks
from cumulo.kernels.cuda.attention.mla_decode import (
    MlaConfig,
    default_config,
    launch_mla_decodes,
    most_items,
)
from cumulo.kernels.cuda.attention.work_list import ITEM_FIELDS, build_work_list


def reference(
    projected: Tensor, compressed: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, rope: int,
    eps: float, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotated query parts [T, heads, rope] and whole keys [T, rank + rope]."""

    def turned(x: Tensor) -> Tensor:
        c, s = cos[positions][:, None].to(x.dtype), sin[positions][:, None].to(x.dtype)
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        pair = (first * c - second * s, second * c + first * s)
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    latent = F.rms_norm(compressed[:, :-rope], (len(norm),), norm, eps)
    key = torch.cat((latent, turned(compressed[:, None, -rope:])[:, 0]), -1)
    return turned(projected[..., -rope:]), key


@triton.jit
def _rotated(base, low, high, c, s):
    a = tl.load(base + low).to(tl.float32)
    b = tl.load(base + high).to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit
def _kernel(projected, compressed, norm, cos, sin, positions, slots, query, keys, projected_stride, head_dim,
            compressed_stride, query_stride, block_stride, eps, block_size, HEADS: tl.constexpr,
            RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:  # a token that only fills up a captured shape has none
        head = tl.program_id(1)
        half = tl.arange(0, ROPE // 2)
        if INTERLEAVED:
            low, high = 2 * half, 2 * half + 1
        else:
            low, high = half, half + ROPE // 2
        position = tl.load(positions + token).to(tl.int64)
        c = tl.load(cos + position * (ROPE // 2) + half).to(tl.float32)
        s = tl.load(sin + position * (ROPE // 2) + half).to(tl.float32)
        if head < HEADS:
            base = projected + token * projected_stride + (head + 1) * head_dim - ROPE
            a, b = _rotated(base, low, high, c, s)
            target = query + token * query_stride + head * (RANK + ROPE) + RANK
            tl.store(target + low, a.to(query.dtype.element_ty))
            tl.store(target + high, b.to(query.dtype.element_ty))
        else:  # the key all heads share
            source = compressed + token * compressed_stride
            target = keys + (slot // block_size) * block_stride + (slot % block_size) * (RANK + ROPE)
            column = tl.arange(0, RANK)
            x = tl.load(source + column).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * tl.load(norm + column).to(tl.float32)
            tl.store(target + column, x.to(keys.dtype.element_ty))
            a, b = _rotated(source + RANK, low, high, c, s)
            tl.store(target + RANK + low, a.to(keys.dtype.element_ty))
            tl.store(target + RANK + high, b.to(keys.dtype.element_ty))


def mla_cache(
    projected: Tensor, compressed: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    slots: Tensor, query: Tensor, keys: Tensor, eps: float, interleaved: bool = False,
) -> None:  # fmt: skip
    """projected [T, H, nope + rope]: its rotated last columns go to those of query [T, H, rank + rope].
    compressed [T, rank + rope]: normed and rotated, it goes to keys [blocks, 1, block_size, rank + rope] at flat
    `slots` (-1: nowhere). cos, sin: [positions, rope / 2]. Queries and keys are contiguous.
    """
    tokens, heads, head_dim = projected.shape
    rope, rank = 2 * cos.shape[1], len(norm)
    if tokens == 0:
        return
    _kernel[(tokens, heads + 1)](
        projected, compressed, norm, cos, sin, positions, slots, query, keys, projected.stride(0), head_dim,
        compressed.stride(0), query.stride(0), keys.stride(0), eps, keys.shape[2], HEADS=heads, RANK=rank,
        ROPE=rope, INTERLEAVED=interleaved, num_warps=1,
    )  # fmt: skip


class LatentPlan:
    """For steps of at most `tokens` tokens of `sequences` sequences with `max_blocks` blocks each.

    With `invariant` a request's bits depend neither on its company nor on how its context was cut into chunks.
    Plans that never run at the same time may share the memory of partial results.
    """

    def __init__(
        self,
        tokens: int,
        sequences: int,
        heads: int,
        rank: int,
        rope: int,
        block_size: int,
        max_blocks: int,
        decode_only: bool,
        invariant: bool,
        device: torch.device | str,
        *,
        windows: Sequence[int | None] = (None,),
        share_scratch_with: "LatentPlan | None" = None,
        decode: MlaConfig | None = None,
        chunk: MlaChunkConfig | None = None,
    ) -> None:
        if rank & (rank - 1) or rope & (rope - 1) or min(rank, rope) < 16:
            raise CumuloError(
                f"latent attention of rank {rank} with {rope} rotated columns has no kernel: "
                "both must be powers of two from 16 up"
            )
        device = torch.device(device)
        self.windows, self.block_size = tuple(dict.fromkeys(windows)), block_size
        self.chunk_from = 1 if invariant else 2  # new tokens from which a sequence is a chunk
        self.decode = decode or default_config(heads)
        slots = 0 if invariant else most_items(sequences, heads, max_blocks * block_size, self.decode, device)
        self.items = [
            torch.zeros((slots, ITEM_FIELDS), dtype=torch.int32, device=device)
            for _ in (self.windows if slots else ())
        ]
        self.partial: Tensor
        self.partial_lse: Tensor
        other = share_scratch_with
        if other is not None and other.partial_lse.numel() >= slots * heads:
            self.partial, self.partial_lse = other.partial, other.partial_lse
        else:
            self.partial = torch.empty(slots * heads * rank, dtype=torch.float32, device=device)
            self.partial_lse = torch.empty(slots * heads, dtype=torch.float32, device=device)
        self.chunk = chunk or MlaChunkConfig()
        self.query_tile = self.chunk.query_tile(heads)
        self.tiles: Tensor | None = None
        if invariant or not decode_only:
            self.tiles = chunk_tiles(tokens, sequences, self.chunk_from, heads, self.chunk, device)
        self.tables: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Device memory it keeps, shared scratch included."""
        chunks = self.tiles.nbytes if self.tiles is not None else 0
        return chunks + sum(tensor.nbytes for tensor in (*self.items, self.partial, self.partial_lse))

    def prepare(self, query_starts: Tensor, context_lengths: Tensor, block_tables: Tensor) -> None:
        """Build this step's work lists; the rules are AttentionPlan.prepare's."""
        self.tables = block_tables
        for index, window in enumerate(self.windows):
            items = self.items[index] if self.items else None
            tiles = self.tiles if index == 0 else None  # chunks look at the window themselves
            if items is not None or tiles is not None:
                build_work_list(
                    query_starts, context_lengths, block_tables, items, tiles, block_size=self.block_size,
                    key_tile=self.decode.key_tile, query_tile=self.query_tile, min_tiles=self.decode.min_tiles,
                    window=window, invariant=False, chunk_from=self.chunk_from,
                )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        out: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """One layer: query [T, H, rank + rope] over keys [blocks, 1, block_size, rank + rope] into out [T, H,
        rank].
        """
        assert self.tables is not None, "prepare the plan first"
        if window not in self.windows:
            raise CumuloError(
                f"latent attention was planned for windows {self.windows} but a layer asks for {window}: "
                "name every window of the model in LatentPlan(windows=...)"
            )
        if self.items:
            items = self.items[self.windows.index(window)]
            launch_mla_decodes(
                query,
                keys,
                out,
                self.partial,
                self.partial_lse,
                items,
                self.tables,
                scale,
                window,
                self.decode,
            )
        if self.tiles is not None:
            launch_mla_chunks(query, keys, out, self.tiles, self.tables, scale, window, self.chunk)
        return out
