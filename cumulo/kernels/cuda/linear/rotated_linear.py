"""rotated_linear: a draft head's paired product (draft_linear.py) that also rotates queries and keys, and writes
keys and values to their pages, for the few rows of a round: `paired_linear` and `rope_cache` in one launch.
CudaEagle calls it.

A program computes pairs of outputs that are rotated together. They are rounded before, as they are between the two
kernels, so that both ways give the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.early import early
from cumulo.kernels.cuda.linear import draft_linear
from cumulo.kernels.cuda.linear.draft_linear import _dot, _normed

_EACH = 8  # neighbouring columns of one thread, 16 bytes


@triton.jit
def _rotated(embed, ids, stream, weight, out, token_norm, stream_norm, cos, sin, positions, slots, keys, values,
             PAIRED, stride_embed, stride_stream, stride_weight, stride_out, block_stride, head_stride, block_size,
             eps, M: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr,
             BLOCK_K: tl.constexpr, EACH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
             DIM: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real = pair < PAIRED
    pair = tl.minimum(pair, PAIRED - 1)
    head, turn = pair // (DIM // 2), pair % (DIM // 2)
    if INTERLEAVED:
        low, high = 2 * turn, 2 * turn + 1
    else:
        low, high = turn, turn + DIM // 2
    line = tl.arange(0, BLOCK_M)
    lines = tl.minimum(line, M - 1)
    column = tl.arange(0, BLOCK_K)[None, None, :]
    low_rows = weight + (head * DIM + low).to(tl.int64)[:, None, None] * stride_weight
    high_rows = weight + (head * DIM + high).to(tl.int64)[:, None, None] * stride_weight
    low_token = tl.load(low_rows + column, mask=column < K, other=0.0)
    high_token = tl.load(high_rows + column, mask=column < K, other=0.0)
    low_stream = tl.load(low_rows + K + column, mask=column < K, other=0.0)
    high_stream = tl.load(high_rows + K + column, mask=column < K, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(ids + lines).to(tl.int64)
    position = tl.load(positions + lines).to(tl.int64)
    slot = tl.load(slots + lines).to(tl.int64)
    tokens = _normed(
        embed + token[None, :, None] * stride_embed, token_norm, column, eps, K, BLOCK_M, BLOCK_K
    )
    at = position[None, :] * (DIM // 2) + turn[:, None]
    c = tl.load(cos + at).to(tl.float32)
    s = tl.load(sin + at).to(tl.float32)
    sums_a = _dot(low_token, tokens, PAIRS, BLOCK_M, BLOCK_K, EACH)
    sums_b = _dot(high_token, tokens, PAIRS, BLOCK_M, BLOCK_K, EACH)
    streams = _normed(
        stream + lines[None, :, None] * stride_stream, stream_norm, column, eps, K, BLOCK_M, BLOCK_K
    )
    sums_a += _dot(low_stream, streams, PAIRS, BLOCK_M, BLOCK_K, EACH)
    sums_b += _dot(high_stream, streams, PAIRS, BLOCK_M, BLOCK_K, EACH)
    a = tl.sum(sums_a, 2).to(out.dtype.element_ty).to(tl.float32)
    b = tl.sum(sums_b, 2).to(out.dtype.element_ty).to(tl.float32)
    turned_a = a * c - b * s
    turned_b = b * c + a * s
    written = real[:, None] & (line < M)[None, :]
    queries = written & (head < HEADS)[:, None]
    target = out + line[None, :] * stride_out + (head * DIM)[:, None]
    tl.store(target + low[:, None], turned_a.to(out.dtype.element_ty), mask=queries)
    tl.store(target + high[:, None], turned_b.to(out.dtype.element_ty), mask=queries)
    # A token that only fills up a captured shape has no slot.
    cached = written & (slot >= 0)[None, :]
    page = ((slot // block_size) * block_stride + (slot % block_size) * DIM)[None, :]
    is_key = cached & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    target = keys + page + ((head - HEADS) * head_stride)[:, None]
    tl.store(target + low[:, None], turned_a.to(keys.dtype.element_ty), mask=is_key)
    tl.store(target + high[:, None], turned_b.to(keys.dtype.element_ty), mask=is_key)
    is_value = cached & (head >= HEADS + KV_HEADS)[:, None]
    target = values + page + ((head - HEADS - KV_HEADS) * head_stride)[:, None]
    tl.store(target + low[:, None], a.to(values.dtype.element_ty), mask=is_value)
    tl.store(target + high[:, None], b.to(values.dtype.element_ty), mask=is_value)


def rotated_linear(
    embed: Tensor, ids: Tensor, stream: Tensor, weight: Tensor, out: Tensor, token_norm: Tensor,
    stream_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, keys: Tensor,
    values: Tensor, heads: int, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """`paired_linear` of up to 8 rows, of whose outputs [heads + 2 kv_heads, D] the queries go to `out`, rotated,
    keys (rotated) and values to keys, values [blocks, kv_heads, block_size, D] at flat `slots` (-1: nowhere)."""
    m, k = stream.shape
    kv_heads, block_size, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    pairs, block_k = max(1, draft_linear._PAIRED_ROWS // 2), max(256, triton.next_power_of_2(k))
    _rotated[(triton.cdiv(weight.shape[0] // 2, pairs),)](
        embed, ids, stream, weight, out, token_norm, stream_norm, cos, sin, positions, slots, keys, values,
        weight.shape[0] // 2, embed.stride(0), stream.stride(0), weight.stride(0), out.stride(0), keys.stride(0),
        keys.stride(1), block_size, eps, M=m, K=k, BLOCK_M=triton.next_power_of_2(m), PAIRS=pairs, BLOCK_K=block_k,
        EACH=_EACH, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, INTERLEAVED=interleaved,
        num_warps=draft_linear._warps(block_k), **early(True, stream),
    )  # fmt: skip
    return out
