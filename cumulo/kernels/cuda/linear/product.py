"""Product: what a kernel for few rows is asked for, residual + f(norm(x)·Wᵀ + bias), and the arguments that all of
their launches share. `linear` makes it and gives it to the kernel that the table of winners names.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cuda.linear.fp8 import Fp8Weight
from cumulo.kernels.cuda.linear.w4_weight import W4Weight

Weight = Tensor | Fp8Weight | W4Weight
SMALL_MATRIX = 8 << 20  # weights: up to here, reading them takes no longer than starting a kernel


@dataclass(frozen=True, slots=True)
class PagedRotation:
    """What a product of queries, keys and values needs to rotate them and to write keys and values to their pages
    itself, so that no other kernel comes between it and attention; rope_cache does the same behind products that
    cannot. Halves of a head turn together, by the angle of each token's position. cos, sin [positions, dim / 2];
    positions, slots [M] int32 (slot -1: keys and values go nowhere); keys, values [blocks, kv_heads, block_size,
    dim], of the same strides."""

    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor
    heads: int

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def dim(self) -> int:
        return self.keys.shape[3]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.cos, self.sin, self.positions, self.slots, self.keys, self.values

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def strides(self) -> tuple[int, int]:
        """The strides of a block and of a head."""
        return self.keys.stride(0), self.keys.stride(1)


@dataclass(frozen=True, slots=True)
class Product:
    """x [M, K] times weight [N, K] into `out`, which may be `residual`. With `swiglu` the weight's first half are
    gate rows, its second half up rows, and out is [M, N/2]. With `rotation` the product is of queries, keys and
    values, and out has the rotated queries."""

    x: Tensor
    weight: Weight
    out: Tensor | None  # None where the library makes it
    norm_weight: Tensor | None = None
    eps: float = 1e-6
    residual: Tensor | None = None
    swiglu: bool = False
    bias: Tensor | None = None
    rotation: PagedRotation | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.x.shape[0], *self.weight.shape

    @property
    def outputs(self) -> int:
        """Columns of the product that are kept."""
        return self.weight.shape[0] // 2 if self.swiglu else self.weight.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Where the result goes, the norm's gains, residual and bias; x stands for those that are not read."""
        assert self.out is not None
        optional = (self.norm_weight, self.residual, self.bias)
        return self.out, *(self.x if one is None else one for one in optional)

    @property
    def strides(self) -> tuple[int, int, int]:
        """From one row to the next of x, the output and the residual."""
        assert self.out is not None
        return self.x.stride(0), self.out.stride(0), 0 if self.residual is None else self.residual.stride(0)

    @property
    def flags(self) -> dict[str, bool]:
        """The constants of a launch that say which parts there are."""
        return {
            "NORM": self.norm_weight is not None,
            "SWIGLU": self.swiglu,
            "RESIDUAL": self.residual is not None,
            "BIAS": self.bias is not None,
        }

    @property
    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """The numbers of a weight that is not of 4 bits, and the scales of one of 8 bits."""
        if isinstance(self.weight, Fp8Weight):
            return self.weight.data, self.weight.scales
        assert isinstance(self.weight, Tensor)
        return self.weight, None


def reference(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """What a product computes, in plain torch: norm, product, bias, SwiGLU, residual, in this order."""
    if norm_weight is not None:
        x = F.rms_norm(x, x.shape[-1:], norm_weight.to(x.dtype), eps)
    y = F.linear(x, weight, bias)
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y
