"""MirroredMemory: what other ranks show, where their memory cannot be read because they are on other hosts. Every
rank holds a copy of each member's bytes; before a kernel reads, `bring` fills the copies by messages.

Kernels are those of ranks that share memory (kernels/cuda/collective): they read the copies at the addresses they
are given, and add up in the same order, so the bits are the same, too.
"""

import torch
from torch import Tensor

from cumulo.kernels.cuda.collective.peers import PeerMemory, PeerTensor
from cumulo.ranks.device_group import MessageGroup


class MirroredMemory(PeerMemory):
    def __init__(self, size: int, group: MessageGroup, device: torch.device) -> None:
        """`size` zero bytes for every member, all of them here."""
        self.group = group
        self._copies = torch.zeros((group.size, size), dtype=torch.uint8, device=device)
        addresses = [one.data_ptr() for one in self._copies]
        super().__init__(self._copies[group.index], addresses, group.index, keep=self._copies)

    @property
    def waits(self) -> bool:
        """Kernels never wait: what they read is here before they are launched."""
        return False

    @waits.setter
    def waits(self, exchanges: bool) -> None:
        self.group.waits = exchanges

    def bring(self, tensor: PeerTensor, size: int) -> None:
        begin = tensor.own.data_ptr() - self._copies[self.rank].data_ptr()
        self.group.gather(self._copies[:, begin : begin + size])


def bring(memory: PeerMemory, tensor: PeerTensor, shown: Tensor) -> None:
    """All members call it when they have launched what writes `shown`, the first numbers of their own tensor. What
    is launched after sees every member's. Where memory is really shared there is nothing to do."""
    if isinstance(memory, MirroredMemory):
        memory.bring(tensor, shown.nbytes)
