"""How weights are rounded: to the nearest numbers of a Grid (whole numbers with a scale and a zero point for each
group), by AWQ, by GPTQ, and to e4m3 floats. The run calls these for every matrix.

AWQ (Lin et al. 2023): inputs that are large on average matter most, so their weights are scaled up before rounding
and the inputs down by as much. GPTQ (Frantar et al. 2022): columns are rounded one after the other, and what
rounding one changes in the output is made up for by the columns that are still free. fp8 has a scale per row,
matrix or block of 128 x 128 (DeepSeek-V3, section 3.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.models.files.quantised.matrices import Float8Matrix, IntegerMatrix
from cumulo.quant.decide.recipe import FLOAT8_BLOCK, Float8Scheme


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


LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def float8(weight: Tensor, scheme: Float8Scheme, input_scale: Tensor | None = None) -> Float8Matrix:
    """The largest weight under a scale becomes the largest float; `input_scale` goes with static activations."""
    rows, columns = weight.shape
    block = {
        "channel": (1, columns),
        "tensor": (rows, columns),
        "block": (FLOAT8_BLOCK, FLOAT8_BLOCK),
    }[scheme]
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale = (tiles.abs().amax((1, 3)).float() / LARGEST).clamp_min(1e-12)
    codes = tiles / scale[:, None, :, None].to(weight.dtype)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns].clamp(-LARGEST, LARGEST)
    return Float8Matrix(codes.to(torch.float8_e4m3fn), scale, block, input_scale)


_POWERS = 20  # of the mean input that are tried
_SHRINKS = tuple(1 - 0.05 * step for step in range(11))  # of a group's range


def search_scale(
    weights: Sequence[Tensor], mean_input: Tensor, hessian: Tensor, grid: Grid, group: int
) -> Tensor:
    """[columns]: what to multiply the columns of all `weights` with, and to divide their inputs by."""
    best, least = torch.ones_like(mean_input), float("inf")
    for step in range(_POWERS):
        scale = mean_input.clamp_min(1e-4) ** (step / _POWERS)
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp_min(1e-4)
        error = sum(
            output_error(weight, _rounded(weight * scale, grid, group) / scale, hessian) for weight in weights
        )
        if error < least:
            best, least = scale, float(error)
    return best


def search_clipping(weight: Tensor, hessian: Tensor, grid: Grid, group: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group under the range that changes its own part of the output least."""
    blocks = hessian.unflatten(0, (-1, group)).unflatten(2, (-1, group))  # [groups, group, groups, group]
    own = torch.stack([blocks[index, :, index] for index in range(blocks.shape[0])])
    best = grid.fit_groups(weight, group)
    least = _group_errors(weight, grid.rounded(weight, group, *best), own, group)
    for shrink in _SHRINKS[1:]:
        found = grid.fit_groups(weight, group, shrink)
        errors = _group_errors(weight, grid.rounded(weight, group, *found), own, group)
        better = errors < least
        best = (torch.where(better, found[0], best[0]), torch.where(better, found[1], best[1]))
        least = torch.minimum(least, errors)
    return best


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """The squared error of the outputs, over all rows and calibration tokens."""
    change = weight - rounded
    return float(((change @ hessian) * change).sum())


def _rounded(weight: Tensor, grid: Grid, group: int) -> Tensor:
    return grid.rounded(weight, group, *grid.fit_groups(weight, group))


def _group_errors(weight: Tensor, rounded: Tensor, own: Tensor, group: int) -> Tensor:
    """[rows, groups]: errors of the groups, each as if it were alone."""
    change = (weight - rounded).unflatten(1, (-1, group)).transpose(0, 1)  # [groups, rows, group]
    errors: Tensor = ((change @ own) * change).sum(-1)
    return errors.T


_COLUMNS_AT_ONCE = 128  # updates of later columns are gathered over about so many


def gptq(
    weight: Tensor, hessian: Tensor, grid: Grid, group: int, act_order: bool = True, damping: float = 0.01
) -> IntegerMatrix:
    """Codes for `weight` [rows, columns], given H = X Xᵀ of its inputs [columns, columns].

    `act_order`: columns with the largest diagonal of H first, while they can still be made up for. Groups then keep
    their scales from the beginning ("static groups"), so that columns of a group stay neighbours in the file.
    """
    hessian = hessian.clone()
    columns = weight.shape[1]
    unused = hessian.diagonal() <= 0  # inputs that were always zero: nothing is known about them
    hessian.diagonal()[unused] = 1
    scale, zero = (one.T.contiguous() for one in grid.fit_groups(weight, group))
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    left = weight.T[order]  # transposed: a column is a run of memory
    update = _updates(hessian[order][:, order], damping)
    steps = update.diagonal().tolist()
    codes, errors = torch.empty_like(left), torch.empty_like(left)
    run = max(1, _COLUMNS_AT_ONCE // group) * group
    for first in range(0, columns, run):
        last = min(first + run, columns)
        for column, of_group in enumerate((order[first:last] // group).tolist(), first):
            # By now the group's weights are no longer the original's.
            if not act_order and column % group == 0:
                now = left[column : column + group]
                scale[of_group], zero[of_group] = grid.fit(now.amin(0), now.amax(0))
            own = left[column]
            codes[column] = grid.codes(own, scale[of_group], zero[of_group])
            rounded = (codes[column] - zero[of_group]) * scale[of_group]
            errors[column] = (own - rounded) / steps[column]
            left[column:last].addr_(update[column, column:last], errors[column], alpha=-1)
        left[last:].addmm_(update[first:last, last:].T, errors[first:last], alpha=-1)
    return grid.matrix(codes[order.argsort()].T.contiguous(), scale.T.contiguous(), zero.T.contiguous())


def _updates(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of H⁻¹, with more damping where H is not positive definite."""
    mean = hessian.diagonal().mean()
    for strength in (damping, 10 * damping, 100 * damping):
        damped = hessian.clone()
        damped.diagonal().add_(strength * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed) == 0:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if int(failed) == 0:
                return upper
    raise ArithmeticError("the Hessian of the calibration inputs is not positive definite")
