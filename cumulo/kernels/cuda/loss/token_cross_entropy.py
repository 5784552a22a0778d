"""Cross-entropy of a linear layer's logits, a loss per token: gradients depend on what comes from above, so
backward computes the logits again. `linear_cross_entropy` calls it where nothing is summed.
"""

import torch
from torch import Tensor

from cumulo.kernels.cuda.loss.cross_entropy_rows import (
    WeightGradient,
    chunks,
    default_chunk_rows,
    launch_losses,
    logits_into,
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
