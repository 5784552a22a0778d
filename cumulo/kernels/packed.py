"""Packed: a weight matrix [outputs, inputs] in a storage format of its own. A decoder's matrix has it in place of a
plain parameter.
"""

from typing import Protocol

from torch import Tensor


class Packed(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def matmul(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs], in x's dtype."""
        ...

    def rows(self, indices: Tensor) -> Tensor:
        """Dequantised rows, as an embedding looks them up: [N] -> [N, inputs]."""
        ...
