"""Rotate queries and keys, norm their heads first where the model does, and write keys and values to their pages:
everything between the qkv product and attention, in one kernel.

Must move: queries in and out, keys and values in and out: 2 · (heads + 2 · kv_heads) · head_dim numbers per token.
`rotate_` is the same for training, in place and without pages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.early import EARLY_ROWS, early, wait_for_kernel_ahead


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
            head_stride, eps, block_size, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
            DIM: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
            ADD: tl.constexpr, EARLY: tl.constexpr = 0):  # fmt: skip
    wait_for_kernel_ahead(EARLY)
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
                target = keys + page + (heads - HEADS)[:, None] * head_stride
                tl.store(target + low[None, :], turned_a.to(keys.dtype.element_ty))
                tl.store(target + high[None, :], turned_b.to(keys.dtype.element_ty))
        else:
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
    interleaved: bool = False, invariant: bool = False, added: Tensor | None = None,
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
        keys, values, qkv.stride(0), keys.stride(0), keys.stride(1), eps, block_size,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, GROUP=group, NORM=q_norm is not None, INTERLEAVED=interleaved,
        ADD=added is not None,
        num_warps=1 if group * dim <= 256 else 4, **early(tokens <= EARLY_ROWS, qkv),
    )  # fmt: skip


def rotate_reference(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """states [T, N, D], cos and sin [T, D / 2]."""
    first, second = states.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@triton.jit
def _turn(qkv, cos, sin, row_stride, TURNED: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """One token: the first TURNED heads of its row, in place."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < TURNED) & (pair < HALF)
    place = qkv + row * row_stride + head * (2 * HALF) + pair
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    tl.store(place, (first * c - second * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * c + first * s).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _part_back(grad, packed, row, c, s, row_stride, head_stride, offset, COUNT: tl.constexpr, TURN: tl.constexpr,
               HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < COUNT) & (pair < HALF)
    source = grad + row * row_stride + head * head_stride + pair
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if TURN:
        first, second = first * c + second * s, second * c - first * s
    place = packed + offset + head * (2 * HALF) + pair
    tl.store(place, first.to(packed.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(packed.dtype.element_ty), mask=inside)


@triton.jit
def _turn_back(grad_q, grad_k, grad_v, packed, cos, sin, q_row, q_head, k_row, k_head, v_row, v_head,
               QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, Q_HEADS: tl.constexpr,
               K_HEADS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)[None, :]
    c = tl.load(cos + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    packed += row * ((QUERIES + 2 * KEYS) * 2 * HALF)
    _part_back(grad_q, packed, row, c, s, q_row, q_head, 0, QUERIES, True, HALF, Q_HEADS, BLOCK)
    _part_back(grad_k, packed, row, c, s, k_row, k_head, QUERIES * 2 * HALF, KEYS, True, HALF, K_HEADS, BLOCK)
    _part_back(grad_v, packed, row, c, s, v_row, v_head, (QUERIES + KEYS) * 2 * HALF, KEYS, False, HALF, K_HEADS,
               BLOCK)  # fmt: skip


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> None:
    """Turn the queries and keys of qkv [T, (heads + 2 · kv_heads) · D] in place; cos and sin [T, D / 2]."""
    half = cos.shape[1]
    if len(qkv):
        _turn[(len(qkv),)](
            qkv, cos, sin, qkv.stride(0), TURNED=heads + kv_heads, HALF=half,
            HEADS=triton.next_power_of_2(heads + kv_heads), BLOCK=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip


def rotated_back(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of queries [T, H, D], keys and values [T, KV, D] -> of what `rotate_` was given, side by side."""
    tokens, heads, dim = grad_q.shape
    kv_heads = grad_k.shape[1]
    packed = torch.empty((tokens, (heads + 2 * kv_heads) * dim), dtype=grad_q.dtype, device=grad_q.device)
    grads = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (grad_q, grad_k, grad_v)]
    if tokens:
        _turn_back[(tokens,)](
            *grads, packed, cos, sin, *(stride for grad in grads for stride in grad.stride()[:2]),
            QUERIES=heads, KEYS=kv_heads, HALF=dim // 2, Q_HEADS=triton.next_power_of_2(heads),
            K_HEADS=triton.next_power_of_2(kv_heads), BLOCK=triton.next_power_of_2(dim // 2), num_warps=4,
        )  # fmt: skip
    return packed
