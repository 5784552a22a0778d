"""Attention of a step's tokens over the paged KV cache. Called by the decoder's attention layers.

Must move: the keys and values of every sequence once per step, kv_heads * (D + Dv) numbers per position; and
compute heads * (D + Dv) multiply-adds for every pair of a query and a position it sees. Decoding is bound by the
first, prefill by the second.

`paged_attention` uses the C++ kernel (native/attention.h), which reads the blocks in place, for float32 on a CPU,
with keys and values in float32 or 8 bits; `reference` does the same for any dtype and device with torch's operators
and gathers each sequence's own blocks.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cpu.library import ATTEND, NativeLibrary, OpStruct, StepStruct, native

KV_FORMATS = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}  # KvFormat in kv_codes.h
_SCALE_BYTES = 4
_LARGEST = 448.0


def stored_columns(columns: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that hold `columns` numbers of one head and position."""
    return columns + _SCALE_BYTES if dtype == torch.int8 and columns else columns


def columns_of(stored: Tensor) -> int:
    """Numbers of one head and position in a cache."""
    return stored.shape[-1] - (_SCALE_BYTES if stored.dtype == torch.int8 else 0)


def bytes_of(stored: Tensor) -> Tensor:
    """The same numbers as torch can gather and scatter them: it does neither with 8-bit floats."""
    return stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., columns] -> [..., stored columns] of `dtype`."""
    if dtype == torch.float8_e4m3fn:
        return values.clamp(-_LARGEST, _LARGEST).to(dtype)
    if dtype != torch.int8:
        return values.to(dtype)
    scale = values.abs().amax(dim=-1, keepdim=True).float() / 127
    codes = torch.where(scale > 0, values.float() / scale, 0.0).round().to(torch.int8)
    return torch.cat((codes, scale.contiguous().view(torch.int8)), dim=-1)


def decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers again, in `dtype`."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-_SCALE_BYTES].float() * scale).to(dtype)


# Scores, or gathered keys and values, that the reference makes at once: a long chunk over a long context, or many
# decodes, are worked on in pieces.
_AT_ONCE = 1 << 26
SMALL_WORK = 30_000  # multiply-adds below which a second thread costs more than it brings


class PagedBatch(Protocol):
    """What attention needs to know of a step: which tokens and which blocks belong to which sequence."""

    query_starts: Tensor  # [S + 1] int32
    context_lengths: Tensor  # [S] int32, this step's tokens included
    block_tables: Tensor  # [S, blocks] int32; entries past a sequence's blocks are ignored


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> Tensor:
    """query [T, H, D] over keys [blocks, KVH, block_size, D] and values [..., Dv] -> [T, H, Dv].

    A token sees the positions of its sequence up to its own, with `window` only the last so many of them. The
    step's own keys and values must already be in the cache.
    """
    library = native() if query.dtype == torch.float32 and query.device.type == "cpu" else None
    if library is None or not _suits_kernel(library, query, keys, values):
        return reference(query, keys, values, batch, scale, window)
    return _kernel(library, query, keys, values, batch, scale, window)


def _suits_kernel(library: NativeLibrary, query: Tensor, keys: Tensor, values: Tensor) -> bool:
    return (
        keys.dtype == values.dtype
        and keys.dtype in KV_FORMATS
        and query.shape[-1] % library.lanes == 0
        and columns_of(values) % library.lanes == 0
        and keys.stride(-1) == values.stride(-1) == 1
    )


def _kernel(
    library: NativeLibrary,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
) -> Tensor:
    tokens, heads, key_dim = query.shape
    query = query.contiguous()
    starts, lengths, tables = _as_int32(batch.query_starts, batch.context_lengths, batch.block_tables)
    value_dim = columns_of(values)
    out = torch.empty((tokens, heads, value_dim), dtype=torch.float32)
    if tokens == 0:
        return out
    op = OpStruct(
        kind=ATTEND,
        columns=heads * key_dim,
        out_columns=heads * value_dim,
        x=query.data_ptr(),
        out=out.data_ptr(),
        **attention_fields(keys, values, heads, scale, window),
    )
    step = StepStruct(
        tokens=tokens,
        sequences=len(lengths),
        table_stride=tables.stride(0),
        query_starts=starts.data_ptr(),
        context_lengths=lengths.data_ptr(),
        block_tables=tables.data_ptr(),
        blocks=keys.shape[0],
        block_size=keys.shape[2],
    )
    # An upper bound is enough to decide on threads: the longest context for every token.
    work = tokens * heads * (key_dim + value_dim) * tables.shape[1] * keys.shape[2]
    library.play([op], step, threads=1 if work < SMALL_WORK else None)
    return out


def attention_fields(
    keys: Tensor, values: Tensor, heads: int, scale: float, window: int | None
) -> dict[str, int | float]:
    """The fields of an operation that describe one layer's cache; the fused decoder fills them too."""
    return {
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "key_block": keys.stride(0),
        "key_head": keys.stride(1),
        "key_position": keys.stride(2),
        "value_block": values.stride(0),
        "value_head": values.stride(1),
        "value_position": values.stride(2),
        "heads": heads,
        "kv_heads": keys.shape[1],
        "head_dim": columns_of(keys),
        "value_dim": columns_of(values),
        "kv_format": KV_FORMATS[keys.dtype],
        "block_size": keys.shape[2],
        "window": window or 0,
        "scale": scale,
    }


