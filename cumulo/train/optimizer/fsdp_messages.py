"""FSDP2's messages between CPU ranks through the door of `ranks.collectives`, where schedules are chosen and times
taken. `FullySharded` hands them to torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from cumulo.ranks.collectives import Work, all_gather, reduce_scatter, start_all_gather
from cumulo.ranks.groups import Group


class GatherThroughDoor(AllGather):
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        if async_op:
            return start_all_gather(output_tensor, input_tensor, group)
        all_gather(output_tensor, input_tensor, group)
        return None


class ScatterThroughDoor(ReduceScatter):
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        """Of sums: `FullySharded` asks for no other."""
        reduce_scatter(output_tensor, input_tensor, group)
        return None
