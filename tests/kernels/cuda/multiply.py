"""Products of few rows by a kernel that the test names, and numbers for them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cuda.linear.linear import Choice, linear
from cumulo.kernels.cuda.linear.product import Weight


def multiply(
    kernel: str, x: Tensor, weight: Weight, out: Tensor | None = None, config: Any = None, **parts: Any
) -> Tensor:
    return linear(x, weight, out, choice=Choice(kernel, config), **parts)


small_linear, few_dot, skinny_linear, w4_linear, w4_dot = (
    partial(multiply, kernel) for kernel in ("small", "dot", "skinny", "w4", "w4 dot")
)


def inputs(
    m: int, n: int, k: int, device: torch.device, dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(m * 1000 + n + k)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    return {
        "x": draw(m, k),
        "weight": draw(n, k) * k**-0.5,
        "norm": 1 + draw(k) / 4,
        "residual": draw(m, n),
        "bias": draw(n),
    }
