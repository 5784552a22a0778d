"""Cross-entropy of a model's last product without all its logits at once. Called by `TrainingDecoder`.

On a GPU by kernels/cuda/loss/linear_cross_entropy.py; elsewhere by the same idea in torch: some rows at a time,
logits become the loss and at once their own gradient, so that backward only scales what is ready.
"""

from typing import Any

import torch
from torch import Tensor

from cumulo.ranks.tensor_parallel import VocabularySlice
from cumulo.train.data.packing import IGNORED

_LOGIT_BYTES = 32 << 20  # of a chunk: stays near the caches, and long enough for the products
_LOGIT_BYTES_GPU = 512 << 20  # of a chunk of a slice of the vocabulary: long enough to hide the exchange


def cross_entropy_sum(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: VocabularySlice | None = None
) -> Tensor:
    """Cross-entropy of x [T, H] · weightᵀ [V, H], summed over the targets [T] that are not IGNORED."""
    if x.is_cuda and vocabulary is None:
        from cumulo.kernels.cuda.loss.linear_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(x, weight, targets, ignore_index=IGNORED, reduction="sum")
    total: Tensor = _ChunkedCrossEntropy.apply(x, weight, targets, vocabulary)  # type: ignore[no-untyped-call]
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: VocabularySlice | None
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        limit_bytes = _LOGIT_BYTES_GPU if x.is_cuda else _LOGIT_BYTES
        rows = max(1, limit_bytes // (len(weight) * wide.itemsize))
        total = torch.zeros((), dtype=wide, device=x.device)
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            logits = (x[part] @ weight.T).to(wide)
            wanted, kept = targets[part].clamp(min=0), targets[part] != IGNORED
            minus_one = logits.new_full((len(wanted), 1), -1.0)
            log_sum = logits.logsumexp(-1)
            if vocabulary is None:
                found = logits.gather(-1, wanted[:, None])[:, 0]
            else:
                here = (wanted >= vocabulary.first) & (wanted < vocabulary.first + len(weight))
                wanted = (wanted - vocabulary.first).masked_fill(~here, 0)
                minus_one = minus_one * here[:, None]
                log_sum, found = vocabulary.merge(log_sum, logits.gather(-1, wanted[:, None])[:, 0] * here)
            total += ((log_sum - found) * kept).sum()
            if grad_x is None and grad_weight is None:
                continue
            # softmax minus one at the target, and nothing where the target is ignored
            gradient = logits.sub_(log_sum[:, None]).exp_()
            gradient.scatter_add_(1, wanted[:, None], minus_one)
            gradient.mul_(kept[:, None])
            if grad_x is not None:
                grad_x[part] = gradient.to(x.dtype) @ weight
            if grad_weight is not None:
                if x.is_cuda and x.dtype != wide:  # whose matrix units take half types only, and sum wide
                    grad_weight += gradient.to(x.dtype).T @ x[part]
                else:
                    grad_weight.addmm_(gradient.T, x[part].to(wide))
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = upstream[0]
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_weight is None else (grad_weight * scale).to(ctx.dtype),
            None,
            None,
        )
