"""Cross-entropy of a linear layer's logits, which never exist all at once: the end of a model in training.

Must compute 6 · T · V · H FLOPs (the logits, and two products for the gradients) and move x, the weight and their
gradients once; [T, V] logits and their gradient would be the largest tensors of a training step. Some rows at a
time: the library multiplies, one kernel turns the logits into losses and, in place, into their own gradient, and
the library multiplies twice more. So the gradients are ready when the loss is, and backward only scales them.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.attention.split_merge import LN_2, LOG2_E

_BLOCK, _WARPS = 4096, 16
_LOGIT_BYTES = 512 << 20  # of a chunk, or more on a large GPU: the weight's gradient is summed once a chunk
_LOGIT_SHARE = 1 / 64  # of the GPU's memory


def reference(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    logits = F.linear(x, weight)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="sum")


@triton.jit
def _losses(logits, targets, losses, row_stride, vocabulary, ignore_index, GRADIENT: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """One row: its loss, and then each logit replaced by its derivative."""
    row = tl.program_id(0)
    target = tl.load(targets + row)
    kept = target != ignore_index
    logits += row.to(tl.int64) * row_stride
    column = tl.arange(0, BLOCK)
    # Every lane keeps a running softmax of its own; they are merged once, at the end of the row.
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        z = tl.load(
            logits + start + column, mask=inside, other=float("-inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        new_top = tl.maximum(top, z, propagate_nan=tl.PropagateNan.ALL)
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = weight * tl.exp2((top - safe_top) * LOG2_E) + tl.exp2((z - safe_top) * LOG2_E)
        top = new_top
    row_top = tl.max(top, 0)
    row_weight = tl.sum(weight * tl.exp2((top - row_top) * LOG2_E), 0)
    log_sum = row_top + tl.log2(row_weight) * LN_2
    hit = tl.load(logits + tl.where(kept, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(kept, log_sum - hit, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # the target's logit is read before anybody overwrites it
        for start in range(0, vocabulary, BLOCK):
            inside = start + column < vocabulary
            z = tl.load(logits + start + column, mask=inside, other=0.0, eviction_policy="evict_first")
            p = tl.exp2((z.to(tl.float32) - log_sum) * LOG2_E)
            d = tl.where(start + column == target, p - 1.0, p)
            d = tl.where(kept, d, 0.0)
            tl.store(logits + start + column, d.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _times(x, scale, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < size, other=0.0).to(tl.float32) * tl.load(scale).to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=index < size)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """x · scale, one number on the device, in float32: torch would round it to x's type first."""
    out = torch.empty_like(x)
    if x.numel():
        _times[(triton.cdiv(x.numel(), _BLOCK),)](x, scale, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


@cache
def logit_bytes() -> int:
    """The bytes of a chunk's logits."""
    if not torch.cuda.is_available():
        return _LOGIT_BYTES
    return max(_LOGIT_BYTES, int(torch.cuda.get_device_properties().total_memory * _LOGIT_SHARE))


def default_chunk_rows(rows: int, vocabulary: int, element_bytes: int) -> int:
    """As many as a chunk's bytes hold, in whole tiles of the library's, and the chunks about alike."""
    most = max(256, logit_bytes() // (vocabulary * element_bytes))
    chunks = max(1, -(-rows // most))
    return max(1, min(rows, -(-rows // chunks // 128) * 128 if chunks > 1 else rows))


def _add_product(total: Tensor, left: Tensor, x: Tensor) -> None:
    """total += left · x; a wide total keeps its bits."""
    if total.dtype == x.dtype:
        total.addmm_(left, x)
    elif x.is_cuda:  # the library adds half-precision products onto a float32 matrix while it stores
        torch.ops.aten.addmm.dtype_out(total, left, x, torch.float32, out=total)
    else:
        total += left.float() @ x.float()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, size: int, gradients: bool
    ) -> Tensor:
        x = x.contiguous()
        rows, vocabulary = len(x), len(weight)
        losses = torch.empty(rows, dtype=torch.float32, device=x.device)
        buffer = torch.empty((min(size, rows), vocabulary), dtype=x.dtype, device=x.device)
        grad_x = torch.empty_like(x) if gradients else None
        # The sum over chunks is wide where there is more than one, so that chunks do not cost bits.
        wide = weight.dtype if rows <= size else torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if gradients else None
        for start in range(0, rows, size):
            part = slice(start, start + size)
            logits = torch.mm(x[part], weight.t(), out=buffer[: len(x[part])])
            _losses[(len(logits),)](
                logits, targets[part], losses[part], logits.stride(0), vocabulary, ignore_index,
                GRADIENT=gradients, BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=_WARPS,
            )  # fmt: skip
            if grad_x is not None and grad_weight is not None:
                torch.mm(logits, weight, out=grad_x[part])
                _add_product(grad_weight, logits.t(), x[part])
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.to(weight.dtype))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = (
            _scaled(grad, upstream[0]) if needed else None
            for grad, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return grad_x, grad_weight, None, None, None, None


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, chunk_rows: int = 0
) -> Tensor:
    """Cross-entropy of x [T, H] times weightᵀ [V, H], summed over the targets [T] that are not `ignore_index`, in
    float32; differentiable in both. `chunk_rows`: how many rows' logits exist at once; 0 chooses."""
    size = chunk_rows or default_chunk_rows(len(x), len(weight), x.element_size())
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(x, weight, targets, ignore_index, size, gradients)  # type: ignore[no-untyped-call, no-any-return]
