"""The package's own Triton kernels, launched as they are on a GPU, against their references. They return what they
computed, so that the interpreter's numbers can be compared. Played by test_backend.py."""

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

from cumulo.kernels.cuda.elementwise import rms_norm, rope_cache, swiglu
from cumulo.kernels.cuda.linear.invariant_matmul import invariant_matmul
from cumulo.kernels.cuda.linear.invariant_matmul import reference as product_reference
from cumulo.kernels.cuda.loss import linear_cross_entropy as loss
from tests.kernels.cuda.paged_case import PagedCase

TYPES = ((torch.float32, 1e-5), (torch.float16, 4e-3))


def same(found: Tensor, wanted: Tensor, tolerance: float) -> Tensor:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    return found


def case_rms_norm_with_and_without_a_residual():
    found = {}
    for dtype, tolerance in (*TYPES, (torch.bfloat16, 2e-2)):
        for size in (63, 1000):
            x, w, residual = (
                torch.randn(5, size).to(dtype),
                torch.randn(size).to(dtype),
                torch.randn(5, size).to(dtype),
            )
            out = same(rms_norm.rms_norm(x, w, 1e-6), rms_norm.reference(x, w, 1e-6), tolerance)
            summed = residual.clone()
            same(rms_norm.rms_norm(x, w, 1e-6, summed), rms_norm.reference(x, w, 1e-6, residual), tolerance)
            same(summed, residual + x, tolerance)
            picked = rms_norm.rms_norm(x, w, 1e-6, rows=torch.tensor([3, 1]))
            same(picked, rms_norm.reference(x[[3, 1]], w, 1e-6), tolerance)
            if dtype != torch.bfloat16:  # of which the interpreter is wrong
                found[f"{dtype}{size}"] = out
    return found


def case_rms_norm_backwards():
    x, w = torch.randn(37, 100, requires_grad=True), torch.randn(100, requires_grad=True)
    g = torch.randn(37, 100)
    rms_norm.reference(x, w, 1e-6).backward(g)
    grad_x, grad_w = rms_norm.backward(x.detach(), w.detach(), g, 1e-6)
    return {"x": same(grad_x, x.grad, 1e-4), "w": same(grad_w, w.grad, 1e-4)}


def case_swiglu_forwards_and_backwards():
    found = {}
    for dtype, tolerance in TYPES:
        x = torch.randn(3, 2 * 1500).to(dtype)
        found[str(dtype)] = same(swiglu.swiglu(x), swiglu.reference(x), tolerance)
    x, g = torch.randn(3, 700, requires_grad=True), torch.randn(3, 350)
    swiglu.reference(x).backward(g)
    return found | {"grad": same(swiglu.backward(x.detach(), g), x.grad, 1e-4)}


def case_rotary_embeddings_into_the_paged_cache():
    tokens, heads, kv_heads, dim = 5, 4, 2, 32
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    cos, sin = torch.randn(20, dim // 2), torch.randn(20, dim // 2)
    positions, slots = torch.randint(0, 20, (tokens,)), torch.tensor([3, 9, -1, 0, 17])
    found = {}
    for interleaved, normed in ((False, True), (True, False)):
        norms = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
        keys, values, turned = torch.zeros(5, kv_heads, 4, dim), torch.zeros(5, kv_heads, 4, dim), qkv.clone()
        q, k, v = rope_cache.reference(qkv, cos, sin, positions, heads, kv_heads, *norms, 1e-6, interleaved)
        rope_cache.rope_cache(
            turned, cos, sin, positions, slots, keys, values, heads, *norms, 1e-6, interleaved
        )
        live = slots >= 0
        same(turned.view(tokens, -1, dim)[:, :heads][live], q[live], 1e-5)
        at = slots[live]
        same(keys[at // 4, :, at % 4], k[live], 1e-5)
        same(values[at // 4, :, at % 4], v[live], 1e-5)
        found |= {f"q{interleaved}": turned, f"k{interleaved}": keys}
    return found


def case_cross_entropy_of_a_linear_layer_with_gradients():
    found = {}
    for vocabulary in (50, 5000):
        x, w = torch.randn(7, 30, requires_grad=True), torch.randn(vocabulary, 30, requires_grad=True)
        targets = torch.randint(0, vocabulary, (7,))
        targets[3] = -100
        wanted = loss.reference(x, w, targets)
        wanted.backward()
        grads, x.grad, w.grad = (x.grad, w.grad), None, None
        result = loss.linear_cross_entropy(x, w, targets)
        result.backward()
        found[f"{vocabulary}"] = same(result.detach(), wanted.detach(), 1e-4)
        found[f"x{vocabulary}"] = same(x.grad, grads[0], 1e-4)
        same(w.grad, grads[1], 1e-4)
    return found


def case_paged_decode_attention():
    found = {}
    for heads, dim, lengths in (((4, 2), 32, [1, 15, 16, 17, 200]), ((3, 1), 24, [70]), ((8, 2), 64, [333])):
        case = PagedCase([(1, length) for length in lengths], heads=heads[0], kv_heads=heads[1], dim=dim)
        found[f"{heads}{dim}"] = case.check()
    found["window"] = PagedCase([(1, 100), (1, 7)], dtype=torch.float32).check(window=20)
    found["chunk"] = PagedCase([(20, 50), (1, 9)]).check()
    return found


def case_products_that_do_not_depend_on_the_batch():
    x, w, bias = torch.randn(9, 200).half(), torch.randn(72, 200).half() * 0.1, torch.randn(72).half()
    return {"out": same(invariant_matmul(x, w, bias=bias), product_reference(x, w, bias), 2e-2)}


def case_norms_of_any_shape():
    @hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
    @hypothesis.given(st.integers(1, 9), st.integers(1, 300))
    def check(rows: int, size: int) -> None:
        x, w = torch.randn(rows, size), torch.randn(size)
        same(rms_norm.rms_norm(x, w, 1e-6), rms_norm.reference(x, w, 1e-6), 1e-5)

    check()
