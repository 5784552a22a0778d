"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024). Used by `optimizer.py`.

torch has a Muon for plain matrices; ours also takes the decoder's fused matrices apart (query, key and value are
three maps, not one) and treats stacked experts as the batch of matrices they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cumulo.train.decide.config import OptimizerConfig

# A quintic whose iteration drives singular values towards 1 from anywhere in (0, 1] (Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Whole(Protocol):
    """A matrix of which others have the rest."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def gather(self, own: Tensor) -> Tensor: ...

    def cut(self, whole: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class MuonMatrix:
    """One parameter: where it is, its momentum, and how many rows each of the maps fused into it has."""

    parameter: Tensor
    momentum: Tensor
    parts: tuple[int, ...]
    # Where this process has a part of the matrix only; `parts` are the whole one's.
    whole: Whole | None = None


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


class Muon:
    """A rule of the optimizer's."""

    def __init__(self, matrices: Mapping[str, MuonMatrix], config: OptimizerConfig) -> None:
        self.matrices, self.config = matrices, config

    def step(self, share: float) -> None:
        config = self.config
        rate = config.muon_learning_rate * share
        muon_step(list(self.matrices.values()), rate, config.muon_momentum, config.weight_decay)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.momentum": matrix.momentum
            for name, matrix in self.matrices.items()
            if matrix.momentum.numel()
        }

    def loaded(self) -> None:
        """They are the live tensors."""


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
        whole = nesterov if matrix.whole is None else matrix.whole.gather(nesterov)
        change = torch.cat([_change(part, dtype) for part in whole.split(matrix.parts, -2)], -2)
        own = change if matrix.whole is None else matrix.whole.cut(change).to(matrix.parameter.device)
        matrix.parameter.mul_(1 - learning_rate * weight_decay)
        matrix.parameter.sub_(own.to(matrix.parameter.dtype), alpha=learning_rate)


def _change(direction: Tensor, dtype: torch.dtype) -> Tensor:
    """The change of one map: its direction made orthogonal, longer for tall ones (Jordan 2024)."""
    rows, columns = direction.shape[-2:]
    return orthogonalise(direction, dtype).mul(max(1.0, rows / columns) ** 0.5)
