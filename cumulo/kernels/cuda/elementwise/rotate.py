"""Rotary positions for training: queries and keys are turned where they lie, and back in backward. `train.fused`
calls it between a layer's first product and attention.

Must move: queries and keys in and out once; backward the gradients of queries, keys and values in, and out once,
side by side as the product before wants them. Pairs are the halves of a head (Su et al. 2021, as Llama lays them
out); the arithmetic is in float32.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.timing import graph_us
from cumulo.kernels.cuda.work import KernelRow, Work


def reference(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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


@torch.library.custom_op("cumulo::rotate_", mutates_args=("qkv",))
def rotate_op(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> None:
    rotate_(qkv, cos, sin, heads, kv_heads)


@rotate_op.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> None:
    return None


@torch.library.custom_op("cumulo::rotated_back", mutates_args=())
def rotated_back_op(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated_back(grad_q, grad_k, grad_v, cos, sin)


@rotated_back_op.register_fake
def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, dim = grad_q.shape
    return grad_q.new_empty((tokens, (heads + 2 * grad_k.shape[1]) * dim))


def work(
    tokens: int, heads: int, kv_heads: int, dim: int, element_bytes: int, backward: bool = False
) -> Work:
    moved = (heads + (2 if backward else 1) * kv_heads) * dim
    return Work(bytes=2 * tokens * moved * element_bytes, flops=3 * tokens * (heads + kv_heads) * dim)


def bench_rows() -> Iterator[KernelRow]:
    tokens, heads, kv_heads, dim = 32768, 32, 8, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    angle = torch.rand(tokens, dim // 2, device="cuda") * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    states = qkv.view(tokens, -1, dim)[:, : heads + kv_heads]
    exact = reference(states.double(), cos.double(), sin.double())
    turned = qkv.clone()
    rotate_(turned, cos, sin, heads, kv_heads)
    found = turned.view(tokens, -1, dim)[:, : heads + kv_heads]
    error = float((found.double() - exact).norm() / exact.norm())  # before the timed runs turn it on
    yield KernelRow(
        "rotate", f"{tokens} tokens {heads}/{kv_heads} heads d={dim}", work(tokens, heads, kv_heads, dim, 2),
        graph_us(lambda _: rotate_(turned, cos, sin, heads, kv_heads)),
        {"torch": graph_us(lambda _: reference(states, cos, sin))},
        error=error,
    )  # fmt: skip
