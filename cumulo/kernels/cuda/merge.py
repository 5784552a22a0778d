"""merge: one attention out of two over disjoint keys, by their log-sum-exps. Context parallelism calls it.

Must read both outputs and write one: 3 * T * H * D numbers; a few FLOPs each, so memory is all that counts. One
program takes some rows, a row being one head of one token. A row that saw no key on a side has log-sum-exp −∞
there, and whatever its output holds is ignored.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow, Work


@triton.jit
def _merge(out_a, lse_a, out_b, lse_b, out, lse, rows, heads, a_token_stride, a_head_stride, b_token_stride,
           b_head_stride, out_token_stride, out_head_stride, DIM: tl.constexpr, COLUMNS: tl.constexpr,
           ROWS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    column = tl.arange(0, COLUMNS)
    mask = row_mask[:, None] & (column < DIM)[None, :]
    log_a = tl.load(lse_a + row, mask=row_mask, other=0.0)
    log_b = tl.load(lse_b + row, mask=row_mask, other=0.0)
    token, head = row // heads, row % heads
    a = tl.load(
        out_a + (token * a_token_stride + head * a_head_stride)[:, None] + column[None, :],
        mask=mask,
        other=0.0,
    )
    b = tl.load(
        out_b + (token * b_token_stride + head * b_head_stride)[:, None] + column[None, :],
        mask=mask,
        other=0.0,
    )
    top = tl.maximum(log_a, log_b)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(log_a - top), tl.exp(log_b - top)
    total = weight_a + weight_b
    share = 1.0 / tl.where(total > 0, total, 1.0)
    a = tl.where((weight_a > 0)[:, None], a.to(tl.float32) * (weight_a * share)[:, None], 0.0)
    b = tl.where((weight_b > 0)[:, None], b.to(tl.float32) * (weight_b * share)[:, None], 0.0)
    tl.store(
        out + (token * out_token_stride + head * out_head_stride)[:, None] + column[None, :],
        (a + b).to(out.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        lse + row,
        tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf")),
        mask=row_mask,
    )


def launch_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Outputs [T, H, D] (strided rows are fine), log-sum-exps [T, H] contiguous float32; out and lse may be
    a's.
    """
    tokens, heads, dim = out_a.shape
    columns = triton.next_power_of_2(dim)
    rows_each = max(1, 4096 // columns)
    _merge[(triton.cdiv(tokens * heads, rows_each),)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        tokens * heads,
        heads,
        out_a.stride(0),
        out_a.stride(1),
        out_b.stride(0),
        out_b.stride(1),
        out.stride(0),
        out.stride(1),
        DIM=dim,
        COLUMNS=columns,
        ROWS=rows_each,
        num_warps=4,
    )


@torch.library.custom_op("cumulo::merge_attention", mutates_args=())
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention over the keys of both sides; differentiable."""
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device)
    if out.numel():
        launch_merge(out_a, lse_a.contiguous(), out_b, lse_b.contiguous(), out, lse)
    return out, lse


@merge.register_fake
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """With w_i = exp(lse_i − lse): ∂out/∂out_i = w_i, ∂lse/∂lse_i = w_i, ∂out/∂lse_i = w_i (out_i − out)."""
    out_a, lse_a, out_b, lse_b, out, lse = ctx.saved_tensors
    grads = []
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(part_lse == float("-inf"), 0.0, torch.exp(part_lse - lse))
        difference = (part.float() - out.float()).masked_fill(weight[..., None] == 0, 0.0)
        grads.append((grad_out.float() * weight[..., None]).to(part.dtype))
        grads.append(weight * (grad_lse + (grad_out.float() * difference).sum(-1)))
    return grads[0], grads[1], grads[2], grads[3]


merge.register_autograd(_backward, setup_context=_keep)


def reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    lse = torch.logaddexp(lse_a, lse_b)
    none = lse == float("-inf")
    shares = [
        torch.where(none, 0.0, torch.exp(part - lse.masked_fill(none, 0.0)))[..., None]
        for part in (lse_a, lse_b)
    ]
    parts = [
        torch.where(share > 0, out.to(share.dtype) * share, 0.0)
        for out, share in zip((out_a, out_b), shares, strict=True)
    ]
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def work(tokens: int, heads: int, dim: int, element_bytes: int = 2) -> Work:
    return Work(bytes=3 * tokens * heads * (dim * element_bytes + 4), flops=tokens * heads * (4 * dim + 8))


def bench_rows() -> Iterator[KernelRow]:
    tokens, heads, dim = 8192, 32, 128
    moved = work(tokens, heads, dim)
    copies = copies_past_cache(moved.bytes)
    sets = [
        [
            torch.randn((tokens, heads, dim), device="cuda", dtype=torch.bfloat16) if index % 2 == 0
            else torch.randn((tokens, heads), device="cuda")
            for index in range(6)
        ]
        for _ in range(copies)
    ]  # fmt: skip
    us = graph_us(lambda i: launch_merge(*sets[i]), copies)
    *inputs, out, _ = sets[0]
    launch_merge(*sets[0])
    exact, _ = reference(*(part.double() for part in inputs))
    error = float((out.double() - exact).norm() / exact.norm())
    yield KernelRow("merge_attention", f"T={tokens} {heads} heads d={dim}", moved, us, error=error)
