"""Some rows of logits at a time: into losses and, in place, into their own gradient; and what the gradient of the
weight adds up to over them. `linear_cross_entropy` and `token_cross_entropy` are made of it.

Loss of a row z with target y: lse − (1 − s) z_y − s · mean(z) + c · lse², where s smooths the label (Szegedy et al.
2016, section 7) and c keeps the logits' scale in check (z-loss: Chowdhery et al. 2022, section 5).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.attention.split_merge import LN_2, LOG2_E

_BLOCK, _WARPS = 4096, 16
_LOGIT_BYTES = 512 << 20  # of a chunk, or more on a large GPU: the weight's gradient is summed once a chunk
_LOGIT_SHARE = 1 / 64  # of the GPU's memory


@triton.jit
def _losses(logits, targets, losses, log_sums, upstream, row_stride, vocabulary, ignore_index, smoothing, z_loss,
            HAS_LOG_SUM: tl.constexpr, GRADIENT: tl.constexpr, HAS_UPSTREAM: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """One row: its loss and log-sum-exp, and then each logit replaced by its derivative."""
    row = tl.program_id(0)
    target = tl.load(targets + row)
    kept = target != ignore_index
    logits += row.to(tl.int64) * row_stride
    column = tl.arange(0, BLOCK)
    if HAS_LOG_SUM:
        log_sum = tl.load(log_sums + row)
    else:
        # Every lane keeps a running softmax of its own; they are merged once, at the end of the row.
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + column < vocabulary
            z = tl.load(
                logits + start + column, mask=inside, other=float("-inf"), eviction_policy="evict_last"
            ).to(tl.float32)
            new_top = tl.maximum(top, z, propagate_nan=tl.PropagateNan.ALL)
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = weight * tl.exp2((top - safe_top) * LOG2_E) + tl.exp2((z - safe_top) * LOG2_E)
            total += tl.where(inside, z, 0.0)
            top = new_top
        row_top = tl.max(top, 0)
        row_weight = tl.sum(weight * tl.exp2((top - row_top) * LOG2_E), 0)
        log_sum = row_top + tl.log2(row_weight) * LN_2
        hit = tl.load(logits + tl.where(kept, target, 0)).to(tl.float32)
        loss = log_sum - (1.0 - smoothing) * hit - smoothing * (tl.sum(total, 0) / vocabulary)
        loss += z_loss * log_sum * log_sum
        tl.store(losses + row, tl.where(kept, loss, 0.0))
        tl.store(log_sums + row, log_sum)
    if GRADIENT:
        tl.debug_barrier()  # the target's logit is read before anybody overwrites it
        share = 1.0 + 2.0 * z_loss * log_sum
        factor = tl.where(kept, 1.0, 0.0)
        if HAS_UPSTREAM:
            factor = factor * tl.load(upstream + row)
        for start in range(0, vocabulary, BLOCK):
            inside = start + column < vocabulary
            z = tl.load(logits + start + column, mask=inside, other=0.0, eviction_policy="evict_first")
            p = tl.exp2((z.to(tl.float32) - log_sum) * LOG2_E)
            d = p * share - smoothing / vocabulary
            d = tl.where(start + column == target, d - (1.0 - smoothing), d)
            d = tl.where(kept, d * factor, 0.0)
            tl.store(logits + start + column, d.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _times(x, scale, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < size, other=0.0).to(tl.float32) * tl.load(scale).to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=index < size)


def scaled_into(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """x · scale, one number on the device, in float32: torch would round it to x's type first."""
    if x.numel():
        _times[(triton.cdiv(x.numel(), _BLOCK),)](x, scale, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


def launch_losses(
    logits: Tensor, targets: Tensor, losses: Tensor, log_sums: Tensor, upstream: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, has_log_sum: bool, gradient: bool,
) -> None:  # fmt: skip
    rows, vocabulary = logits.shape
    _losses[(rows,)](
        logits, targets, losses, log_sums, losses if upstream is None else upstream, logits.stride(0), vocabulary,
        ignore_index, label_smoothing, z_loss, HAS_LOG_SUM=has_log_sum, GRADIENT=gradient,
        HAS_UPSTREAM=upstream is not None, BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=_WARPS,
    )  # fmt: skip


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


class WeightGradient:
    """Σ over chunks of dlogitsᵀ·x: in float32 when there is more than one, so that chunks do not cost bits."""

    def __init__(self, weight: Tensor, chunks: int) -> None:
        wide = weight.dtype if chunks == 1 or weight.dtype == torch.float64 else torch.float32
        self.dtype = weight.dtype
        self.total = torch.empty(weight.shape, dtype=wide, device=weight.device)
        self.empty = True

    def add(self, grad_logits: Tensor, x: Tensor) -> None:
        left = grad_logits.t()
        if self.total.dtype == x.dtype:
            if self.empty:
                torch.mm(left, x, out=self.total)
            else:
                self.total.addmm_(left, x)
        elif x.is_cuda:  # the library adds half-precision products onto a float32 matrix while it stores
            if self.empty:
                torch.ops.aten.mm.dtype_out(left, x, torch.float32, out=self.total)
            else:
                torch.ops.aten.addmm.dtype_out(self.total, left, x, torch.float32, out=self.total)
        elif self.empty:
            self.total.copy_(left.float() @ x.float())
        else:
            self.total += left.float() @ x.float()
        self.empty = False

    def result(self, scale: Tensor | None) -> Tensor:
        if self.empty:
            self.total.zero_()
        if scale is None:
            return self.total.to(self.dtype)
        same = self.total.dtype == self.dtype
        return scaled_into(
            self.total, scale, self.total if same else torch.empty_like(self.total, dtype=self.dtype)
        )


def chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def logits_into(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=buffer[: len(x)])
