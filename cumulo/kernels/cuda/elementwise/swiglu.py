"""SwiGLU (Shazeer 2020): silu(gate) · up from both side by side, between a layer's two feed-forward products.

Must move: two numbers in and one out per element; backward three in and two out.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _forward(gate_up, added, out, width, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        gate += tl.load(added + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(added + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _backward(gate_up, grad_out, grad, out, width, FORWARD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_out + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate = g * up * s * (1 + gate * (1 - s))
    d_up = g * gate * s
    tl.store(grad + row * 2 * width + columns, d_gate.to(grad.dtype.element_ty), mask=inside)
    tl.store(grad + row * 2 * width + width + columns, d_up.to(grad.dtype.element_ty), mask=inside)
    if FORWARD:
        tl.store(out + row * width + columns, (gate * s * up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, out: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """[T, 2F] contiguous -> [T, F]. `added`: like gate_up, added to it first."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _forward[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, gate_up if added is None else added, out, width, ADD=added is not None, BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out


def backward(gate_up: Tensor, grad_out: Tensor, out: Tensor | None = None) -> Tensor:
    """Gradient of gate_up [T, 2F], contiguous; `out` is filled with forward's result, for those who did not keep
    it."""
    grad = torch.empty_like(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if rows:
        _backward[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, grad_out.contiguous(), grad, grad if out is None else out, width, FORWARD=out is not None,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return grad
