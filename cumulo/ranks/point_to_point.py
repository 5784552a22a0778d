"""Messages from one rank of a group to another: a pipeline's transport, a ring, files of checkpoints."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cumulo.ranks.collectives import Work
from cumulo.ranks.groups import Group


@dataclass(frozen=True, slots=True)
class Peers:
    """The other ranks of a group, by their number in it. A `Transport` of the pipeline's player."""

    group: Group

    def send(self, tensor: Tensor, peer: int) -> Work:
        return _begun(dist.isend(tensor, group=self.group, group_dst=peer))

    def receive(self, tensor: Tensor, peer: int) -> Work:
        return _begun(dist.irecv(tensor, group=self.group, group_src=peer))


def _begun(work: Work | None) -> Work:
    if work is None:
        raise ValueError("this rank is not in the group")
    return work


class Ring:
    """A rank's neighbours: what it has goes to the next, what it gets comes from the one before."""

    def __init__(self, group: Group | None) -> None:
        """None: a ring of one."""
        self.group = group
        self.size, self.index = (1, 0) if group is None else (group.size(), group.rank())

    def pass_on(self, tensor: Tensor, tag: int) -> "Passing":
        if self.group is None:
            raise ValueError("a ring of one has nobody to pass to")
        tensor = tensor.contiguous()
        arriving = torch.empty_like(tensor)
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=after),
            dist.P2POp(dist.irecv, arriving, group=self.group, tag=tag, group_peer=before),
        ]
        return Passing(tensor, arriving, dist.batch_isend_irecv(operations))


@dataclass(frozen=True, slots=True, eq=False)
class Passing:
    sent: Tensor  # held until it has left
    arriving: Tensor
    works: list[Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving
