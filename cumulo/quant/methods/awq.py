"""AWQ (Lin et al. 2023): inputs that are large on average matter most, so their weights are scaled up before
rounding and the inputs down by as much. Called by the run for every group of matrices that read the same inputs.

The scale is a power of the mean input, searched for on a grid (section 3.2, equation 5); then each group of weights
may give up its extremes (clipping). Both searches measure the error of the matrices' output,
(w - q) H (w - q)ᵀ with H = X Xᵀ, so no inputs need to be kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulo.quant.methods.grid import Grid

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
