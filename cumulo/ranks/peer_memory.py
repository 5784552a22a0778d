"""Memory that the ranks of one host read in each other's place: on GPUs PyTorch's symmetric memory, on CPUs a file
that all of them map. What lies in it, and when who may read, is the kernels' matter (kernels/cuda/collective)."""

import mmap
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from cumulo.kernels.cuda.collective.peers import PeerMemory
from cumulo.ranks.collectives import gather_objects
from cumulo.ranks.groups import Group


def peer_memory(size: int, group: Group, device: torch.device) -> PeerMemory:
    """`size` zero bytes on every rank of the group; all of them call it."""
    if device.type == "cuda":
        return _symmetric(size, group, device)
    return _mapped(size, group)


def _symmetric(size: int, group: Group, device: torch.device) -> PeerMemory:
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(own, group.group_name)
    memory = PeerMemory(own, list(handle.buffer_ptrs), handle.rank, keep=handle)
    handle.barrier()
    torch.cuda.synchronize(device)
    return memory


def _mapped(size: int, group: Group) -> PeerMemory:
    shared = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(prefix="cumulo-peers-", dir=shared if shared.is_dir() else None) as own:
        own.truncate(size)
        views: list[Tensor] = []
        for name in gather_objects(own.name, group):
            with Path(name).open("r+b") as file:
                views.append(torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8))
        gather_objects(None, group)  # everybody has mapped everything: the names may go
    return PeerMemory(views[group.rank()], [view.data_ptr() for view in views], group.rank(), keep=views)
