"""The backward kernels of dense attention: gradients of q, k and v, the same bits every run. flash_attention
launches them.

Must compute 10 · heads · D FLOPs for every pair of a query and a key it sees (5 products; FlashAttention-2: Dao
2023, algorithm 2). No sum crosses programs, so nothing is added atomically and the order of every sum is fixed: one
kernel owns key tiles and walks over the queries that see them, all heads of the group in turn (dk, dv); another
owns query tiles and walks over keys (dq). The price is that scores and their gradients are computed twice: 7
products.

Queries and their numbers come by the tensor memory accelerator where they can: computing their addresses, and one
log-sum for every column a thread holds, takes the registers that dk and dv need.

A first pass makes delta = rowsum(dO · O), the part of every score's gradient that depends on its row only.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cumulo.kernels.cuda.attention.flash_attention_forward import columns_of, described, locate, search_steps
from cumulo.kernels.cuda.attention.split_merge import LOG2_E


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tile sizes of one of the two kernels: what a program owns, and what it walks over."""

    own: int = 128
    walk: int = 64
    num_warps: int = 8
    num_stages: int = 2
    descriptors: bool = True  # only the kernel that owns keys has them


@triton.jit
def _row_numbers(out, lse, grad_out, log_sums, deltas, query_starts, documents, out_stride, out_head_stride,
                 grad_stride, grad_head_stride, lse_head_stride, row_head_stride, DIM: tl.constexpr,
                 COLUMNS: tl.constexpr, ROWS: tl.constexpr, SEARCH_STEPS: tl.constexpr):  # fmt: skip
    """Log-sum (base 2) and delta of every query, document by document in whole tiles of ROWS.

    Where a document's last tile has no query the log-sum is infinite: such a row's weights are 0.
    """
    head = tl.program_id(1)
    _, tile, first_query, queries = locate(query_starts, tl.program_id(0), documents, ROWS, SEARCH_STEPS)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = (first_query + row).to(tl.int64)
    inside = row < queries
    mask = inside[:, None] & (column < DIM)[None, :]
    o = tl.load(
        out + token[:, None] * out_stride + head * out_head_stride + column[None, :], mask=mask, other=0.0
    )
    g = tl.load(
        grad_out + token[:, None] * grad_stride + head * grad_head_stride + column[None, :],
        mask=mask,
        other=0.0,
    )
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), axis=1)
    log_sum = tl.load(lse + head.to(tl.int64) * lse_head_stride + token, mask=inside, other=float("inf"))
    target = head.to(tl.int64) * row_head_stride + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(log_sums + target, log_sum * LOG2_E)
    tl.store(deltas + target, delta)


