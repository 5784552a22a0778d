"""A layer's operations for a GPU, in pieces that move and keep little. `TrainingAttention` and
`TrainingFeedForward` call them where their matrices are whole, and import them then: without a GPU there need be no
Triton.

Norm and gate are one kernel each, and so is what follows them in backward, which also computes their results again
for the weights' gradients: of a layer only its input, queries, keys and values, attention's result and the gate's
input are kept. Residuals are added by the products and by the norms' gradients.
"""

from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cuda.elementwise.rms_norm import backward as norm_backward
from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.elementwise.rope_cache import rotate_, rotated_back
from cumulo.kernels.cuda.elementwise.swiglu import backward as gate_backward
from cumulo.kernels.cuda.elementwise.swiglu import swiglu
from cumulo.train.model.arithmetic import Arithmetic


def normed_product(
    x: Tensor, norm: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """x [T, H], unchanged, for the residual; and the norm of x times weightᵀ [N, H]."""
    return _NormedProduct.apply(x, norm, weight, eps, arithmetic)  # type: ignore[no-untyped-call, no-any-return]


def gated_product(residual: Tensor, gate_up: Tensor, weight: Tensor, arithmetic: Arithmetic) -> Tensor:
    """residual + (silu(gate) · up) weightᵀ, from gate and up side by side."""
    return _GatedProduct.apply(residual, gate_up, weight, arithmetic)  # type: ignore[no-untyped-call, no-any-return]


def rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D] and keys [T, KV, D] turned by their positions, and the values: views of `qkv`, which is
    overwritten. cos and sin [T, D / 2]."""
    return _Rotated.apply(qkv, cos, sin, heads, kv_heads)  # type: ignore[no-untyped-call, no-any-return]


class _NormedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic
    ) -> tuple[Tensor, Tensor]:
        y, kept = arithmetic.forward(rms_norm(x, norm, eps), weight, None)
        ctx.save_for_backward(x, norm, weight, *kept)
        ctx.eps, ctx.arithmetic = eps, arithmetic
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        past, grad = grads
        x, norm, weight, *kept = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        inner, prepared = arithmetic.backward_input(grad, weight, kept)
        normed = None if arithmetic.keeps_inputs else torch.empty_like(x)
        grad_x, grad_norm = norm_backward(x, norm, inner, ctx.eps, added=past, normed=normed)
        del inner
        grad_weight = (
            arithmetic.backward_weight(prepared, normed, weight, kept) if ctx.needs_input_grad[2] else None
        )
        return grad_x, grad_norm, grad_weight, None, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, gate_up: Tensor, weight: Tensor, arithmetic: Arithmetic
    ) -> Tensor:
        y, kept = arithmetic.forward(swiglu(gate_up), weight, residual)
        ctx.save_for_backward(gate_up, weight, *kept)
        ctx.arithmetic = arithmetic
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        gate_up, weight, *kept = ctx.saved_tensors
        arithmetic: Arithmetic = ctx.arithmetic
        inner, prepared = arithmetic.backward_input(grad, weight, kept)
        gated = None if arithmetic.keeps_inputs else torch.empty_like(inner)
        grad_gate_up = gate_backward(gate_up, inner, out=gated)
        del inner
        grad_weight = (
            arithmetic.backward_weight(prepared, gated, weight, kept) if ctx.needs_input_grad[2] else None
        )
        return grad, grad_gate_up, grad_weight, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotate_(qkv, cos, sin, heads, kv_heads)
        ctx.save_for_backward(cos, sin)
        states = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
        query, key, value = states.split((heads, kv_heads, kv_heads), 1)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return rotated_back(*grads, *ctx.saved_tensors), None, None, None, None
