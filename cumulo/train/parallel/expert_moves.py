"""Experts change places: rows of weights and of whatever goes with them travel between ranks, in one message per
pair of ranks. Called by `expert_balance.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulo.ranks.collectives import all_to_all
from cumulo.ranks.groups import Group

Rows = Sequence[Sequence[int]]  # by rank of a group: which expert each of its rows is


@torch.no_grad()
def exchange_rows(
    tensors: Sequence[Tensor], before: Rows, after: Rows, group: Group, device: torch.device
) -> None:
    """In place: row n of each tensor is of expert `before[own][n]` and becomes of expert `after[own][n]`.

    Every rank of the group calls it with the same two; a rank without rows may have no tensors. `device`: whose
    memory the group can send from, wherever the tensors are.
    """
    rank = group.rank()
    own, wanted = list(before[rank]), after[rank]
    leaving = [[own.index(expert) for expert in theirs if expert in own] for theirs in after]
    arriving = [[expert for expert in wanted if expert in theirs] for theirs in before]
    came = {expert: row for row, expert in enumerate(expert for experts in arriving for expert in experts)}
    tensors = tensors if own else []
    parts = [_bytes(tensor.to(device)) for tensor in tensors]
    index = _index([row for rows in leaving for row in rows], device)
    sent = torch.cat(parts, 1)[index] if parts else torch.empty((0, 1), dtype=torch.uint8, device=device)
    received = sent.new_empty(len(wanted), sent.shape[1])
    all_to_all(received, sent, group, [len(experts) for experts in arriving], [len(rows) for rows in leaving])
    in_order, begin = received[_index([came[expert] for expert in wanted], device)], 0
    for tensor, part in zip(tensors, parts, strict=True):
        end = begin + part.shape[1]
        tensor.copy_(in_order[:, begin:end].contiguous().view(tensor.dtype).view(tensor.shape))
        begin = end


def _index(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    """[rows, bytes of a row]."""
    return tensor.detach().reshape(len(tensor), -1).contiguous().view(torch.uint8)