def _as_int32(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to("cpu", torch.int32).contiguous() for tensor in tensors]


def reference(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> Tensor:
    """The same in torch: one call per prefill chunk, one per group of decodes of similar context length."""
    out = query.new_empty((*query.shape[:2], columns_of(values)))
    starts, lengths = batch.query_starts.tolist(), batch.context_lengths.tolist()
    block_size = keys.shape[2]
    decodes: dict[int, list[int]] = defaultdict(list)
    for sequence, length in enumerate(lengths):
        count = starts[sequence + 1] - starts[sequence]
        if count == 1:  # padded to the next power of two of blocks, at most half is waste
            decodes[(-(-length // block_size) - 1).bit_length()].append(sequence)
            continue
        size = max(1, _AT_ONCE // (query.shape[1] * max(1, length)))
        for first in range(0, count, size):
            last = min(first + size, count)
            chunk = slice(starts[sequence] + first, starts[sequence] + last)
            seen, table = length - count + last, batch.block_tables[sequence, None]
            out[chunk] = _attend(query[chunk][None], keys, values, table, [seen], scale, window)[0]
    for sequences in _in_pieces(decodes, keys.shape[1] * block_size * (keys.shape[-1] + values.shape[-1])):
        rows = torch.tensor([starts[sequence] for sequence in sequences], device=query.device)
        tables = batch.block_tables[torch.tensor(sequences, device=batch.block_tables.device)]
        contexts = [lengths[sequence] for sequence in sequences]
        out[rows] = _attend(query[rows][:, None], keys, values, tables, contexts, scale, window)[:, 0]
    return out


def _in_pieces(decodes: dict[int, list[int]], block_elements: int) -> Iterator[list[int]]:
    """Groups of decodes, by the logarithm of their blocks, cut so that what is gathered for each stays small."""
    for blocks_log2, sequences in decodes.items():
        size = max(1, _AT_ONCE // (block_elements << blocks_log2))
        for first in range(0, len(sequences), size):
            yield sequences[first : first + size]


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: list[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """query [S, n, H, D]: the last n positions of each of S sequences."""
    count = query.shape[1]
    block_size, longest, device = keys.shape[2], max(lengths), query.device
    used = -(-longest // block_size)
    contexts = torch.tensor(lengths, device=device)
    visible_blocks = torch.arange(used, device=device) * block_size < contexts[:, None]
    table = torch.where(visible_blocks, tables[:, :used].to(device, torch.int64), 0)

    def gather(cache: Tensor) -> Tensor:
        """[S, KVH, used * block_size, D] up to the longest context."""
        stored = bytes_of(cache)[table].view(cache.dtype)
        return decode(stored.transpose(1, 2).flatten(2, 3)[:, :, :longest], query.dtype)

    key, value = gather(keys), gather(values)
    positions = torch.arange(longest, device=device)
    beyond = positions >= contexts[:, None]
    if bool(beyond.any()):  # another sequence's numbers: even a NaN there must not matter
        key = key.masked_fill(beyond[:, None, :, None], 0)
        value = value.masked_fill(beyond[:, None, :, None], 0)
    own = contexts[:, None] - count + torch.arange(count, device=device)  # [S, n]
    visible = positions <= own[..., None]
    if window is not None:
        visible &= positions > own[..., None] - window
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=visible[:, None], scale=scale, enable_gqa=True
    )
    return mixed.transpose(1, 2)
