"""Cross-entropy of a linear layer's logits, which never exist all at once: the end of a model in training.

Must compute 6 · T · V · H FLOPs (the logits, and two products for the gradients) and move x, the weight and their
gradients once; [T, V] logits and their gradient would be the largest tensors of a training step. Some rows at a
time: the library multiplies, one kernel turns the logits into losses and, in place, into their own gradient, and
the library multiplies twice more. So with a mean or a sum the gradients are ready when the loss is, and backward
only scales them. With one loss per token they depend on what comes from above, and backward computes the logits
again (8 · T · V · H).

Loss of a row z with target y: lse − (1 − s) z_y − s · mean(z) + c · lse², where s smooths the label (Szegedy et al.
2016, section 7) and c keeps the logits' scale in check (z-loss: Chowdhery et al. 2022, section 5).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.split_merge import LN_2, LOG2_E
from cumulo.kernels.cuda.work import Work

_BLOCK = 4096
_LOGIT_BYTES = 512 << 20  # of a chunk: large enough that its products run at full speed


def reference(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    logits = F.linear(x, weight)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        wide, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    kept = targets != ignore_index
    losses = losses + z_loss * wide.logsumexp(-1).square() * kept
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / kept.sum()


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


def _scaled(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """x · scale, one number on the device, in float32: torch would round it to x's type first."""
    if x.numel():
        _times[(triton.cdiv(x.numel(), _BLOCK),)](x, scale, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


@torch.library.custom_op("cumulo::scaled", mutates_args=())
def scaled_op(x: Tensor, scale: Tensor) -> Tensor:
    return _scaled(x, scale, torch.empty_like(x))


@scaled_op.register_fake
def _fake_scaled(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def _launch(
    logits: Tensor, targets: Tensor, losses: Tensor, log_sums: Tensor, upstream: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, has_log_sum: bool, gradient: bool,
) -> None:  # fmt: skip
    rows, vocabulary = logits.shape
    _losses[(rows,)](
        logits, targets, losses, log_sums, losses if upstream is None else upstream, logits.stride(0), vocabulary,
        ignore_index, label_smoothing, z_loss, HAS_LOG_SUM=has_log_sum, GRADIENT=gradient,
        HAS_UPSTREAM=upstream is not None, BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip


def default_chunk_rows(rows: int, vocabulary: int, element_bytes: int) -> int:
    """As many as _LOGIT_BYTES hold, in whole tiles of the library's, and the chunks about alike."""
    most = max(256, _LOGIT_BYTES // (vocabulary * element_bytes))
    chunks = max(1, -(-rows // most))
    return max(1, min(rows, -(-rows // chunks // 128) * 128 if chunks > 1 else rows))


class _WeightGradient:
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
        return _scaled(
            self.total, scale, self.total if same else torch.empty_like(self.total, dtype=self.dtype)
        )


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=buffer[: len(x)])


# -- a mean or a sum: gradients come with the loss --------------------------------------------------------------
@torch.library.custom_op("cumulo::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    mean: bool,
    gradients: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (float32), gradient of x, gradient of the weight (both empty unless asked for)."""
    x = x.contiguous()
    rows, vocabulary = len(x), len(weight)
    losses, log_sums = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    scale = 1.0 / (targets != ignore_index).sum().float() if mean else None
    grad_x = torch.empty(x.shape if gradients else (0,), dtype=x.dtype, device=x.device)
    size = chunk_rows or default_chunk_rows(rows, vocabulary, x.element_size())
    parts = _chunks(rows, size)
    total = _WeightGradient(weight, len(parts)) if gradients else None
    buffer = torch.empty((min(size, rows), vocabulary), dtype=x.dtype, device=x.device)
    for part in parts:
        logits = _logits(x[part], weight, buffer)
        _launch(
            logits, targets[part], losses[part], log_sums[part], None, ignore_index, label_smoothing, z_loss,
            False, gradients,
        )  # fmt: skip
        if total is not None:
            torch.mm(logits, weight, out=grad_x[part])
            total.add(logits, x[part])
    del buffer
    loss = losses.sum()
    if scale is not None:
        loss = loss * scale
        _scaled(grad_x, scale, grad_x)
    grad_weight = torch.empty(0, dtype=weight.dtype, device=x.device)
    return loss, grad_x, grad_weight if total is None else total.result(scale)


@linear_cross_entropy_op.register_fake
def _fake(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    mean: bool,
    gradients: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty((), dtype=torch.float32, device=x.device),
        torch.empty(x.shape if gradients else (0,), dtype=x.dtype, device=x.device),
        torch.empty(weight.shape if gradients else (0,), dtype=weight.dtype, device=x.device),
    )


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, upstream: Tensor | None, *unused: Tensor | None):  # type: ignore[no-untyped-def]
    if upstream is None:
        return (None,) * 9
    grad_x, grad_weight = ctx.saved_tensors
    scaled = (
        torch.ops.cumulo.scaled(grad, upstream) if needed else None
        for grad, needed in zip((grad_x, grad_weight), ctx.needs_input_grad, strict=False)
    )
    return (*scaled, *(None,) * 7)


linear_cross_entropy_op.register_autograd(_differentiate, setup_context=_keep)


# -- a loss per token: logits are computed again for the gradients ----------------------------------------------
@torch.library.custom_op("cumulo::token_cross_entropy", mutates_args=())
def token_cross_entropy_op(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps [T], float32."""
    x = x.contiguous()
    rows, vocabulary = len(x), len(weight)
    losses, log_sums = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    size = chunk_rows or default_chunk_rows(rows, vocabulary, x.element_size())
    buffer = torch.empty((min(size, rows), vocabulary), dtype=x.dtype, device=x.device)
    for part in _chunks(rows, size):
        _launch(
            _logits(x[part], weight, buffer), targets[part], losses[part], log_sums[part], None, ignore_index,
            label_smoothing, z_loss, False, False,
        )  # fmt: skip
    return losses, log_sums


@token_cross_entropy_op.register_fake
def _fake_token(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(len(x), dtype=torch.float32, device=x.device),
        torch.empty(len(x), dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op("cumulo::token_cross_entropy_backward", mutates_args=())
def token_cross_entropy_backward_op(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    upstream: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    x, upstream = x.contiguous(), upstream.float().contiguous()
    rows, vocabulary = len(x), len(weight)
    size = chunk_rows or default_chunk_rows(rows, vocabulary, x.element_size())
    parts = _chunks(rows, size)
    grad_x, total = torch.empty_like(x), _WeightGradient(weight, len(parts))
    buffer = torch.empty((min(size, rows), vocabulary), dtype=x.dtype, device=x.device)
    for part in parts:
        logits = _logits(x[part], weight, buffer)
        _launch(
            logits, targets[part], upstream[part], log_sums[part], upstream[part], ignore_index, label_smoothing,
            z_loss, True, True,
        )  # fmt: skip
        torch.mm(logits, weight, out=grad_x[part])
        total.add(logits, x[part])
    return grad_x, total.result(None)


@token_cross_entropy_backward_op.register_fake
def _fake_token_backward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    upstream: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _keep_token(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, targets, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, targets, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_token(ctx, upstream: Tensor | None, *unused: Tensor | None):  # type: ignore[no-untyped-def]
    if upstream is None:
        return (None,) * 7
    x, weight, targets, log_sums = ctx.saved_tensors
    grads = torch.ops.cumulo.token_cross_entropy_backward(
        x, weight, targets, log_sums, upstream, *ctx.settings
    )
    return (*grads, *(None,) * 5)


token_cross_entropy_op.register_autograd(_differentiate_token, setup_context=_keep_token)


# -- the door -------------------------------------------------------------------------------------------------
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int = 0,
) -> Tensor:
    """Cross-entropy of x [T, H] times weightᵀ [V, H] against targets [T], in float32; differentiable in both.

    `reduction` "mean" (over targets that are not `ignore_index`), "sum" or "none" ([T]). `chunk_rows`: how many
    rows' logits exist at once; 0 chooses.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or targets.shape != x.shape[:1]:
        raise ValueError(
            f"cross-entropy of x {tuple(x.shape)} through a weight {tuple(weight.shape)} against targets "
            f"{tuple(targets.shape)}: they must be [T, H], [V, H] and [T]"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"a reduction '{reduction}' is not known: use mean, sum or none")
    if reduction == "none":
        return torch.ops.cumulo.token_cross_entropy(  # type: ignore[no-any-return]
            x, weight, targets, ignore_index, label_smoothing, z_loss, chunk_rows
        )[0]
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return torch.ops.cumulo.linear_cross_entropy(  # type: ignore[no-any-return]
        x, weight, targets, ignore_index, label_smoothing, z_loss, reduction == "mean", gradients, chunk_rows
    )[0]


def work(rows: int, vocabulary: int, hidden: int, gradients: bool = True, element_bytes: int = 2) -> Work:
    """With `gradients`, of forward and backward together."""
    inputs = (rows + vocabulary) * hidden * element_bytes
    products = 3 if gradients else 1
    return Work(
        bytes=inputs * (2 if gradients else 1) + 12 * rows, flops=2 * products * rows * vocabulary * hidden
    )
