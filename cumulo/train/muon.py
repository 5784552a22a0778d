"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024). Used by `optimizer.py`.

torch has a Muon for plain matrices; ours also takes the decoder's fused matrices apart (query, key and value are
three maps, not one) and treats stacked experts as the batch of matrices they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A quintic whose iteration drives singular values towards 1 from anywhere in (0, 1] (Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


@dataclass(frozen=True, slots=True, eq=False)
class MuonMatrix:
    """One parameter: where it is, its momentum, and how many rows each of the maps fused into it has."""

    parameter: Tensor
    momentum: Tensor
    parts: tuple[int, ...]


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """U Vᵀ of the singular value decomposition, nearly: singular values end between 0.7 and 1.2. [..., M, N]."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if tall:
        x = x.mT
    return x


@torch.no_grad()
def muon_step(
    matrices: Sequence[MuonMatrix], learning_rate: float, momentum: float, weight_decay: float
) -> None:
    for matrix in matrices:
        gradient = matrix.parameter.grad
        if gradient is None:
            continue
        # Half precision suffices for a direction, and is faster where there are units for it.
        dtype = torch.bfloat16 if gradient.is_cuda else gradient.dtype
        matrix.momentum.lerp_(gradient, 1 - momentum)
        nesterov = gradient.lerp(matrix.momentum, momentum)
        matrix.parameter.mul_(1 - learning_rate * weight_decay)
        for part, direction in zip(
            matrix.parameter.split(matrix.parts, -2), nesterov.split(matrix.parts, -2), strict=True
        ):
            rows, columns = part.shape[-2:]
            scale = learning_rate * max(1.0, rows / columns) ** 0.5
            part.sub_(orthogonalise(direction, dtype).to(part.dtype), alpha=scale)
