"""Renumber experts in place: weights, or whatever has their shape, move to the ranks of their new numbers. For runs
that `cumulo.train.expert_placement` finds uneven."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def renumber_experts(
    held: Mapping[str, Tensor], orders: Mapping[int, Sequence[int]], group: dist.ProcessGroup | None
) -> None:
    """`held`: this rank's tensors by parameter name, such as weights or a moment of the optimizer, not cut by ZeRO.
    `orders`: of some layers, the old numbers of the experts in their new order. `group`: the ranks that share out
    the experts, None: all are here. Every rank calls it with the same layers."""
    for name, tensor in held.items():
        if ".ffn." not in name or int(name.split(".")[1]) not in orders:
            continue
        order = orders[int(name.split(".")[1])]
        if ".experts." in name:
            tensor.copy_(_moved(tensor, order, group))
        elif ".router." in name:
            tensor.copy_(tensor[torch.tensor(order, device=tensor.device)])


def _moved(own: Tensor, order: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return own[torch.tensor(order, device=own.device)]
    size, ranks, rank = len(own), group.size(), group.rank()
    wanted = [
        order[other * size : (other + 1) * size] for other in range(ranks)
    ]  # by each rank, in its order
    leaving = [[expert for expert in one if expert // size == rank] for one in wanted]
    arriving = [[expert for expert in wanted[rank] if expert // size == other] for other in range(ranks)]
    sent = own[torch.tensor([expert % size for one in leaving for expert in one], device=own.device)]
    received = torch.empty_like(own)
    dist.all_to_all_single(
        received, sent, [len(one) for one in arriving], [len(one) for one in leaving], group=group
    )
    came = {expert: place for place, expert in enumerate(expert for one in arriving for expert in one)}
    return received[torch.tensor([came[expert] for expert in wanted[rank]], device=own.device)]
