"""MessageGroup: ranks that exchange tensors of their devices by messages, because they cannot read each other's
memory: NCCL between GPUs, or gloo through page-locked host memory. Made by every member alike.

NCCL's messages are launched like kernels and can be captured in a CUDA graph. Gloo's are sent by the host, which
waits for the device before each: slow, but it works wherever a socket does, also for two ranks on one GPU.
"""

from collections import deque
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cumulo.errors import ConfigError
from cumulo.ranks.collectives import Work
from cumulo.ranks.rank_group import RankGroup

_AHEAD = 2  # messages that the receiver has not taken yet


def has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available()


class NcclGroup:
    def __init__(
        self,
        store: TCPStore,
        name: str,
        members: tuple[int, ...],
        rank: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        if not has_nccl():
            raise ConfigError("this PyTorch was built without NCCL: use rank_backend=gloo")
        self.index, self.size = members.index(rank), len(members)
        self.waits = True  # False: nothing is exchanged; kernels of a step are rehearsed without the others
        self._aborted = False
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group = nccl(PrefixStore(f"nccl {name}", store), self.index, self.size, options)
        # Connections are made by the first message; inside a capture it would be too late.
        with torch.cuda.device(device):
            self._group.allreduce([torch.zeros(1, device=device)]).wait()
            torch.cuda.synchronize(device)

    def gather(self, rows: Tensor) -> None:
        """rows [members, n]: of every member its own row, in place. Rows may lie apart; each is in one piece."""
        if self.waits and rows.numel():
            found = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
            self._group._allgather_base(found, rows[self.index]).wait()
            rows.copy_(found)

    def largest(self, numbers: Tensor) -> None:
        """Of each number the largest that a member has, in place."""
        if self.waits and numbers.numel():
            options: Any = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self._group.allreduce([numbers], options).wait()

    def send(self, tensor: Tensor, to: int) -> None:
        """To the member of this number. The tensor may be overwritten by what is launched after."""
        if self.waits and tensor.numel():
            self._group.send([tensor.contiguous()], to, 0).wait()

    def receive(self, tensor: Tensor, sender: int) -> None:
        if self.waits and tensor.numel():
            self._group.recv([tensor], sender, 0).wait()

    def abort(self) -> None:
        """A member is gone: what waits for it on the device ends, with nonsense."""
        if not self._aborted:
            self._aborted = True
            self._group.abort()


class StagedGroup:
    """Over gloo. Every message passes through host memory: page-locked, where the device is a GPU."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.index, self.size, self.waits = group.index, group.size, True
        self._group, self._on_gpu = group, device.type == "cuda"
        self._room = torch.empty(0, dtype=torch.uint8)
        self._leaving: deque[tuple[Work, Tensor]] = deque()

    def gather(self, rows: Tensor) -> None:
        if not self.waits or not rows.numel():
            return
        row_bytes = rows[0].nbytes
        self._wait()  # what came before may still be on its way from the same memory
        room = self._host(row_bytes * (self.size + 1)).view(self.size + 1, row_bytes)
        own, found = room[self.size], room[: self.size]
        own.copy_(rows[self.index].view(torch.uint8).view(-1), non_blocking=True)
        self._wait()
        self._group.gather_into(list(found), own)
        rows.copy_(found.view(rows.dtype).view(rows.shape), non_blocking=True)

    def largest(self, numbers: Tensor) -> None:
        if self.waits and numbers.numel():
            numbers.copy_(torch.stack(self._group.gather(numbers.cpu())).amax(0))

    def send(self, tensor: Tensor, to: int) -> None:
        if not self.waits or not tensor.numel():
            return
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
        held.copy_(tensor, non_blocking=True)
        self._wait()
        self._leaving.append((self._group.send(held, to), held))
        while len(self._leaving) > _AHEAD:  # gloo says that one has left to nobody but who waits for it
            self._leaving.popleft()[0].wait()

    def receive(self, tensor: Tensor, sender: int) -> None:
        if self.waits and tensor.numel():
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
            tensor.copy_(self._group.receive(held, sender), non_blocking=True)

    def abort(self) -> None:
        """Nothing waits on the device, and what waits on the host fails by itself."""

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def _host(self, size: int) -> Tensor:
        if len(self._room) < size:
            self._room = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        return self._room[:size]


MessageGroup: TypeAlias = NcclGroup | StagedGroup
