"""Plays the kernels of few_dot and w4_dot on a CPU: Triton's interpreter does not know Gluon, so this gives the
kernels' own Python functions stand-ins for what they call. Shared memory begins as NaN and is read only behind the
barrier."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cuda.linear import few_dot
from tests.kernels.cuda.play_gluon import Pointer, pointer

_ENDING = ("rows_of_tile", "biases", "rotation_of", "store", "_store_activated", "_store_rotated")


@dataclass
class Shared:
    numbers: Tensor
    pending: list[Callable[[], object]] = field(default_factory=list)  # until all threads have met

    def store(self, value: Tensor) -> None:
        assert value.shape == self.numbers.shape
        self.pending.append(lambda: self.numbers.copy_(value))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.numbers.narrow(dim, start, length))

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.numbers.permute(order))

    def load(self, _: object) -> Tensor:
        return self.numbers.clone()


def _either(a: Any, b: Any) -> Any:
    return torch.minimum(*map(torch.as_tensor, (a, b))) if isinstance(a, Tensor) else min(a, b)


class Played:
    """In the place of a module's kernel: `kernel[grid](...)` plays all programs, one after the other.
    `helpers`: the module's own functions that it calls."""

    def __init__(self, module: ModuleType, kernel: str, helpers: tuple[str, ...]) -> None:
        self.program, self.shared = 0, list[Shared]()
        language = SimpleNamespace(
            program_id=lambda axis: self.program, arange=lambda begin, end, _: torch.arange(begin, end), load=_load,
            store=_store, zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype), minimum=_either,
            sum=lambda numbers, axis: numbers.sum(axis), exp=torch.exp, rsqrt=torch.rsqrt,
            expand_dims=lambda numbers, axis: numbers.unsqueeze(axis), static_range=range, int64=torch.int64,
            float32=torch.float32, constexpr=None, bfloat16=torch.bfloat16,
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            allocate_shared_memory=self._allocate,
            **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
                             "SwizzledSharedLayout"), lambda *_: None),
        )  # fmt: skip
        names = dict(vars(module)) | {
            "gl": language, "_all_threads": self._meet, "gdc_wait": _never, "gdc_launch_dependents": _never,
            "mma_v2": lambda a, b, acc: acc + a.float() @ b.float(),
            "_places": _places,
        }  # fmt: skip
        for name in (*helpers, kernel):
            names[name] = FunctionType(getattr(module, name).fn.__code__, names, name)
        for name in _ENDING:
            names[name] = FunctionType(getattr(few_dot, name).fn.__code__, names, name)
        self._kernel, self._constants = names[kernel], constants_of(module, kernel)

    def _allocate(self, dtype: torch.dtype, shape: list[int], _: object) -> Shared:
        self.shared.append(Shared(torch.full(shape, float("nan"), dtype=dtype)))
        return self.shared[-1]

    def _meet(self) -> None:
        for shared in self.shared:
            for arrive in shared.pending:
                arrive()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            assert set(constants) == set(self._constants)
            given = [pointer(one) if isinstance(one, Tensor) else one for one in arguments]
            for self.program in range(grid[0]):
                self.shared = []
                self._kernel(*given, **constants)

        return launch


def constants_of(module: ModuleType, kernel: str) -> list[str]:
    """What a launch must say by name."""
    return [parameter.name for parameter in getattr(module, kernel).params if parameter.is_constexpr]


def _places(words: Tensor) -> tuple[Tensor, ...]:
    """As the instructions do it: 128 and the code, in bfloat16."""
    return tuple(((words.int() >> 4 * place & 15) + 128).bfloat16() for place in range(4))


def _never() -> None:
    raise AssertionError("only a GPU starts kernels early")


def _load(source: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    offset = source.offset
    if mask is None:
        return source.numbers[offset]  # outside of the tensor's memory: an error
    mask = mask.expand(torch.broadcast_shapes(mask.shape, offset.shape))
    found = source.numbers[torch.where(mask, offset, 0)]
    return torch.where(mask, found, torch.full_like(found, other))


def _store(target: Pointer, value: Tensor, mask: Tensor) -> None:
    shape = torch.broadcast_shapes(value.shape, mask.shape, target.offset.shape)
    mask = mask.expand(shape)
    target.numbers[target.offset.expand(shape)[mask]] = value.expand(shape)[mask]
