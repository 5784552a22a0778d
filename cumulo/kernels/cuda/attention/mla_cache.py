"""What comes before latent attention, in one launch: queries' rotated parts, and the key that all heads share,
normed, rotated and written to its page. `LatentHalf` calls it.

Must move: the queries' rotated columns in and out, and rank + rope numbers in and out, for each token.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


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
