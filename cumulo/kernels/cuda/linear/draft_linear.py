"""The products of a draft head that ordinary decoders do not have, for the few rows of a round. CudaEagle calls
them.

`paired_linear`: token and stream side by side, each normed by itself, times one matrix; the tokens' embeddings are
read where they lie. `likeliest`: the last matrix, of which only each row's largest output is wanted, so no logits
are written. Both must move their weights once; as in few_linear, a program has all its loads on their way at once.
The weights stay in the L2 cache from one draft of a round to the next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.early import early
from cumulo.kernels.cuda.linear.few_linear import MAX_ROWS

_EACH = 8  # neighbouring columns of one thread, 16 bytes
_PAIRED_ROWS, _LIKELIEST_ROWS = 2, 8  # of the matrix, for each program


def paired_reference(
    tokens: Tensor, stream: Tensor, weight: Tensor, token_norm: Tensor, stream_norm: Tensor, eps: float
) -> Tensor:
    """`tokens`: embedded."""
    size = tokens.shape[-1:]
    both = (
        torch.nn.functional.rms_norm(tokens, size, token_norm, eps),
        torch.nn.functional.rms_norm(stream, size, stream_norm, eps),
    )
    return torch.cat(both, dim=-1) @ weight.t()


def likeliest_reference(x: Tensor, weight: Tensor, norm: Tensor, eps: float) -> Tensor:
    return (torch.nn.functional.rms_norm(x, x.shape[-1:], norm, eps) @ weight.t()).argmax(dim=-1)


@triton.jit
def _normed(x, gains, column, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows of x [1, BLOCK_M, BLOCK_K], normed."""
    values = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(values * values, 2) / K + eps)
    return values * rstd[:, :, None] * tl.load(gains + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def _dot(w, values, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EACH: tl.constexpr):
    products = tl.reshape(w.to(tl.float32) * values, (ROWS, BLOCK_M, BLOCK_K // EACH, EACH))
    return tl.sum(products, 3)  # of one thread's columns: no exchange


@triton.jit
def _paired(embed, ids, stream, weight, out, token_norm, stream_norm, OUTPUTS, stride_embed, stride_stream,
            stride_weight, stride_out, eps, M: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
            ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EACH: tl.constexpr,
            EARLY: tl.constexpr = False):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    safe = tl.minimum(row, OUTPUTS - 1).to(tl.int64)
    line = tl.arange(0, BLOCK_M)
    lines = tl.minimum(line, M - 1)
    column = tl.arange(0, BLOCK_K)[None, None, :]
    w_rows = weight + safe[:, None, None] * stride_weight
    w_token = tl.load(w_rows + column, mask=column < K, other=0.0)
    w_stream = tl.load(w_rows + K + column, mask=column < K, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(ids + lines).to(tl.int64)
    tokens = _normed(
        embed + token[None, :, None] * stride_embed, token_norm, column, eps, K, BLOCK_M, BLOCK_K
    )
    acc = _dot(w_token, tokens, ROWS, BLOCK_M, BLOCK_K, EACH)
    streams = _normed(
        stream + lines[None, :, None] * stride_stream, stream_norm, column, eps, K, BLOCK_M, BLOCK_K
    )
    acc += _dot(w_stream, streams, ROWS, BLOCK_M, BLOCK_K, EACH)
    y = tl.sum(acc, 2)
    mask = (row < OUTPUTS)[:, None] & (line < M)[None, :]
    tl.store(out + line[None, :] * stride_out + row[:, None], y.to(out.dtype.element_ty), mask=mask)


def fits(rows: int, hidden: int) -> bool:
    """Whether these kernels are made for so many rows of this length."""
    return rows <= MAX_ROWS and hidden <= 2048


def paired_linear(
    embed: Tensor, ids: Tensor, stream: Tensor, weight: Tensor, out: Tensor, token_norm: Tensor,
    stream_norm: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """[norm(embed[ids]) | norm(stream)] · weightᵀ into `out` [M, N]; ids [M], stream [M, K], weight [N, 2 K]."""
    m, k = stream.shape
    n, block_k = weight.shape[0], max(256, triton.next_power_of_2(k))
    _paired[(triton.cdiv(n, _PAIRED_ROWS),)](
        embed, ids, stream, weight, out, token_norm, stream_norm, n, embed.stride(0), stream.stride(0),
        weight.stride(0), out.stride(0), eps, M=m, K=k, BLOCK_M=triton.next_power_of_2(m), ROWS=_PAIRED_ROWS,
        BLOCK_K=block_k, EACH=_EACH, num_warps=_warps(block_k), **early(True, stream),
    )  # fmt: skip
    return out


@triton.jit
def _likeliest(x, weight, norm_weight, best, place, mass, OUTPUTS, stride_x, stride_weight, stride_best, eps,
               M: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
               BLOCK_K: tl.constexpr, EACH: tl.constexpr, MASS: tl.constexpr,
               EARLY: tl.constexpr = False):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    safe = tl.minimum(row, OUTPUTS - 1).to(tl.int64)
    line = tl.arange(0, BLOCK_M)
    lines = tl.minimum(line, M - 1)
    column = tl.arange(0, BLOCK_K)[None, None, :]
    w = tl.load(weight + safe[:, None, None] * stride_weight + column, mask=column < K, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    values = _normed(x + lines[None, :, None] * stride_x, norm_weight, column, eps, K, BLOCK_M, BLOCK_K)
    y = tl.sum(_dot(w, values, ROWS, BLOCK_M, BLOCK_K, EACH), 2)
    peak = tl.max(y, 0)
    found = tl.min(tl.where(y == peak[None, :], safe.to(tl.int32)[:, None], OUTPUTS - 1), 0)
    at = line * stride_best + tl.program_id(0)
    tl.store(best + at, peak, mask=line < M)
    tl.store(place + at, found, mask=line < M)
    if MASS:
        share = tl.where((row < OUTPUTS)[:, None], tl.exp(y - peak[None, :]), 0.0)
        tl.store(mass + at, tl.sum(share, 0), mask=line < M)


def likeliest_parts(outputs: int) -> int:
    """How many programs share a matrix of so many rows."""
    return -(-outputs // _LIKELIEST_ROWS)


def likeliest(
    x: Tensor,
    weight: Tensor,
    norm: Tensor,
    eps: float,
    best: Tensor,
    place: Tensor,
    mass: Tensor | None = None,
) -> None:
    """Of norm(x) · weightᵀ each part's largest output, into best [M, parts] float32, and its row of the matrix,
    into place [M, parts] int32; of equals the first. `mass` [M, parts] float32: its sum of exp(output - best)."""
    m, k = x.shape
    n, block_k = weight.shape[0], max(256, triton.next_power_of_2(k))
    _likeliest[(likeliest_parts(n),)](
        x, weight, norm, best, place, mass, n, x.stride(0), weight.stride(0), best.stride(0), eps, M=m, K=k,
        BLOCK_M=triton.next_power_of_2(m), ROWS=_LIKELIEST_ROWS, BLOCK_K=block_k, EACH=_EACH,
        MASS=mass is not None, num_warps=_warps(block_k), **early(True, x),
    )  # fmt: skip


def _warps(block_k: int) -> int:
    """Which share the columns, 256 each at least."""
    return max(1, min(4, block_k // 256))