@triton.jit
def _walk_queries(dk, dv, k, v, query, grad_out, log_sums, deltas, query_descriptor, grad_descriptor,
                  log_sum_descriptor, delta_descriptor, first_query, first_number, head, begin, end, key_position,
                  queries, offset, scale_log2, query_stride, grad_stride, DIM: tl.constexpr,
                  COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
                  DESCRIPTORS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Add what query tiles begin..end of one head give to a key tile. Scores are transposed: keys × queries."""
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, BLOCK_M)
    query_step = tl.full([], BLOCK_M, tl.int64) * query_stride
    grad_step = tl.full([], BLOCK_M, tl.int64) * grad_stride
    query_offset = row[:, None] * query_stride + column[None, :]
    grad_offset = row[:, None] * grad_stride + column[None, :]
    for tile in tl.range(begin, end, num_stages=STAGES):
        local = tile * BLOCK_M + row
        if DESCRIPTORS:
            q = query_descriptor.load([first_query + tile * BLOCK_M, head * DIM])
            g = grad_descriptor.load([first_query + tile * BLOCK_M, head * DIM])
        elif MASKED or COLUMNS != DIM:
            inside = (local < queries)[:, None] & (column < DIM)[None, :]
            q = tl.load(query + tile * query_step + query_offset, mask=inside, other=0.0)
            g = tl.load(grad_out + tile * grad_step + grad_offset, mask=inside, other=0.0)
        else:
            q = tl.load(query + tile * query_step + query_offset)
            g = tl.load(grad_out + tile * grad_step + grad_offset)
        if DESCRIPTORS:
            number = first_number + tile * BLOCK_M
            log_sum = log_sum_descriptor.load([head, number]).reshape([BLOCK_M])
            delta = delta_descriptor.load([head, number]).reshape([BLOCK_M])
        else:
            log_sum = tl.load(log_sums + local)
            delta = tl.load(deltas + local)
        p = tl.exp2(tl.dot(k, q.T, input_precision="ieee") * scale_log2 - log_sum[None, :])
        if MASKED and CAUSAL:  # also where a query sees no key at all, and its log-sum is -inf
            p = tl.where(key_position[:, None] <= (local + offset)[None, :], p, 0.0)
        dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
        dp = tl.dot(v, g.T, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _keys_values(query, key, value, grad_out, log_sums, deltas, query_descriptor, grad_descriptor,
                 log_sum_descriptor, delta_descriptor, grad_key, grad_value, query_starts, key_starts, documents,
                 tokens, scale, query_stride, query_head_stride, key_stride, key_head_stride, value_stride,
                 value_head_stride, grad_stride, grad_head_stride, grad_key_stride, grad_key_head_stride,
                 row_head_stride, GROUP: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
                 SEARCH_STEPS: tl.constexpr, DESCRIPTORS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    kv_head = tl.program_id(1)  # with a causal mask a document's first keys have most to do, and start first
    document, tile, first_key, length = locate(key_starts, tl.program_id(0), documents, BLOCK_N, SEARCH_STEPS)
    first_row = tile * BLOCK_N
    rows_to_write = tl.where(document == documents - 1, tokens - first_key, length)
    if first_row >= rows_to_write:
        return
    first_query = tl.load(query_starts + document)
    queries = tl.load(query_starts + document + 1) - first_query
    if first_row >= length:
        queries = 0
    row = first_row + tl.arange(0, BLOCK_N)
    column = tl.arange(0, COLUMNS)
    token = (first_key + row).to(tl.int64)
    inside = (row < length)[:, None] & (column < DIM)[None, :]
    k = tl.load(
        key + token[:, None] * key_stride + kv_head * key_head_stride + column[None, :],
        mask=inside,
        other=0.0,
    )
    v = tl.load(
        value + token[:, None] * value_stride + kv_head * value_head_stride + column[None, :],
        mask=inside,
        other=0.0,
    )

    offset = length - queries  # a query's own position minus its number
    # Query tiles: those across the diagonal, those wholly below it and inside the document, and its broken end.
    end = (queries + BLOCK_M - 1) // BLOCK_M
    begin = 0
    see_all = 0
    if CAUSAL:
        begin = tl.minimum(tl.maximum(first_row - offset, 0) // BLOCK_M, end)
        see_all = tl.maximum(first_row + BLOCK_N - 1 - offset, 0)
        see_all = tl.maximum(tl.minimum((see_all + BLOCK_M - 1) // BLOCK_M, end), begin)
    whole = queries // BLOCK_M
    scale_log2 = scale * LOG2_E
    dk = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    dv = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    first = first_query.to(tl.int64)
    first_number = (first_query // BLOCK_M + document) * BLOCK_M
    for member in range(GROUP):
        head = kv_head * GROUP + member
        head_query = query + first * query_stride + head * query_head_stride
        head_grad = grad_out + first * grad_stride + head * grad_head_stride
        head_log_sums = log_sums + (head.to(tl.int64) * row_head_stride + first_number)
        head_deltas = deltas + (head.to(tl.int64) * row_head_stride + first_number)
        if CAUSAL:
            dk, dv = _walk_queries(
                dk, dv, k, v, head_query, head_grad, head_log_sums, head_deltas, query_descriptor,
                grad_descriptor, log_sum_descriptor, delta_descriptor, first_query, first_number, head,
                begin, tl.minimum(see_all, whole), row, queries, offset, scale_log2, query_stride,
                grad_stride, DIM, COLUMNS, BLOCK_M, CAUSAL, True, DESCRIPTORS, STAGES,
            )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k, v, head_query, head_grad, head_log_sums, head_deltas, query_descriptor,
            grad_descriptor, log_sum_descriptor, delta_descriptor, first_query, first_number, head,
            see_all, whole, row, queries, offset, scale_log2, query_stride,
            grad_stride, DIM, COLUMNS, BLOCK_M, CAUSAL, False, DESCRIPTORS, STAGES,
        )  # fmt: skip
        # With pointers, whose loads stop at the document's end: what another document holds cannot matter.
        dk, dv = _walk_queries(
            dk, dv, k, v, head_query, head_grad, head_log_sums, head_deltas, query_descriptor,
            grad_descriptor, log_sum_descriptor, delta_descriptor, first_query, first_number, head,
            tl.maximum(begin, whole), end, row, queries, offset, scale_log2, query_stride,
            grad_stride, DIM, COLUMNS, BLOCK_M, CAUSAL, True, False, 1,
        )  # fmt: skip
    writes = (row < rows_to_write)[:, None] & (column < DIM)[None, :]
    target = token[:, None] * grad_key_stride + kv_head * grad_key_head_stride + column[None, :]
    tl.store(grad_key + target, (dk * scale).to(grad_key.dtype.element_ty), mask=writes)
    tl.store(grad_value + target, dv.to(grad_value.dtype.element_ty), mask=writes)


@triton.jit
def _walk_keys(dq, q, g, log_sum, row_delta, key, value, begin, end, own_position, length, scale_log2, key_stride,
               value_stride, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
               CAUSAL: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add what key tiles begin..end give to a query tile."""
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, BLOCK_N)
    key_step = tl.full([], BLOCK_N, tl.int64) * key_stride
    value_step = tl.full([], BLOCK_N, tl.int64) * value_stride
    key_offset = row[:, None] * key_stride + column[None, :]
    value_offset = row[:, None] * value_stride + column[None, :]
    for tile in tl.range(begin, end):
        position = tile * BLOCK_N + row
        if MASKED or COLUMNS != DIM:
            inside = (position < length)[:, None] & (column < DIM)[None, :]
            k = tl.load(key + tile * key_step + key_offset, mask=inside, other=0.0)
            v = tl.load(value + tile * value_step + value_offset, mask=inside, other=0.0)
        else:
            k = tl.load(key + tile * key_step + key_offset)
            v = tl.load(value + tile * value_step + value_offset)
        p = tl.exp2(tl.dot(q, k.T, input_precision="ieee") * scale_log2 - log_sum[:, None])
        if MASKED:
            visible = (position < length)[None, :]
            if CAUSAL:
                visible = visible & (position[None, :] <= own_position[:, None])
            p = tl.where(visible, p, 0.0)
        dp = tl.dot(g, v.T, input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _queries(query, key, value, grad_out, log_sums, deltas, grad_query, query_starts, key_starts, documents, tokens,
             scale, query_stride, query_head_stride, key_stride, key_head_stride, value_stride,
             value_head_stride, grad_stride, grad_head_stride, grad_query_stride, grad_query_head_stride,
             row_head_stride, GROUP: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUMBER_ROWS: tl.constexpr, CAUSAL: tl.constexpr,
             SEARCH_STEPS: tl.constexpr):  # fmt: skip
    reversed_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    document, tile, first_query, queries = locate(
        query_starts, reversed_tile, documents, BLOCK_M, SEARCH_STEPS
    )
    first_row = tile * BLOCK_M
    rows_to_write = tl.where(document == documents - 1, tokens - first_query, queries)
    if first_row >= rows_to_write:
        return
    first_key = tl.load(key_starts + document)
    length = tl.load(key_starts + document + 1) - first_key
    if first_row >= queries:
        length = 0
    row = first_row + tl.arange(0, BLOCK_M)
    column = tl.arange(0, COLUMNS)
    kv_head = head // GROUP
    token = (first_query + row).to(tl.int64)
    inside = (row < queries)[:, None] & (column < DIM)[None, :]
    q = tl.load(
        query + token[:, None] * query_stride + head * query_head_stride + column[None, :],
        mask=inside,
        other=0.0,
    )
    g = tl.load(
        grad_out + token[:, None] * grad_stride + head * grad_head_stride + column[None, :],
        mask=inside,
        other=0.0,
    )
    first_number = (first_query // NUMBER_ROWS + document) * NUMBER_ROWS
    number = head.to(tl.int64) * row_head_stride + first_number + row
    log_sum = tl.load(log_sums + number, mask=row < queries, other=float("inf"))
    row_delta = tl.load(deltas + number, mask=row < queries, other=0.0)
    key += first_key.to(tl.int64) * key_stride + kv_head * key_head_stride
    value += first_key.to(tl.int64) * value_stride + kv_head * value_head_stride

    own_position = row + length - queries
    if CAUSAL:
        first_position = first_row + length - queries
        seen_by_all = tl.minimum(tl.maximum(first_position + 1, 0), length) // BLOCK_N
        end = (tl.minimum(length, tl.maximum(first_position + BLOCK_M, 0)) + BLOCK_N - 1) // BLOCK_N
    else:
        seen_by_all = length // BLOCK_N
        end = (length + BLOCK_N - 1) // BLOCK_N
    scale_log2 = scale * LOG2_E
    dq = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    dq = _walk_keys(
        dq, q, g, log_sum, row_delta, key, value, 0, seen_by_all, own_position, length, scale_log2, key_stride,
        value_stride, DIM, COLUMNS, BLOCK_N, CAUSAL, False,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, g, log_sum, row_delta, key, value, seen_by_all, end, own_position, length, scale_log2, key_stride,
        value_stride, DIM, COLUMNS, BLOCK_N, CAUSAL, True,
    )  # fmt: skip
    tl.store(
        grad_query + token[:, None] * grad_query_stride + head * grad_query_head_stride + column[None, :],
        (dq * scale).to(grad_query.dtype.element_ty),
        mask=(row < rows_to_write)[:, None] & (column < DIM)[None, :],
    )


def _sources(query: Tensor, grad_out: Tensor, numbers: Tensor, tile: int) -> list[Any] | None:
    """What the tensor memory accelerator needs to know of them; None where it cannot load one of them."""
    wide = [described(x, tile) for x in (query, grad_out)]
    if None in wide:
        return None
    return [*wide, *(TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [1, tile]) for x in numbers)]


def launch_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor],
    for_keys: BackwardConfig,
    for_queries: BackwardConfig,
) -> None:
    """Fill `grads` (of query, key, value; the last two with equal strides)."""
    tokens, heads, dim = query.shape
    documents, columns, group = len(query_starts) - 1, columns_of(dim), heads // key.shape[1]
    grad_query, grad_key, grad_value = grads
    tile = for_keys.walk
    steps = search_steps(documents)
    numbers = torch.empty(
        (2, heads, (tokens // tile + documents) * tile), dtype=torch.float32, device=query.device
    )
    _row_numbers[(tokens // tile + documents, heads)](
        out, lse, grad_out, *numbers, query_starts, documents, out.stride(0),
        out.stride(1), grad_out.stride(0), grad_out.stride(1), lse.stride(0),
        numbers.stride(1), DIM=dim, COLUMNS=columns, ROWS=tile, SEARCH_STEPS=steps, num_warps=4,
    )  # fmt: skip
    strides = (
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        grad_out.stride(0), grad_out.stride(1),
    )  # fmt: skip
    sources = _sources(query, grad_out, numbers, tile) if for_keys.descriptors else None
    _keys_values[(len(key) // for_keys.own + documents, key.shape[1])](
        query, key, value, grad_out, *numbers, *(sources or (query, grad_out, *numbers)), grad_key, grad_value,
        query_starts, key_starts, documents, len(key), scale, *strides, grad_key.stride(0), grad_key.stride(1),
        numbers.stride(1), GROUP=group, DIM=dim, COLUMNS=columns, BLOCK_M=tile, BLOCK_N=for_keys.own,
        CAUSAL=causal, SEARCH_STEPS=steps, DESCRIPTORS=sources is not None, STAGES=for_keys.num_stages,
        num_warps=for_keys.num_warps, num_stages=for_keys.num_stages,
    )  # fmt: skip
    _queries[(tokens // for_queries.own + documents, heads)](
        query, key, value, grad_out, *numbers, grad_query, query_starts, key_starts, documents, tokens, scale,
        *strides, grad_query.stride(0), grad_query.stride(1), numbers.stride(1), GROUP=group, DIM=dim,
        COLUMNS=columns, BLOCK_M=for_queries.own, BLOCK_N=for_queries.walk, NUMBER_ROWS=tile, CAUSAL=causal,
        SEARCH_STEPS=steps, num_warps=for_queries.num_warps, num_stages=for_queries.num_stages,
    )  # fmt: skip


def default_backward(dim: int, dtype: torch.dtype) -> tuple[BackwardConfig, BackwardConfig]:
    """Of the kernel that owns keys, and of the one that owns queries."""
    if dtype == torch.float32:
        return BackwardConfig(32, 32, 4, 1), BackwardConfig(32, 32, 4, 1)
    if dim > 128:
        return BackwardConfig(64, 32, 8, 1), BackwardConfig(64, 32, 8, 2)
    return BackwardConfig(128, 64, 8, 2), BackwardConfig(128, 64, 8, 2)
