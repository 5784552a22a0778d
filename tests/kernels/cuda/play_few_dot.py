"""Plays few_dot's kernel on a CPU: Triton's interpreter does not know Gluon, so this gives the kernel's own Python
functions stand-ins for what they call. Shared memory begins as NaN and is read only behind the barrier."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cuda.linear import few_dot as played
from tests.kernels.cuda.play_gluon import Pointer, pointer

CONSTANTS = ("K", "TILE", "SLICES", "NORM", "SWIGLU", "RESIDUAL", "BIAS", "PICK", "DIM", "HEADS", "KV_HEADS",
             "PAGE", "EARLY", "num_warps")  # fmt: skip


@dataclass
class Shared:
    numbers: Tensor
    pending: list[Callable[[], object]] = field(default_factory=list)  # until all threads have met

    def store(self, value: Tensor) -> None:
        assert value.shape == self.numbers.shape
        self.pending.append(lambda: self.numbers.copy_(value))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.numbers.narrow(dim, start, length))

    def load(self, _: object) -> Tensor:
        return self.numbers.clone()


def _either(a: Any, b: Any) -> Any:
    return torch.minimum(*map(torch.as_tensor, (a, b))) if isinstance(a, Tensor) else min(a, b)


class Played:
    """In the place of the kernel: `kernel[grid](...)` plays all programs, one after the other."""

    def __init__(self) -> None:
        self.program, self.shared = 0, list[Shared]()
        language = SimpleNamespace(
            program_id=lambda axis: self.program, arange=lambda begin, end, _: torch.arange(begin, end), load=_load,
            store=_store, zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype), minimum=_either,
            sum=lambda numbers, axis: numbers.sum(axis), exp=torch.exp, rsqrt=torch.rsqrt,
            expand_dims=lambda numbers, axis: numbers.unsqueeze(axis), static_range=range, int64=torch.int64,
            float32=torch.float32, constexpr=None, allocate_shared_memory=self._allocate,
            **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
                             "SwizzledSharedLayout"), lambda *_: None),
        )  # fmt: skip
        names = dict(vars(played)) | {
            "gl": language, "_all_threads": self._meet, "gdc_wait": _never, "gdc_launch_dependents": _never,
            "mma_v2": lambda a, b, acc: acc + a.float() @ b.float(),
        }  # fmt: skip
        for name in ("_columns", "_few_dot_kernel"):
            names[name] = FunctionType(getattr(played, name).fn.__code__, names, name)
        self._kernel = names["_few_dot_kernel"]

    def _allocate(self, dtype: torch.dtype, shape: list[int], _: object) -> Shared:
        self.shared.append(Shared(torch.full(shape, float("nan"), dtype=dtype)))
        return self.shared[-1]

    def _meet(self) -> None:
        for shared in self.shared:
            for arrive in shared.pending:
                arrive()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            assert set(constants) == set(CONSTANTS)
            given = [pointer(one) if isinstance(one, Tensor) else one for one in arguments]
            for self.program in range(grid[0]):
                self.shared = []
                self._kernel(*given, **constants)

        return launch


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
