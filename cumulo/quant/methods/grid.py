"""Grid: the whole numbers that weights of a group are rounded to, and the scale and zero point that map them. Used
by round to nearest, AWQ and GPTQ."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.models.files.quantised.matrices import IntegerMatrix


@dataclass(frozen=True, slots=True)
class Grid:
    """`stored`: the type that scales have in the file. They are rounded to it before codes are chosen, so that the
    codes fit the scales that a reader sees."""

    bits: int
    symmetric: bool
    stored: torch.dtype = torch.float16

    @property
    def most(self) -> int:
        return (1 << self.bits) - 1

    def fit(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of groups whose weights lie in low..high; zero is always among the values."""
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / self.most).to(self.stored).to(low.dtype)
        # A group of zeros, or one too small for the type of the scale.
        scale = torch.where(scale > 0, scale, torch.full_like(scale, torch.finfo(self.stored).tiny))
        if self.symmetric:
            return scale, torch.full_like(scale, 1 << (self.bits - 1))
        return scale, (-low / scale).round().clamp(0, self.most)

    def fit_groups(self, weight: Tensor, group: int, shrink: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
        """[rows, columns] to scales and zero points [rows, columns / group]."""
        groups = weight.unflatten(1, (-1, group))
        return self.fit(groups.amin(-1) * shrink, groups.amax(-1) * shrink)

    def codes(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest code of each weight, as floating-point numbers; all of shapes that broadcast."""
        return (weight / scale + zero).round().clamp(0, self.most)

    def rounded(self, weight: Tensor, group: int, scale: Tensor, zero: Tensor) -> Tensor:
        """The weights as a reader will see them."""
        groups = weight.unflatten(1, (-1, group))
        scale, zero = scale[..., None], zero[..., None]
        return ((self.codes(groups, scale, zero) - zero) * scale).flatten(1)

    def matrix(self, codes: Tensor, scale: Tensor, zero: Tensor) -> IntegerMatrix:
        return IntegerMatrix(codes.to(torch.uint8), scale.to(self.stored), zero.to(torch.uint8), self.bits)


def round_to_nearest(
    weight: Tensor, grid: Grid, group: int, scales: tuple[Tensor, Tensor] | None = None
) -> IntegerMatrix:
    """`scales`: scale and zero point of each group, where they were searched for."""
    scale, zero = grid.fit_groups(weight, group) if scales is None else scales
    groups = weight.unflatten(1, (-1, group))
    codes = grid.codes(groups, scale[..., None], zero[..., None]).flatten(1)
    return grid.matrix(codes, scale, zero)
