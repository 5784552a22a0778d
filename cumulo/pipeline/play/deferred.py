"""Weight gradients put off: backward in two halves, as zero-bubble schedules ask. Used by the executor.

    later = DeferredWeights()
    with later: y = chunk(x)
    dx = later.input_gradient([y], [dy], x, parameters)       # what the stage before is waiting for
    later.accumulate()                                        # what nobody waits for

Half of the arithmetic of a matrix product's backward is its weight's gradient (Qi et al. 2023, section 2). While
`with later` is active, `F.linear` and `F.grouped_mm` (experts) keep the two factors of that product instead of
multiplying them. Everything else's gradient (norms, biases, tables) costs little and is computed at once, but
handed over with the rest: all gradients of a micro-batch reach their parameters in `accumulate`, so hooks on
parameters see one event each.

torch.distributed.pipelining cuts the autograd graph instead, at each parameter; then hooks do not run, and with
recomputed layers every cut computes its layer again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """A weight's gradient, not yet multiplied out."""

    weight: Tensor
    x: Tensor
    gradient: Tensor  # of the output
    ends: Tensor | None  # of each expert's rows, where there are several weights in one

    def multiplied(self) -> Tensor:
        if self.ends is None:
            return self.gradient.flatten(0, -2).T @ self.x.flatten(0, -2)
        return F.grouped_mm(self.x.T, self.gradient, offs=self.ends)


class DeferredWeights(TorchFunctionMode):
    """The weight gradients one micro-batch owes on one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[_Product] = []
        self.ready: list[tuple[Tensor, Tensor]] = []  # (parameter, gradient)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = _READERS.get(func)
        if read is not None and torch.is_grad_enabled():
            x, weight, bias, ends = read(*args, **kwargs)
            if weight.requires_grad:
                y = _WithoutWeightGradient.apply(x, weight, ends, self)  # type: ignore[no-untyped-call]
                return y if bias is None else y + bias
        return func(*args, **kwargs)

    def input_gradient(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        x: Tensor | None,
        parameters: Iterable[nn.Parameter],
    ) -> Tensor | None:
        """The gradient of the chunk's input; None for the first chunk, which has none."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        inputs = trained if x is None else [x, *trained]
        upstream = [
            torch.ones_like(output) if gradient is None else gradient
            for output, gradient in zip(outputs, gradients, strict=True)
        ]
        # `torch.autograd.grad`, but its public form switches modes off inside, and recomputed layers must put off
        # their products, too.
        with self:
            found = torch.autograd.Variable._execution_engine.run_backward(
                tuple(outputs), tuple(upstream), False, False, tuple(inputs), True, accumulate_grad=False
            )
        own = found if x is None else found[1:]
        self.ready = [pair for pair in zip(trained, own, strict=True) if pair[1] is not None]
        return None if x is None else found[0]

    def accumulate(self) -> None:
        """Add all gradients to their parameters."""
        pairs = self.ready + [(product.weight, product.multiplied()) for product in self.products]
        self.products, self.ready = [], []
        if pairs:
            tensors, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, gradients)


Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # input, weight, bias, ends


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Arguments:
    return input, weight, bias, None


def _grouped(
    input: Tensor,
    weight: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Arguments:
    return input, weight, bias, offs


# `F.grouped_mm` reaches a mode under its older name.
_READERS: dict[Any, Callable[..., Arguments]] = {F.linear: _linear, torch._grouped_mm: _grouped}


class _WithoutWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor | None, later: DeferredWeights) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.ends, ctx.later = weight, ends, later  # a saved weight may come back as a copy
        return F.linear(x, weight) if ends is None else F.grouped_mm(x, weight, offs=ends)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, None, None, None]:
        (x,), gradient, weight = ctx.saved_tensors, upstream[0], ctx.weight
        ctx.later.products.append(_Product(weight, x.detach(), gradient, ctx.ends))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if ctx.ends is None:
            return gradient @ weight, None, None, None
        return F.grouped_mm(gradient, weight.transpose(1, 2), offs=ctx.ends), None, None, None
