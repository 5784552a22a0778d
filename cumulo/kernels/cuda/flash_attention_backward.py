"""The backward kernels of dense attention: gradients of q, k and v, the same bits every run. flash_attention
launches them.

Must compute 10 · heads · D FLOPs for every pair of a query and a key it sees (5 products; FlashAttention-2: Dao
2023, algorithm 2). No sum crosses programs, so nothing is added atomically and the order of every sum is fixed: one
kernel owns key tiles and walks over the queries that see them, all heads of the group in turn (dk, dv); another
owns query tiles and walks over keys (dq). The price is that scores and their gradients are computed twice: 7
products.

A first pass makes delta = rowsum(dO · O) − d(lse), the part of every score's gradient that depends on its row only.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.flash_attention_forward import columns_of, locate, search_steps
from cumulo.kernels.cuda.split_merge import LOG2_E

_DELTA_ROWS = 32


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tile sizes of one of the two kernels: what a program owns, and what it walks over."""

    own: int = 128
    walk: int = 64
    num_warps: int = 8
    num_stages: int = 2


@triton.jit
def _delta(out, grad_out, grad_lse, delta, tokens, out_stride, out_head_stride, grad_stride, grad_head_stride,
           lse_head_stride, grad_lse_head_stride, HAS_GRAD_LSE: tl.constexpr, DIM: tl.constexpr,
           COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    head = tl.program_id(1)
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = (token < tokens)[:, None] & (column < DIM)[None, :]
    o = tl.load(
        out + token[:, None] * out_stride + head * out_head_stride + column[None, :], mask=mask, other=0.0
    )
    g = tl.load(
        grad_out + token[:, None] * grad_stride + head * grad_head_stride + column[None, :],
        mask=mask,
        other=0.0,
    )
    total = tl.sum(o.to(tl.float32) * g.to(tl.float32), axis=1)
    if HAS_GRAD_LSE:
        total -= tl.load(
            grad_lse + head.to(tl.int64) * grad_lse_head_stride + token, mask=token < tokens, other=0.0
        )
    tl.store(delta + head.to(tl.int64) * lse_head_stride + token, total, mask=token < tokens)


@triton.jit
def _walk_queries(dk, dv, k, v, query, grad_out, lse, delta, begin, end, key_position, queries, offset, scale_log2,
                  query_stride, grad_stride, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
                  MASKED: tl.constexpr):  # fmt: skip
    """Add what query tiles begin..end of one head give to a key tile. Scores are transposed: keys × queries."""
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, BLOCK_M)
    query_step = tl.full([], BLOCK_M, tl.int64) * query_stride
    grad_step = tl.full([], BLOCK_M, tl.int64) * grad_stride
    query_offset = row[:, None] * query_stride + column[None, :]
    grad_offset = row[:, None] * grad_stride + column[None, :]
    for tile in tl.range(begin, end):
        local = tile * BLOCK_M + row
        inside = (local < queries)[:, None] & (column < DIM)[None, :]
        q = tl.load(query + tile * query_step + query_offset, mask=inside, other=0.0)
        g = tl.load(grad_out + tile * grad_step + grad_offset, mask=inside, other=0.0)
        # Past the document's end the log-sum is infinite: the weight of such a query is 0.
        log_sum = tl.load(lse + local, mask=local < queries, other=float("inf")) * LOG2_E
        row_delta = tl.load(delta + local, mask=local < queries, other=0.0)
        scores = tl.dot(k, q.T, input_precision="ieee") * scale_log2 - log_sum[None, :]
        if MASKED:
            visible = key_position[:, None] <= (local + offset)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        p = tl.exp2(scores)
        if MASKED:  # a query that sees no key at all: -inf - -inf
            p = tl.where(visible, p, 0.0)
        dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
        dp = tl.dot(v, g.T, input_precision="ieee")
        ds = p * (dp - row_delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _keys_values(query, key, value, grad_out, lse, delta, grad_key, grad_value, query_starts, key_starts, documents,
                 tokens, scale, query_stride, query_head_stride, key_stride, key_head_stride, value_stride,
                 value_head_stride, grad_stride, grad_head_stride, grad_key_stride, grad_key_head_stride,
                 lse_head_stride, GROUP: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
                 SEARCH_STEPS: tl.constexpr):  # fmt: skip
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
    end = (queries + BLOCK_M - 1) // BLOCK_M
    begin = 0
    see_all = 0
    if CAUSAL:
        begin = tl.minimum(tl.maximum(first_row - offset, 0) // BLOCK_M, end)
        see_all = tl.maximum(first_row + BLOCK_N - 1 - offset, 0)
        see_all = tl.maximum(tl.minimum((see_all + BLOCK_M - 1) // BLOCK_M, end), begin)
    scale_log2 = scale * LOG2_E
    dk = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    dv = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    first = first_query.to(tl.int64)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        head_query = query + first * query_stride + head * query_head_stride
        head_grad = grad_out + first * grad_stride + head * grad_head_stride
        head_lse = lse + head.to(tl.int64) * lse_head_stride + first
        head_delta = delta + head.to(tl.int64) * lse_head_stride + first
        if CAUSAL:
            dk, dv = _walk_queries(
                dk, dv, k, v, head_query, head_grad, head_lse, head_delta, begin, see_all, row, queries, offset,
                scale_log2, query_stride, grad_stride, DIM, COLUMNS, BLOCK_M, True,
            )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k, v, head_query, head_grad, head_lse, head_delta, see_all, end, row, queries, offset,
            scale_log2, query_stride, grad_stride, DIM, COLUMNS, BLOCK_M, False,
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
def _queries(query, key, value, grad_out, lse, delta, grad_query, query_starts, key_starts, documents, tokens,
             scale, query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
             grad_stride, grad_head_stride, grad_query_stride, grad_query_head_stride, lse_head_stride,
             GROUP: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, SEARCH_STEPS: tl.constexpr):  # fmt: skip
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
    rows = head.to(tl.int64) * lse_head_stride + token
    log_sum = tl.load(lse + rows, mask=row < queries, other=float("inf")) * LOG2_E
    row_delta = tl.load(delta + rows, mask=row < queries, other=0.0)
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


def launch_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor],
    delta: Tensor,
    for_keys: BackwardConfig,
    for_queries: BackwardConfig,
) -> None:
    """Fill `grads` (of query, key, value; the last two with equal strides); delta [H, T] is scratch."""
    tokens, heads, dim = query.shape
    documents, columns, group = len(query_starts) - 1, columns_of(dim), heads // key.shape[1]
    grad_query, grad_key, grad_value = grads
    _delta[(triton.cdiv(tokens, _DELTA_ROWS), heads)](
        out, grad_out, delta if grad_lse is None else grad_lse, delta, tokens, out.stride(0), out.stride(1),
        grad_out.stride(0), grad_out.stride(1), delta.stride(0), 0 if grad_lse is None else grad_lse.stride(0),
        HAS_GRAD_LSE=grad_lse is not None, DIM=dim, COLUMNS=columns, ROWS=_DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    strides = (
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        grad_out.stride(0), grad_out.stride(1),
    )  # fmt: skip
    _keys_values[(len(key) // for_keys.own + documents, key.shape[1])](
        query, key, value, grad_out, lse, delta, grad_key, grad_value, query_starts, key_starts, documents,
        len(key), scale, *strides, grad_key.stride(0), grad_key.stride(1), lse.stride(0), GROUP=group, DIM=dim,
        COLUMNS=columns, BLOCK_M=for_keys.walk, BLOCK_N=for_keys.own, CAUSAL=causal,
        SEARCH_STEPS=search_steps(documents), num_warps=for_keys.num_warps, num_stages=for_keys.num_stages,
    )  # fmt: skip
    _queries[(tokens // for_queries.own + documents, heads)](
        query, key, value, grad_out, lse, delta, grad_query, query_starts, key_starts, documents, tokens, scale,
        *strides, grad_query.stride(0), grad_query.stride(1), lse.stride(0), GROUP=group, DIM=dim,
        COLUMNS=columns, BLOCK_M=for_queries.own, BLOCK_N=for_queries.walk, CAUSAL=causal,
        SEARCH_STEPS=search_steps(documents), num_warps=for_queries.num_warps,
        num_stages=for_queries.num_stages,
    )  # fmt: skip


def default_backward(dim: int, dtype: torch.dtype) -> tuple[BackwardConfig, BackwardConfig]:
    """Of the kernel that owns keys, and of the one that owns queries."""
    if dtype == torch.float32:
        return BackwardConfig(32, 32, 4, 1), BackwardConfig(32, 32, 4, 1)
    if dim > 128:
        return BackwardConfig(64, 32, 8, 1), BackwardConfig(64, 32, 8, 2)
    return BackwardConfig(128, 64, 8, 2), BackwardConfig(128, 64, 8, 2)
