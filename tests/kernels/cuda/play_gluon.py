"""Plays the overlapped attention kernel on a CPU, with everything asynchronous as late as the hardware may be.

Triton's interpreter does not know Gluon, so this gives the kernel's own Python functions stand-ins for what they
call. A copy spoils its slot when it starts and arrives only when its barrier is waited for; a matrix product reads
its operands only when it is waited for. So a wait that is missing, too weak or of the wrong phase shows as NaN or
as a failed assertion here, where it would be a race or a hang on the device.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cuda.attention import paged_attention_overlap as played
from cumulo.kernels.cuda.attention.split_merge import LN_2, LOG2_E


class Scalar(int):
    def to(self, _: object) -> "Scalar":
        return self


@dataclass
class Pointer:
    numbers: Tensor  # flat
    offset: Any = 0

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.numbers, self.offset + more)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.numbers.dtype)


def pointer(tensor: Tensor) -> Pointer:
    """To the first element of a tensor that may be a view of a wider one."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return Pointer(whole, tensor.storage_offset())


@dataclass
class Shared:
    """A ring of tiles, one of its slots, or a slot seen transposed."""

    numbers: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers.dtype

    def index(self, slot: int) -> "Shared":
        assert 0 <= slot < len(self.numbers)
        return Shared(self.numbers[slot])

    def permute(self, order: tuple[int, int]) -> "Shared":
        return Shared(self.numbers.permute(order))

    def load(self, _: object) -> Tensor:
        return self.numbers.clone()

    def store(self, value: Tensor) -> None:
        self.numbers.copy_(value)


@dataclass
class Barrier:
    expected: int = 0
    completed: int = 0
    pending: deque[Callable[[], None]] = field(default_factory=deque)

    def wait(self, phase: int) -> None:
        """As a thread waits for the parity of a phase: for ever if the copy was never started."""
        if self.completed % 2 == phase:
            assert self.pending, "waits for a copy that nobody started"
            self.pending.popleft()()
            self.completed += 1
        assert self.completed % 2 != phase and not self.pending, "waits for the wrong phase"


class Barriers:
    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, slot: int) -> Barrier:
        return self.each[slot]


@dataclass
class Product:
    """What an asynchronous product will have computed."""

    value: Tensor | None = None


class Player:
    """One program at a time; `run` goes through a grid."""

    def __init__(self) -> None:
        self.in_flight: deque[Callable[[], None]] = deque()
        self.program = (0, 0)
        self.together = False  # whether all threads met since the last wait

        def reduced(name: str) -> Callable[..., Tensor]:
            return lambda numbers, axis: getattr(torch, name)(numbers, dim=axis)

        self.language = SimpleNamespace(
            load=self.load, store=self.store, program_id=lambda axis: self.program[axis], int64=torch.int64,
            float32=torch.float32, exp2=torch.exp2, log2=torch.log2, where=torch.where, zeros_like=torch.zeros_like,
            minimum=min, maximum=lambda a, b: torch.maximum(a, b) if isinstance(a, Tensor) else max(a, b),
            max=reduced("amax"), sum=reduced("sum"), arange=lambda begin, end, _: torch.arange(begin, end),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            convert_layout=lambda numbers, _: numbers, static_range=range, allocate_shared_memory=self.allocate,
            NVMMADistributedLayout=lambda *_: None, DotOperandLayout=lambda *_: None, SliceLayout=lambda *_: None,
            BlockedLayout=lambda *_: None,
        )  # fmt: skip
        self.hopper = SimpleNamespace(
            mbarrier=SimpleNamespace(
                init=lambda barrier, count: None, expect=self.expect, wait=self.wait_copy,
                MBarrierLayout=lambda: None,
            ),
            warpgroup_mma=self.multiply, warpgroup_mma_wait=self.wait_products,
            warpgroup_mma_init=lambda value: Product(value), fence_async_shared=lambda: None,
        )  # fmt: skip

    def load(self, source: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Any:
        if not isinstance(source.offset, Tensor):
            return Scalar(source.numbers[source.offset].item())
        assert mask is not None
        mask = mask.expand(source.offset.shape)
        found = source.numbers[torch.where(mask, source.offset, 0)]
        return torch.where(mask, found, torch.full_like(found, other))

    def store(self, target: Pointer, value: Tensor, mask: Tensor) -> None:
        mask = mask.expand(value.shape)
        target.numbers[target.offset.expand(value.shape)[mask]] = value[mask]

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], _: object) -> Shared | Barriers:
        if dtype is torch.int64:
            return Barriers(shape[0])
        return Shared(torch.full(tuple(shape), float("nan"), dtype=dtype))

    def meet(self) -> None:
        self.together = True

    def expect(self, barrier: Barrier, count: int, pred: bool = True) -> None:
        if pred:
            assert not barrier.pending and not barrier.expected, "a barrier is used for two copies"
            barrier.expected = count

    def copy(
        self, pages: Any, place: Sequence[int], barrier: Barrier, slot: Shared, pred: bool = True
    ) -> None:
        if not pred:
            return
        assert self.together, "a slot is overwritten before all threads are done with it"
        assert barrier.expected == slot.numbers.nbytes
        slot.numbers.fill_(float("nan"))
        rows = pages.numbers[place[0] : place[0] + len(slot.numbers)]
        assert rows.shape == slot.numbers.shape
        barrier.expected = 0
        barrier.pending.append(lambda: slot.store(rows))

    def wait_copy(self, barrier: Barrier, phase: int, pred: bool = True) -> None:
        if pred:
            self.together = False
            barrier.wait(phase)

    def multiply(
        self, a: Tensor, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async and isinstance(acc, Tensor)
        product = Product()

        def finish() -> None:
            product.value = a.float() @ b.numbers.float() + (acc if use_acc else 0.0)

        self.in_flight.append(finish)
        return product

    def wait_products(self, outstanding: int, deps: Sequence[Product | Tensor]) -> Any:
        self.together = False
        while len(self.in_flight) > outstanding:
            self.in_flight.popleft()()
        found = [dep.value if isinstance(dep, Product) else dep for dep in deps]
        assert all(value is not None for value in found), "a product is read before it is done"
        return found[0] if len(found) == 1 else tuple(found)

    def run(self, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
        names = dict(vars(played)) | {
            "gl": self.language, "hopper": self.hopper, "_copy_page": self.copy, "_all_threads": self.meet,
            "LN_2": LN_2.value, "LOG2_E": LOG2_E.value,
        }  # fmt: skip
        for name in ("_fetch", "_page", "_scores", "_softmax", "_output", "_chunk_overlapped"):
            names[name] = FunctionType(getattr(played, name).fn.__code__, names, name)
        for x in range(grid[0]):
            for y in range(grid[1]):
                self.program = (x, y)
                names["_chunk_overlapped"](*arguments, **constants)
                assert not self.in_flight


def pages(cache: Tensor, tile: int) -> SimpleNamespace:
    """What a descriptor of a cache is to the kernel."""
    dim = cache.shape[-1]
    nbytes = tile * dim * cache.element_size()
    return SimpleNamespace(
        numbers=cache.reshape(-1, dim),
        dtype=cache.dtype,
        layout=None,
        block_type=SimpleNamespace(nbytes=nbytes),
    )
