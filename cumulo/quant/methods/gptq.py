"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and what rounding one changes in the output
is made up for by the columns that are still free. Called by the run, with the inputs' Hessian.

For a row w and inputs X the error is (w - q) H (w - q)ᵀ with H = X Xᵀ. Fixing column i to q_i moves the others by
-(w_i - q_i) / [H⁻¹]_ii · [H⁻¹]_i: the optimal brain surgeon (Hassibi & Stork 1993). The rows of a Cholesky factor
of H⁻¹ are these updates for all columns in order (section 3.3), so nothing is inverted per column.
"""

import torch
from torch import Tensor

from cumulo.models.files.quantised.matrices import IntegerMatrix
from cumulo.quant.methods.grid import Grid

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
            if (
                not act_order and column % group == 0
            ):  # by now the group's weights are no longer the original's
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
