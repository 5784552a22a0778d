"""Cross-entropy of a linear layer's logits, which never exist all at once: the end of a model in training.

Must compute 6 · T · V · H FLOPs (the logits, and two products for the gradients) and move x, the weight and their
gradients once; [T, V] logits and their gradient would be the largest tensors of a training step. Some rows at a
time: the library multiplies, one kernel turns the logits into losses and, in place, into their own gradient, and
the library multiplies twice more. So with a mean or a sum the gradients are ready when the loss is, and backward
only scales them. With one loss per token they depend on what comes from above, and backward computes the logits
again (8 · T · V · H).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cuda.loss.cross_entropy_rows import (
    WeightGradient,
    chunks,
    default_chunk_rows,
    launch_losses,
    logits_into,
    scaled_into,
)


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
    for part in chunks(rows, size):
        launch_losses(
            logits_into(x[part], weight, buffer), targets[part], losses[part], log_sums[part], None, ignore_index,
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
    parts = chunks(rows, size)
    grad_x, total = torch.empty_like(x), WeightGradient(weight, len(parts))
    buffer = torch.empty((min(size, rows), vocabulary), dtype=x.dtype, device=x.device)
    for part in parts:
        logits = logits_into(x[part], weight, buffer)
        launch_losses(
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


@torch.library.custom_op("cumulo::scaled", mutates_args=())
def scaled_op(x: Tensor, scale: Tensor) -> Tensor:
    return scaled_into(x, scale, torch.empty_like(x))


@scaled_op.register_fake
def _fake_scaled(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


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
    parts = chunks(rows, size)
    total = WeightGradient(weight, len(parts)) if gradients else None
    buffer = torch.empty((min(size, rows), vocabulary), dtype=x.dtype, device=x.device)
    for part in parts:
        logits = logits_into(x[part], weight, buffer)
        launch_losses(
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
        scaled_into(grad_x, scale, grad_x)
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
        losses: Tensor = token_cross_entropy_op(
            x, weight, targets, ignore_index, label_smoothing, z_loss, chunk_rows
        )[0]
        return losses
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return torch.ops.cumulo.linear_cross_entropy(  # type: ignore[no-any-return]
        x, weight, targets, ignore_index, label_smoothing, z_loss, reduction == "mean", gradients, chunk_rows
    )[0]
