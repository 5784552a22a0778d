"""How training multiplies matrices: in the type they have, or in 8 bits. Called by `fused` and the linears of
`TrainingDecoder`.

A product y = x Wᵀ has two more in backward, for x and for W. In 8 bits (Micikevicius et al. 2022) x, W and y's
gradient are rounded; sums and results stay wide. What backward needs of x and W is then kept in 8 bits, too.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cumulo.models.linear import Linear

if TYPE_CHECKING:
    from cumulo.kernels.cuda.linear.fp8_pair import Fp8Pair

Kept = tuple[Tensor, ...]


class Arithmetic:
    """Products in the type that the matrices have."""

    keeps_inputs = False  # whether `kept` has what a weight's gradient needs of the inputs
    divisor = 1  # of all sizes of the matrices

    def forward(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Kept]:
        """x [T, K] · weightᵀ [N, K], and the residual if there is one; what backward needs of both."""
        if residual is None:
            return torch.mm(x, weight.t()), ()
        return torch.addmm(residual, x, weight.t()), ()

    def backward_input(self, grad: Tensor, weight: Tensor, kept: Kept) -> tuple[Tensor, Kept]:
        """The gradient of x from y's, and what of `grad` the weight's gradient needs."""
        return torch.mm(grad, weight), (grad,)

    def backward_weight(self, grad: Kept, x: Tensor | None, weight: Tensor, kept: Kept) -> Tensor:
        """The gradient of the weight. `x`: unless `keeps_inputs`."""
        assert x is not None
        return torch.mm(grad[0].t(), x)


class _Fp8(Arithmetic):
    """One scale a matrix, from its largest magnitude at that moment; gradients in e5m2, which has the range."""

    keeps_inputs = True
    divisor = 16  # of all sizes

    def forward(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Kept]:
        left, right = self._rounded(x), self._rounded(weight)
        y = self._product(left.data, left.scale, right.data, right.scale, x.dtype, fast=True)
        kept = left.transposed, left.transposed_scale, right.transposed, right.transposed_scale
        return (y if residual is None else y.add_(residual)), kept

    def backward_input(self, grad: Tensor, weight: Tensor, kept: Kept) -> tuple[Tensor, Kept]:
        pair = self._rounded(grad.contiguous(), gradient=True)
        _, _, transposed, scale = kept
        grad_x = self._product(pair.data, pair.scale, transposed, scale, grad.dtype)
        return grad_x, (pair.transposed, pair.transposed_scale)

    def backward_weight(self, grad: Kept, x: Tensor | None, weight: Tensor, kept: Kept) -> Tensor:
        transposed, scale, *_ = kept
        return self._product(grad[0], grad[1], transposed, scale, weight.dtype)

    # Imported when called: without a GPU there need be no Triton.
    def _rounded(self, x: Tensor, gradient: bool = False) -> "Fp8Pair":
        from cumulo.kernels.cuda.linear.fp8_pair import E4M3, E5M2, fp8_pair

        return fp8_pair(x, E5M2 if gradient else E4M3)

    def _product(
        self, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype,
        fast: bool = False,
    ) -> Tensor:  # fmt: skip
        from cumulo.kernels.cuda.linear.fp8_pair import product

        return product(left, left_scale, right, right_scale, dtype, fast)


class _Fp8Blocks(_Fp8):
    """One scale for every 128 numbers that are summed together."""

    divisor = 128

    def _rounded(self, x: Tensor, gradient: bool = False) -> "Fp8Pair":
        from cumulo.kernels.cuda.linear.fp8_blocks import fp8_blocks

        return fp8_blocks(x)

    def _product(
        self, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype,
        fast: bool = False,
    ) -> Tensor:  # fmt: skip
        from cumulo.kernels.cuda.linear.fp8_blocks import product

        return product(left, left_scale, right, right_scale, dtype)


WIDE, FP8, FP8_BLOCKS = Arithmetic(), _Fp8(), _Fp8Blocks()
ARITHMETICS: Mapping[str, Arithmetic] = {"wide": WIDE, "fp8": FP8, "fp8_blocks": FP8_BLOCKS}


def product(x: Tensor, weight: Tensor, arithmetic: Arithmetic, residual: Tensor | None = None) -> Tensor:
    """x weightᵀ, and the residual if there is one; differentiable."""
    return _Product.apply(x, weight, residual, arithmetic)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, arithmetic: Arithmetic
    ) -> Tensor:
        y, kept = arithmetic.forward(x, weight, residual)
        ctx.save_for_backward(None if arithmetic.keeps_inputs else x, weight, *kept)
        ctx.arithmetic, ctx.added = arithmetic, residual is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, *kept = ctx.saved_tensors
        inner, prepared = ctx.arithmetic.backward_input(grad, weight, kept)
        needed = ctx.needs_input_grad[1]
        grad_weight = ctx.arithmetic.backward_weight(prepared, x, weight, kept) if needed else None
        return inner, grad_weight, grad if ctx.added else None, None


class ArithmeticLinear(Linear):
    """A linear of the model, multiplied in its own way."""

    def __init__(self, linear: Linear, arithmetic: Arithmetic) -> None:
        nn.Module.__init__(self)
        self.shape, self.dtype, self.packed = linear.shape, linear.dtype, None
        self.weight, self.bias, self.arithmetic = linear.weight, linear.bias, arithmetic

    def forward(self, x: Tensor) -> Tensor:
        y = self.without_bias(x)
        return y if self.bias is None else y + self.bias

    def without_bias(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.arithmetic)


def use_arithmetic(layer: nn.Module, arithmetic: Arithmetic) -> None:
    """For the linears of a layer; routers, whose choices hang on small differences, stay as they are."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, Linear) and not name.startswith("ffn.router"):
            path, _, last = name.rpartition(".")
            setattr(layer.get_submodule(path), last, ArithmeticLinear(module, arithmetic))


def fusible(*linears: nn.Module) -> bool:
    """Whether they are their weights and nothing else: no biases, no adapters."""
    return all(isinstance(linear, Linear) and linear.bias is None for linear in linears)
