"""Tolerances that are measured, not chosen: what the same computation in the same dtype by torch loses against
float64 is what a kernel may lose, times two."""

from collections.abc import Callable

import torch
from torch import Tensor


def relative_error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖ in float64; NaN never passes a comparison with it."""
    found, exact = found.double(), exact.double()
    return float((found - exact).norm() / exact.norm().clamp_min(1e-300))


def check_close(found: Tensor, reference: Callable[..., Tensor], *inputs: Tensor, slack: float = 2.0) -> None:
    """`found` against `reference` in float64, allowed `slack` times the error of `reference` in the inputs' dtype.

    Where torch is exact by luck (tiny sums), half a unit in the last place of the dtype is allowed.
    """
    exact = reference(*(i.double() if i.is_floating_point() else i for i in inputs))
    same_dtype = reference(*inputs)
    allowed = slack * max(relative_error(same_dtype, exact), torch.finfo(found.dtype).eps / 2)
    error = relative_error(found, exact)
    assert error <= allowed, f"relative error {error:.3g}, allowed {allowed:.3g}"


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory whose every unwritten element shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
