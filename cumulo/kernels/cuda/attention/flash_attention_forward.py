"""The forward kernel of dense attention: output and log-sum-exp of packed documents. flash_attention launches it.

Must compute 4 · heads · D FLOPs for every pair of a query and a key it sees; the bytes (q, k, v and out once) are
few beside that. A program owns a tile of one document's queries and one head, and folds key tiles into a running
softmax (FlashAttention-2: Dao 2023, algorithm 1), in base 2 with the scale in one multiply-add. Keys that every row
sees are folded without a mask; only the diagonal and the document's end have one.

At 600 TFLOP/s 128 rows a program ask 4.7 TB/s of keys and values of the L2 cache; fewer ask more than it gives. So
programs that run together share them: tiles are the fast side of the grid, heads of one group follow each other.
With a causal mask the last tiles of a document have most to do; they start first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cumulo.kernels.cuda.attention.split_merge import LN_2, LOG2_E


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Tile sizes; `cumulo bench kernels --tune` finds the best for a device."""

    block_m: int = 128  # queries a program owns
    block_n: int = 128  # keys folded at once
    num_warps: int = 8
    num_stages: int = 2
    descriptors: bool = True  # keys and values come by the tensor memory accelerator
    maxnreg: int | None = None  # registers a thread may have, to fit more programs on a multiprocessor


