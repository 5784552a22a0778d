"""Random small programs over tensors, for the test that a compiled one never differs from eager PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda a: -a if a.dtype != torch.bool else ~a,
    "abs": lambda a: a.abs() if a.dtype != torch.bool else a,
    "relu": lambda a: a.relu() if a.dtype != torch.bool else a,
    "exp": lambda a: (-(a.to(torch.float32).abs())).exp(),
    "sin": lambda a: a.sin(),
    "tanh": lambda a: a.tanh(),
    "sigmoid": lambda a: a.sigmoid(),
    "silu": lambda a: torch.nn.functional.silu(a.float()),
    "gelu": lambda a: torch.nn.functional.gelu(a.float()),
    "smooth gelu": lambda a: torch.nn.functional.gelu(a.float(), approximate="tanh"),
    "rsqrt": lambda a: (a.float() * a + 1).rsqrt(),
    "square": lambda a: a**2,
    "clamp": lambda a: a.clamp(-1, 2) if a.dtype not in (torch.bool, torch.uint8) else a,
    "half": lambda a: a.to(torch.bfloat16),
    "single": lambda a: a.float(),
    "whole": lambda a: a.to(torch.int32) if a.dtype != torch.bool else a,
    "positive": lambda a: a > 0,
    "not a number": lambda a: torch.where(a == 1, float("nan"), a.float()).isnan(),
    "scaled": lambda a: a * 3,
    "shifted": lambda a: a + 1.5,
    "one minus": lambda a: 1 - a if a.dtype != torch.bool else a,
    "divided": lambda a: a / 2,
    "dropped": lambda a: a.masked_fill(a > 1, 0),
    "sum of rows": lambda a: a.sum(-1, keepdim=True),
    "mean": lambda a: a.float().mean(-1, keepdim=True),
    "most": lambda a: a.amax(-1, keepdim=True) if a.dtype != torch.bool else a,
    "sum of columns": lambda a: a.sum(0),
    "all": lambda a: a.float().sum(),
    "softmax": lambda a: a.float().softmax(-1),
    "log softmax": lambda a: a.float().log_softmax(-1),
    "norm": lambda a: a.float() * (a.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt(),
    "turned": lambda a: a.transpose(0, -1) if a.dim() else a,
    "turned and copied": lambda a: a.transpose(0, -1).contiguous() if a.dim() else a,
    "flat": lambda a: a.flatten(),
    "with one more": lambda a: a.unsqueeze(0),
    "first": lambda a: a[..., :1] if a.dim() else a,
    "tail": lambda a: a[..., 1:] if a.dim() and a.shape[-1] > 1 else a,
    "every other": lambda a: a[::2] if a.dim() else a,
    "halves swapped": lambda a: torch.cat((-a[..., 1:].float(), a[..., :1].float()), -1) if a.dim() else a,
    "padded": lambda a: torch.nn.functional.pad(a, (1, 2)) if a.dim() else a,
    "repeated": lambda a: a.unsqueeze(-2).expand(*a.shape[:-1], 2, a.shape[-1]) if a.dim() else a,
    "copied": lambda a: a.clone(),
    "plus positions": lambda a: a + torch.arange(a.shape[-1]) if a.dim() else a,
    "cumulated": lambda a: a.float().cumsum(-1) if a.dim() else a,
    "written in place": lambda a: a.clone().mul_(2),
    "row written": lambda a: _row_written(a),
    "random": lambda a: torch.ones_like(a.float()),
}


def _row_written(a: Tensor) -> Tensor:
    a = a.clone()
    if a.dim() and a.shape[0] > 1:
        a[1] = 1
    return a


def _promoting(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def apply(a: Tensor, b: Tensor) -> Tensor:
        pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
        if any(one != other and 1 not in (one, other) for one, other in pairs):
            b = b.float().sum()
        return operation(a, b)

    return apply


def _numbers(a: Tensor) -> Tensor:
    return a.to(torch.int32) if a.dtype == torch.bool else a


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": _promoting(lambda a, b: a + b),
    "sub": _promoting(lambda a, b: _numbers(a) - _numbers(b)),
    "mul": _promoting(lambda a, b: a * b),
    "div": _promoting(lambda a, b: a / (b.float().abs() + 1)),
    "max": _promoting(lambda a, b: torch.maximum(_numbers(a), _numbers(b))),
    "min": _promoting(lambda a, b: torch.minimum(_numbers(a), _numbers(b))),
    "less": _promoting(lambda a, b: a < b),
    "equal": _promoting(lambda a, b: a == b),
    "where": _promoting(lambda a, b: torch.where(a > 0, a, b)),
    "both": _promoting(lambda a, b: (a > 0) & (b > 0)),
    "joined": lambda a, b: torch.cat((a.flatten(), b.flatten().to(a.dtype))),
    "product": lambda a, b: a.float().flatten(0, -2) @ a.float().flatten(0, -2).T if a.dim() > 1 else a,
}


@dataclass(frozen=True)
class Program:
    """`steps`: names of operations and the values they read, counted from the newest. `writes`: inputs that are
    multiplied in place at the end. `outputs`: the values returned, and whether as a view."""

    inputs: tuple[
        tuple[tuple[int, ...], torch.dtype, bool, bool], ...
    ]  # shape, type, turned, wants a gradient
    same: bool  # the first input is passed twice
    steps: tuple[tuple[str, int, int], ...]
    writes: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def is_rounded(self) -> bool:
        """Whether a number on the way is bfloat16: then the last bit of that is the tolerance."""
        return any(one[1] == torch.bfloat16 for one in self.inputs) or any(
            one[0] == "half" for one in self.steps
        )

    def arguments(self, grow: int = 0) -> list[Tensor]:
        generator, made = torch.Generator().manual_seed(3), []
        for shape, dtype, turned, wants in self.inputs:
            shape = (shape[0] + grow, *shape[1:]) if shape else shape
            value = torch.randn(shape, generator=generator) * 2
            value = value > 0 if dtype == torch.bool else value.abs() if dtype == torch.uint8 else value
            value = value.to(dtype)
            value = value.transpose(0, -1).contiguous().transpose(0, -1) if turned and shape else value
            made.append(value.requires_grad_(wants and dtype.is_floating_point))
        return [*made, made[0]] if self.same else made

    def __call__(self, *values: Tensor) -> list[Tensor]:
        pool = list(values)
        for name, first, second in self.steps:
            a, b = pool[-1 - first % len(pool)], pool[-1 - second % len(pool)]
            found = UNARY[name](a) if name in UNARY else BINARY[name](a, b)
            pool.append(found if found.numel() <= 4096 else found.flatten()[:4])
        for place in self.writes:
            value = values[place % len(values)]
            # With dynamic shapes PyTorch 2.13 loses what is written to a number, whatever the backend.
            if value.dim() and not value.requires_grad:
                value.mul_(2)
        return [pool[-1 - place % len(pool)] for place in self.outputs]


_shapes = st.sampled_from([(3,), (2, 3), (4, 3), (1, 3), (2, 4, 3), (4, 1), (2, 1, 6), (), (5, 33)])
_inputs = st.tuples(_shapes, st.sampled_from((*FLOATS, *INTEGERS)), st.booleans(), st.booleans())
_steps = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 5), st.integers(0, 5))


def programs() -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        st.lists(_inputs, min_size=1, max_size=3).map(tuple),
        st.booleans(),
        st.lists(_steps, min_size=1, max_size=9).map(tuple),
        st.lists(st.integers(0, 3), max_size=1).map(tuple),
        st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
    )


def results(program: Callable[..., Any], arguments: list[Tensor]) -> list[Tensor]:
    """Outputs, gradients and what inputs became."""
    outputs = program(*arguments)
    leaves = [one for one in dict.fromkeys(arguments) if one.requires_grad]
    graded = [one for one in outputs if one.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if leaves and graded:
        weights = [torch.linspace(-1, 1, one.numel()).view(one.shape).to(one.dtype) for one in graded]
        gradients = torch.autograd.grad(graded, leaves, weights, allow_unused=True)
    return [*outputs, *(one for one in gradients if one is not None), *arguments]


def shared_memory(outputs: list[Tensor]) -> list[int]:
    """For each output the first one with the same memory."""
    pointers = [one.untyped_storage().data_ptr() for one in outputs]
    return [pointers.index(pointer) for pointer in pointers]
