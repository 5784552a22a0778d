"""Linear: a matrix that is either a plain parameter or packed (quantised). Every projection of the decoder,
its embedding and its head are one.

What packing means is the kernels' business (kernels/packed.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulo.kernels.packed import Packed


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Type and device of the parameters that a module is made with."""

    dtype: torch.dtype
    device: torch.device | str

    def parameter(self, *shape: int) -> nn.Parameter:
        """Memory for weights that a loader will fill. A trainer switches gradients on when it takes the model."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


class Adapted(Protocol):
    """What adapters add to a matrix's product; an AdapterBank has one for each of its matrices."""

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...


class Linear(nn.Module):
    """y = x Wᵀ + b, with W [outputs, inputs] plain or packed."""

    __call__: Callable[..., Tensor]  # nn.Module says Any
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, bias: bool = False, *, kind: TensorKind) -> None:
        super().__init__()
        self.shape = (outputs, inputs)
        self.dtype = kind.dtype
        self.packed: Packed | None = None
        self.adapted: Adapted | None = None
        self.weight = kind.parameter(outputs, inputs)
        self.bias = kind.parameter(outputs) if bias else None

    def pack(self, packed: Packed) -> None:
        """Replace the plain weight, whose memory is given back."""
        if tuple(packed.shape) != self.shape:
            raise ValueError(f"a packed weight of shape {tuple(packed.shape)} cannot replace {self.shape}")
        del self.weight
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = self.packed.matmul(x)
            if self.bias is not None:
                y = y + self.bias
        return y if self.adapted is None else self.adapted.add(x, y)

    def without_bias(self, x: Tensor) -> Tensor:
        """x Wᵀ: where others have the rest of a sum, the bias is added once, to all of it."""
        return F.linear(x, self.weight) if self.packed is None else self.packed.matmul(x)

    def rows(self, indices: Tensor) -> Tensor:
        """The rows of W at `indices`, in the dtype the model computes in: the embedding of tokens."""
        if self.packed is None:
            return F.embedding(indices, self.weight)
        return self.packed.rows(indices).to(self.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) · w over the last dimension (Zhang & Sennrich 2019). Half types are summed in float32."""

    __call__: Callable[..., Tensor]

    def __init__(self, size: int, eps: float, *, kind: TensorKind) -> None:
        super().__init__()
        self.size, self.eps = (size,), eps
        self.weight = kind.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.size, self.weight, self.eps)