@triton.jit
def locate(starts, tile, documents, TILE: tl.constexpr, SEARCH_STEPS: tl.constexpr):
    """The document of a tile, the tile's number in it, and the document's first token and length.

    Every document begins a tile: the d-th at tile starts[d] // TILE + d, which is never too early. So nobody on
    the host has to know the lengths; tiles left over at a document's end are found to be empty.
    """
    low = tile * 0
    high = low + documents
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_right = tl.load(starts + middle) // TILE + middle <= tile
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    first = tl.load(starts + low)
    return low, tile - (first // TILE + low), first, tl.load(starts + low + 1) - first


@triton.jit
def _fold(q, acc, weight, top, keys, values, key_descriptor, value_descriptor, first_key, column_start, begin, end,
          own_position, length, scale_log2, key_stride, value_stride, DIM: tl.constexpr, COLUMNS: tl.constexpr,
          BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
          DESCRIPTORS: tl.constexpr):  # fmt: skip
    """Fold key tiles begin..end into the running softmax of every row."""
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, BLOCK_N)
    key_step = tl.full([], BLOCK_N, tl.int64) * key_stride
    value_step = tl.full([], BLOCK_N, tl.int64) * value_stride
    key_offset = row[:, None] * key_stride + column[None, :]
    value_offset = row[:, None] * value_stride + column[None, :]
    for tile in tl.range(begin, end):
        position = tile * BLOCK_N + row
        if DESCRIPTORS:
            k = key_descriptor.load([first_key + tile * BLOCK_N, column_start])
            v = value_descriptor.load([first_key + tile * BLOCK_N, column_start])
        elif MASKED or COLUMNS != DIM:
            inside = (position < length)[:, None] & (column < DIM)[None, :]
            k = tl.load(keys + tile * key_step + key_offset, mask=inside, other=0.0)
            v = tl.load(values + tile * value_step + value_offset, mask=inside, other=0.0)
        else:
            k = tl.load(keys + tile * key_step + key_offset)
            v = tl.load(values + tile * value_step + value_offset)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if MASKED:
            visible = (position < length)[None, :]
            if CAUSAL:
                visible = visible & (position[None, :] <= own_position[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
        safe_top = new_top
        if MASKED:  # a row may have seen nothing yet
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - safe_top)
        p = tl.exp2(scores * scale_log2 - safe_top[:, None])
        weight = weight * keep + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = new_top
    return acc, weight, top


@triton.jit
def _forward(query, keys, values, key_descriptor, value_descriptor, out, lse, query_starts, key_starts, documents,
             tokens, scale, query_stride, query_head_stride, key_stride, key_head_stride, value_stride,
             value_head_stride, out_stride, out_head_stride, lse_head_stride, GROUP: tl.constexpr,
             DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             CAUSAL: tl.constexpr, SEARCH_STEPS: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    document, local_tile, first_query, queries = locate(query_starts, tile, documents, BLOCK_M, SEARCH_STEPS)
    first_row = local_tile * BLOCK_M
    # What is left of the buffer after the last document is filled with zeros.
    rows_to_write = tl.where(document == documents - 1, tokens - first_query, queries)
    if first_row >= rows_to_write:
        return
    first_key = tl.load(key_starts + document)
    length = tl.load(key_starts + document + 1) - first_key
    length = tl.where(first_row < queries, length, 0)

    row = first_row + tl.arange(0, BLOCK_M)
    column = tl.arange(0, COLUMNS)
    kv_head = head // GROUP
    token = (first_query + row).to(tl.int64)
    inside = (row < queries)[:, None] & (column < DIM)[None, :]
    query_offset = token[:, None] * query_stride + head * query_head_stride + column[None, :]
    q = tl.load(query + query_offset, mask=inside, other=0.0)
    key_base = keys + (first_key.to(tl.int64) * key_stride + kv_head * key_head_stride)
    value_base = values + (first_key.to(tl.int64) * value_stride + kv_head * value_head_stride)

    own_position = row + length - queries  # the last query sees the last key
    if CAUSAL:
        first_position = first_row + length - queries
        seen_by_all = tl.minimum(tl.maximum(first_position + 1, 0), length) // BLOCK_N
        end = (tl.minimum(length, tl.maximum(first_position + BLOCK_M, 0)) + BLOCK_N - 1) // BLOCK_N
    else:
        seen_by_all = length // BLOCK_N
        end = (length + BLOCK_N - 1) // BLOCK_N
    scale_log2 = scale * LOG2_E
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc, weight, top = _fold(
        q, acc, weight, top, key_base, value_base, key_descriptor, value_descriptor, first_key, kv_head * DIM,
        0, seen_by_all, own_position, length, scale_log2, key_stride, value_stride, DIM, COLUMNS, BLOCK_N,
        CAUSAL, False, DESCRIPTORS,
    )  # fmt: skip
    # With pointers, whose loads stop at the document's end: what another document holds cannot matter.
    acc, weight, top = _fold(
        q, acc, weight, top, key_base, value_base, key_descriptor, value_descriptor, first_key, kv_head * DIM,
        seen_by_all, end, own_position, length, scale_log2, key_stride, value_stride, DIM, COLUMNS, BLOCK_N,
        CAUSAL, True, False,
    )  # fmt: skip

    seen = (weight != 0) & (row < queries)  # a NaN is seen, and shows
    weight = tl.where(seen, weight, 1.0)
    result = tl.where(seen[:, None], acc / weight[:, None], 0.0)
    out_offset = token[:, None] * out_stride + head * out_head_stride + column[None, :]
    writes = row < rows_to_write
    tl.store(
        out + out_offset,
        result.to(out.dtype.element_ty),
        mask=writes[:, None] & (column < DIM)[None, :],
    )
    log_sum = tl.where(seen, (top + tl.log2(weight)) * LN_2, float("-inf"))
    tl.store(lse + head.to(tl.int64) * lse_head_stride + token, log_sum, mask=writes)


def search_steps(documents: int) -> int:
    return max(0, documents - 1).bit_length()


def columns_of(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def described(x: Tensor, tile: int) -> TensorDescriptor | None:
    """[T, heads, D] as one matrix for the tensor memory accelerator; None where it cannot describe it."""
    tokens, heads, dim = x.shape
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    if not aligned or dim != columns_of(dim) or x.stride(1) != dim or tokens == 0:
        return None
    return TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [tile, dim])


def launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    scale: float,
    out: Tensor,
    lse: Tensor,
    config: ForwardConfig,
) -> None:
    """query [T, H, D], key and value [S, KV, D], starts [documents + 1] int32 -> out [T, H, D], lse [H, T]."""
    tokens, heads, dim = query.shape
    documents = len(query_starts) - 1
    key_source = described(key, config.block_n) if config.descriptors else None
    value_source = described(value, config.block_n) if config.descriptors else None
    uses_descriptors = key_source is not None and value_source is not None
    options = {} if config.maxnreg is None or not query.is_cuda else {"maxnreg": config.maxnreg}
    _forward[(tokens // config.block_m + documents, heads)](
        query, key, value, key_source if uses_descriptors else key, value_source if uses_descriptors else value,
        out, lse, query_starts, key_starts, documents, tokens, scale, query.stride(0), query.stride(1),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), out.stride(0), out.stride(1),
        lse.stride(0), GROUP=heads // key.shape[1], DIM=dim, COLUMNS=columns_of(dim), BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, CAUSAL=causal, SEARCH_STEPS=search_steps(documents),
        DESCRIPTORS=uses_descriptors,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip


def default_forward(dim: int, dtype: torch.dtype) -> ForwardConfig:
    """128 × 128 scores leave the fewest instructions a score and fill the registers; wide heads take fewer."""
    if dtype == torch.float32:  # no matrix units for it: correctness only
        return ForwardConfig(32, 32, 4, 1, descriptors=False)
    return ForwardConfig(128, 64, 8, 2, descriptors=False) if dim > 128 else ForwardConfig()
