"""Rotate queries and keys, norm their heads first where the model does, and write keys and values to their pages:
everything between the qkv product and attention, in one kernel.

Must move: queries in and out, keys and values in and out: 2 · (heads + 2 · kv_heads) · head_dim numbers per token.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.early import EARLY_ROWS, early
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow, Work


def reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, heads: int, kv_heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotated queries [T, heads, D], rotated keys and plain values [T, kv_heads, D]."""
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    states = qkv.view(len(qkv), -1, dim)
    query, key, value = states.split((heads, kv_heads, kv_heads), 1)

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, (dim,), norm, eps)
        c, s = cos[positions][:, None].to(x.dtype), sin[positions][:, None].to(x.dtype)
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        pair = (first * c - second * s, second * c + first * s)
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    return turned(query, q_norm), turned(key, k_norm), value


@triton.jit
def _kernel(qkv, added, cos, sin, positions, slots, q_norm, k_norm, keys, values, row_stride, block_stride,
            head_stride, eps, k_scale, v_scale, block_size, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
            DIM: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
            SCALED: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr = False):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    first = tl.program_id(1) * GROUP  # heads of one kind only: GROUP divides HEADS and KV_HEADS
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:  # a token that only fills up a captured shape has none
        heads = first + tl.arange(0, GROUP)
        half = tl.arange(0, DIM // 2)
        base = qkv + token.to(tl.int64) * row_stride + heads[:, None] * DIM
        if INTERLEAVED:
            low, high = 2 * half, 2 * half + 1
        else:
            low, high = half, half + DIM // 2
        a = tl.load(base + low[None, :]).to(tl.float32)
        b = tl.load(base + high[None, :]).to(tl.float32)
        if ADD:
            more = added + token.to(tl.int64) * row_stride + heads[:, None] * DIM
            a += tl.load(more + low[None, :]).to(tl.float32)
            b += tl.load(more + high[None, :]).to(tl.float32)
        page = (slot // block_size) * block_stride + (slot % block_size) * DIM
        if first < HEADS + KV_HEADS:
            if NORM:
                norm = q_norm if first < HEADS else k_norm
                scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
                # rounded where the model's own dtype would round
                a = (
                    (a * scale * tl.load(norm + low).to(tl.float32)[None, :])
                    .to(qkv.dtype.element_ty)
                    .to(tl.float32)
                )
                b = (
                    (b * scale * tl.load(norm + high).to(tl.float32)[None, :])
                    .to(qkv.dtype.element_ty)
                    .to(tl.float32)
                )
            position = tl.load(positions + token).to(tl.int64)
            c = tl.load(cos + position * (DIM // 2) + half).to(tl.float32)[None, :]
            s = tl.load(sin + position * (DIM // 2) + half).to(tl.float32)[None, :]
            turned_a = a * c - b * s
            turned_b = b * c + a * s
            if first < HEADS:
                tl.store(base + low[None, :], turned_a.to(qkv.dtype.element_ty))
                tl.store(base + high[None, :], turned_b.to(qkv.dtype.element_ty))
            else:
                if SCALED:
                    turned_a, turned_b = turned_a / k_scale, turned_b / k_scale
                target = keys + page + (heads - HEADS)[:, None] * head_stride
                tl.store(target + low[None, :], turned_a.to(keys.dtype.element_ty))
                tl.store(target + high[None, :], turned_b.to(keys.dtype.element_ty))
        else:
            if SCALED:
                a, b = a / v_scale, b / v_scale
            target = values + page + (heads - HEADS - KV_HEADS)[:, None] * head_stride
            tl.store(target + low[None, :], a.to(values.dtype.element_ty))
            tl.store(target + high[None, :], b.to(values.dtype.element_ty))


def _heads_at_once(tokens: int, heads: int, kv_heads: int, invariant: bool, norm: bool) -> int:
    """With `invariant` it does not depend on the tokens. Nor on the heads, of which ranks have fewer, if there is a
    norm: its sum has another order in another group."""
    if norm if invariant else tokens <= 64:
        return 1  # more programs rather than longer ones: there are SMs to spare
    group = 1
    while group < 8 and heads % (2 * group) == 0 and kv_heads % (2 * group) == 0:
        group *= 2
    return group


def rope_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
    heads: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    interleaved: bool = False, k_scale: float = 1.0, v_scale: float = 1.0, invariant: bool = False,
    added: Tensor | None = None,
) -> None:  # fmt: skip
    """qkv [T, (heads + 2 kv_heads) · D]: queries are rotated in place, keys (rotated) and values go to
    keys, values [blocks, kv_heads, block_size, D] at flat `slots` (-1: nowhere). cos, sin: [positions, D / 2]. With
    `invariant` a token's bits do not depend on how many there are, nor a head's on the others. `added`: like qkv,
    added to it first.
    """
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    kv_heads, block_size, dim = keys.shape[1], keys.shape[2], keys.shape[3]
    group = _heads_at_once(tokens, heads, kv_heads, invariant, q_norm is not None)
    _kernel[(tokens, (heads + 2 * kv_heads) // group)](
        qkv, qkv if added is None else added, cos, sin, positions, slots, cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        keys, values, qkv.stride(0), keys.stride(0), keys.stride(1), eps, k_scale, v_scale, block_size,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, GROUP=group, NORM=q_norm is not None, INTERLEAVED=interleaved,
        SCALED=k_scale != 1.0 or v_scale != 1.0, ADD=added is not None,
        num_warps=1 if group * dim <= 256 else 4, **early(tokens <= EARLY_ROWS, qkv),
    )  # fmt: skip


@torch.library.custom_op("cumulo::rope_cache", mutates_args=("qkv", "keys", "values"))
def rope_cache_op(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
    heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
) -> None:  # fmt: skip
    rope_cache(qkv, cos, sin, positions, slots, keys, values, heads, q_norm, k_norm, eps, interleaved)


@rope_cache_op.register_fake
def _fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor,
    heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
) -> None:  # fmt: skip
    return None


def work(tokens: int, heads: int, kv_heads: int, dim: int, element_bytes: int) -> Work:
    numbers = tokens * (heads + 2 * kv_heads) * dim
    return Work(bytes=2 * numbers * element_bytes, flops=6 * tokens * (heads + kv_heads) * dim)


def bench_rows() -> Iterator[KernelRow]:
    for tokens, heads, kv_heads, normed in ((1, 16, 8, True), (256, 16, 8, True), (8192, 32, 8, False)):
        dim, blocks, size = 128, max(4, tokens // 32), 64
        width = (heads + 2 * kv_heads) * dim
        copies = copies_past_cache(tokens * width * 4, limit=16)
        qkv = [torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        keys = torch.zeros(blocks, kv_heads, size, dim, device="cuda", dtype=torch.bfloat16)
        values = torch.zeros_like(keys)
        angles = torch.arange(blocks * size, device="cuda")[:, None] * (
            1e-4 ** (torch.arange(dim // 2, device="cuda") / 64)
        )
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        slots = torch.randperm(blocks * size, device="cuda")[:tokens].int()
        norm = torch.rand(dim, device="cuda", dtype=torch.bfloat16) + 0.5 if normed else None
        wide = None if norm is None else norm.double()
        exact = reference(
            qkv[0].double(), cos.double(), sin.double(), slots, heads, kv_heads, wide, wide, 1e-6
        )
        first = qkv[0].clone()
        rope_cache(first, cos, sin, slots, slots, keys, values, heads, norm, norm, 1e-6)
        found = torch.cat((
            first.view(tokens, -1, dim)[:, :heads], keys.transpose(1, 2).flatten(0, 1)[slots.long()],
            values.transpose(1, 2).flatten(0, 1)[slots.long()]), 1)  # fmt: skip
        expected = torch.cat(exact, 1)
        yield KernelRow(
            "rope + norm + pages" if normed else "rope + pages", f"T={tokens} {heads}/{kv_heads} heads d={dim}",
            work(tokens, heads, kv_heads, dim, 2),
            graph_us(
                lambda i: rope_cache(qkv[i], cos, sin, slots, slots, keys, values, heads, norm, norm, 1e-6), copies
            ),
            error=float((found.double() - expected).norm() / expected.norm()),
        )  # fmt: skip
