"""Kernels after algorithms of other projects, typed anew; the back end was not built for them.

Fused attention (Triton's tutorial 06; Dao 2023), cross entropy that leaves the gradient in place (Liger-Kernel),
GeGLU forward and backward (Liger-Kernel), the chunked state-space scan (Mamba-2; Dao & Gu 2024), the recurrence of
gated linear attention (flash-linear-attention; Yang et al. 2024), one launch for several products (tutorial 08).
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tests.compile.backend.cases_language import same


@triton.jit
def _attend_inner(acc, weight, top, q, k_pointers, v_pointers, start_m, scale, offs_m, offs_n, N,
                  STAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):  # fmt: skip
    if STAGE == 1:
        low, high = 0, start_m * BM
    else:
        low, high = start_m * BM, tl.minimum((start_m + 1) * BM, N)
    k_pointers += low * D
    v_pointers += low * D
    for start in range(low, high, BN):
        start = tl.multiple_of(start, BN)
        live = start + offs_n < N
        k = tl.load(k_pointers, mask=live[None, :], other=0.0)
        s = tl.dot(q, k) * scale
        if STAGE == 2:
            s += tl.where((offs_m[:, None] >= start + offs_n[None, :]) & live[None, :], 0, -1.0e6)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.math.exp2(s - new_top[:, None])
        keep = tl.math.exp2(top - new_top)
        weight = weight * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        v = tl.load(v_pointers, mask=live[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
        top = new_top
        k_pointers += BN * D
        v_pointers += BN * D
    return acc, weight, top


@triton.jit
def _attention(Q, K, V, out, lse, scale, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    start_m, head = tl.program_id(0), tl.program_id(1)
    offs_m, offs_n, offs_d = start_m * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    base = head.to(tl.int64) * N * D
    q = tl.load(Q + base + offs_m[:, None] * D + offs_d[None, :], mask=offs_m[:, None] < N, other=0.0)
    k_pointers = K + base + offs_n[None, :] * D + offs_d[:, None]
    v_pointers = V + base + offs_n[:, None] * D + offs_d[None, :]
    top = tl.zeros([BM], tl.float32) - float("inf")
    weight = tl.zeros([BM], tl.float32) + 1.0
    acc = tl.zeros([BM, D], tl.float32)
    acc, weight, top = _attend_inner(acc, weight, top, q, k_pointers, v_pointers, start_m, scale * 1.44269504,
                                     offs_m, offs_n, N, 1, BM, BN, D)  # fmt: skip
    acc, weight, top = _attend_inner(acc, weight, top, q, k_pointers, v_pointers, start_m, scale * 1.44269504,
                                     offs_m, offs_n, N, 2, BM, BN, D)  # fmt: skip
    tl.store(lse + head * N + offs_m, top + tl.math.log2(weight), mask=offs_m < N)
    acc = acc / weight[:, None]
    tl.store(
        out + base + offs_m[:, None] * D + offs_d[None, :],
        acc.to(out.dtype.element_ty),
        mask=offs_m[:, None] < N,
    )


def case_fused_attention_as_in_the_tutorial():
    for N, D, dtype, tolerance in ((128, 32, torch.float32, 2e-5), (200, 64, torch.float16, 4e-3)):
        q, k, v = (torch.randn(3, N, D).to(dtype) for _ in range(3))
        out, lse = torch.empty_like(q), torch.empty(3, N)
        _attention[(triton.cdiv(N, 64), 3)](q, k, v, out, lse, 0.2, N, D=D, BM=64, BN=32)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), is_causal=True, scale=0.2
        )
        same(out, wanted, tolerance)


@triton.jit
def _cross_entropy(X, stride, Y, loss, columns, count, ignore, smoothing: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    y = tl.load(Y + row)
    if y == ignore:
        for i in range(0, columns, BLOCK):
            at = i + tl.arange(0, BLOCK)
            tl.store(X + at, 0.0, mask=at < columns)
        return
    m, d, total = float("-inf"), 0.0, 0.0
    hit = tl.load(X + y).cast(tl.float32)
    eps = smoothing / columns
    for i in range(0, columns, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < columns, other=float("-inf")).cast(tl.float32)
        block_max = tl.max(x)
        if smoothing > 0:
            total += tl.sum(tl.where(at < columns, -eps * x, 0.0))
        new = tl.maximum(m, block_max)
        d = d * tl.exp(m - new) + tl.sum(tl.exp(x - new))
        m = new
    log_sum = m + tl.log(d)
    for i in range(0, columns, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < columns, other=float("-inf")).cast(tl.float32)
        x = tl.exp(x - m) / d - eps
        x = tl.where(at != y, x, x - (1 - smoothing)) / count
        tl.store(X + at, x, mask=at < columns)
    tl.debug_barrier()
    result = log_sum - hit
    if smoothing > 0:
        result = result * (1 - smoothing) + total + smoothing * log_sum
    tl.store(loss + row, result / count)


def case_cross_entropy_with_its_gradient_in_place():
    for columns, smoothing in ((77, 0.0), (3000, 0.1)):
        x = torch.randn(9, columns, requires_grad=True)
        y = torch.randint(0, columns, (9,))
        y[4] = -100
        wanted = torch.nn.functional.cross_entropy(x, y, label_smoothing=smoothing)
        wanted.backward()
        work, loss = x.detach().clone(), torch.zeros(9)
        _cross_entropy[(9,)](work, columns, y, loss, columns, 8, -100, smoothing, BLOCK=1024)
        same(loss.sum(), wanted.detach(), 1e-5)
        same(work, x.grad, 1e-6)


@triton.jit
def _geglu(a, b, c, da, db, dc, stride, columns: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(a + row + at, mask=inside, other=0).to(tl.float32)
    y = tl.load(b + row + at, mask=inside, other=0)
    root: tl.constexpr = 0.7978845608028654
    t = libdevice.tanh(root * (x + 0.044715 * x * x * x))
    gelu = 0.5 * x * (1 + t)
    tl.store(c + row + at, gelu.to(y.dtype) * y, mask=inside)
    g = tl.load(dc + row + at, mask=inside, other=0)
    tl.store(db + row + at, g * gelu, mask=inside)
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (root * (1 + 3 * 0.044715 * x * x))
    tl.store(da + row + at, g * y * slope, mask=inside)


def case_geglu_and_its_gradients():
    a, b = (torch.randn(5, 300, requires_grad=True) for _ in range(2))
    g = torch.randn(5, 300)
    wanted = torch.nn.functional.gelu(a, approximate="tanh") * b
    wanted.backward(g)
    c, da, db = (torch.empty(5, 300) for _ in range(3))
    _geglu[(5,)](a.detach(), b.detach(), c, da, db, g, 300, columns=300, BLOCK=512)
    same(c, wanted.detach(), 1e-5)
    same(da, a.grad, 1e-5)
    same(db, b.grad, 1e-5)


@triton.jit
def _chunk_scan(x, dt, A, B, C, y, L, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr):
    head = tl.program_id(0)
    a = tl.load(A + head)
    t, p, n = tl.arange(0, CHUNK), tl.arange(0, P), tl.arange(0, N)
    state = tl.zeros((N, P), tl.float32)
    for start in range(0, L, CHUNK):
        live = start + t < L
        step = tl.load(dt + head * L + start + t, mask=live, other=0.0)
        decay = tl.cumsum(step * a, 0)
        xs = tl.load(x + (head * L + start + t)[:, None] * P + p[None, :], mask=live[:, None], other=0.0)
        bs = tl.load(B + (start + t)[:, None] * N + n[None, :], mask=live[:, None], other=0.0)
        cs = tl.load(C + (start + t)[:, None] * N + n[None, :], mask=live[:, None], other=0.0)
        xs = xs * step[:, None]
        scores = tl.dot(cs, tl.trans(bs))
        weight = tl.where(t[:, None] >= t[None, :], tl.exp(decay[:, None] - decay[None, :]), 0.0)
        out = tl.dot(scores * weight, xs) + tl.dot(cs, state) * tl.exp(decay)[:, None]
        tl.store(y + (head * L + start + t)[:, None] * P + p[None, :], out, mask=live[:, None])
        last = tl.sum(tl.where(t == CHUNK - 1, decay, 0.0), 0)
        state = state * tl.exp(last) + tl.dot(tl.trans(bs * tl.exp(last - decay)[:, None]), xs)


def case_the_chunked_scan_of_a_state_space_model():
    H, L, P, N = 3, 75, 16, 32
    x, dt, A = torch.randn(H, L, P), torch.rand(H, L), -torch.rand(H)
    B, C = torch.randn(L, N), torch.randn(L, N)
    y = torch.empty(H, L, P)
    _chunk_scan[(H,)](x, dt, A, B, C, y, L, P=P, N=N, CHUNK=32)
    state, wanted = torch.zeros(H, N, P), torch.empty(H, L, P)
    for t in range(L):
        state = state * torch.exp(dt[:, t] * A)[:, None, None]
        state = state + B[t][None, :, None] * (x[:, t] * dt[:, t, None])[:, None, :]
        wanted[:, t] = torch.einsum("n,hnp->hp", C[t], state)
    same(y, wanted, 2e-4)


@triton.jit
def _gated_recurrence(q, k, v, g, out, scale, T, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                      REVERSE: tl.constexpr):  # fmt: skip
    i_v, head = tl.program_id(0), tl.program_id(1)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    begin = head * T + ((T - 1) if REVERSE else 0)
    p_q, p_k, p_g = q + begin * K + o_k, k + begin * K + o_k, g + begin * K + o_k
    p_v, p_o = v + begin * V + o_v, out + begin * V + o_v
    h = tl.zeros([BV, K], dtype=tl.float32)
    for _ in range(T):
        b_k = tl.load(p_k).to(tl.float32)
        b_v = tl.load(p_v, mask=o_v < V, other=0).to(tl.float32)
        b_q = tl.load(p_q).to(tl.float32) * scale
        h = h * tl.exp(tl.load(p_g))[None, :] + b_k[None, :] * b_v[:, None]
        tl.store(p_o, tl.sum(h * b_q[None, :], 1).to(p_o.dtype.element_ty), mask=o_v < V)
        p_q += -K if REVERSE else K
        p_k += -K if REVERSE else K
        p_g += -K if REVERSE else K
        p_v += -V if REVERSE else V
        p_o += -V if REVERSE else V


def case_the_recurrence_of_gated_linear_attention():
    H, T, K, V = 2, 21, 32, 40
    q, k, v, g = torch.randn(H, T, K), torch.randn(H, T, K), torch.randn(H, T, V), -torch.rand(H, T, K)
    for reverse in (False, True):
        out = torch.empty(H, T, V)
        _gated_recurrence[(triton.cdiv(V, 16), H)](q, k, v, g, out, 0.3, T, K=K, V=V, BV=16, REVERSE=reverse)
        h, wanted = torch.zeros(H, K, V), torch.empty(H, T, V)
        for t in reversed(range(T)) if reverse else range(T):
            h = h * g[:, t].exp()[:, :, None] + k[:, t, :, None] * v[:, t, None, :]
            wanted[:, t] = torch.einsum("hk,hkv->hv", q[:, t] * 0.3, h)
        same(out, wanted, 1e-4)


@triton.jit
def _grouped(a_addresses, b_addresses, c_addresses, sizes, groups, PROGRAMS: tl.constexpr, B: tl.constexpr):
    tile = tl.program_id(0)
    before = 0
    for group in range(groups):
        M, N, K = tl.load(sizes + 3 * group), tl.load(sizes + 3 * group + 1), tl.load(sizes + 3 * group + 2)
        columns = tl.cdiv(N, B)
        tiles = tl.cdiv(M, B) * columns
        while tile >= before and tile < before + tiles:
            a = tl.load(a_addresses + group).to(tl.pointer_type(tl.float16))
            b = tl.load(b_addresses + group).to(tl.pointer_type(tl.float16))
            c = tl.load(c_addresses + group).to(tl.pointer_type(tl.float16))
            m = (tile - before) // columns * B + tl.arange(0, B)
            n = (tile - before) % columns * B + tl.arange(0, B)
            k = tl.arange(0, B)
            total = tl.zeros((B, B), tl.float32)
            left, right = a + m[:, None] * K + k[None, :], b + k[:, None] * N + n[None, :]
            for start in range(tl.cdiv(K, B)):
                x = tl.load(left, mask=(m[:, None] < M) & (start * B + k[None, :] < K), other=0.0)
                y = tl.load(right, mask=(start * B + k[:, None] < K) & (n[None, :] < N), other=0.0)
                total += tl.dot(x, y)
                left += B
                right += B * N
            tl.store(
                c + m[:, None] * N + n[None, :],
                total.to(tl.float16),
                mask=(m[:, None] < M) & (n[None, :] < N),
            )
            tile += PROGRAMS
        before += tiles


def case_one_launch_for_several_products():
    shapes = [(40, 50, 30), (16, 16, 16), (7, 90, 65)]
    a = [torch.randn(m, k).half() for m, _, k in shapes]
    b = [torch.randn(k, n).half() for _, n, k in shapes]
    c = [torch.zeros(m, n).half() for m, n, _ in shapes]
    addresses = [torch.tensor([x.data_ptr() for x in xs]) for xs in (a, b, c)]
    sizes = torch.tensor(shapes, dtype=torch.int32)
    _grouped[(4,)](*addresses, sizes, 3, PROGRAMS=4, B=16)
    for x, y, z in zip(a, b, c, strict=True):
        same(z, x.float() @ y.float(), 2e-2)
    assert math.isfinite(float(c[0].sum()))
