"""Memory that the ranks of one host read in each other's place: on GPUs PyTorch's symmetric memory, on CPUs a file
that all of them map. What lies in it, and when who may read, is the kernels' matter (kernels/cuda/collective)."""

import mmap
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from cumulo.errors import ConfigError
from cumulo.kernels.cuda.collective.peers import PeerMemory

_met = False


def peer_memory(
    size: int, store: Store, name: str, rank: int, ranks: int, device: torch.device
) -> PeerMemory:
    """`size` zero bytes on every rank. All of them call it; they meet in the store under a name that is theirs."""
    if device.type == "cuda":
        return _symmetric(size, store, name, rank, ranks, device)
    return _mapped(size, PrefixStore(name, store), rank, ranks)


def _symmetric(size: int, store: Store, name: str, rank: int, ranks: int, device: torch.device) -> PeerMemory:
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory

    global _met
    if _met:
        # torch counts the meetings of a process: those of other processes that begin now would not find it.
        raise ConfigError(
            "this process has had an engine over several GPUs already; start the next one in a new process"
        )
    _met = True
    group = ProcessGroup(PrefixStore(name, store), rank, ranks)  # only its store is asked for
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]
    own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = _SymmetricMemory.rendezvous(own, name)
    handle.barrier()  # all of them are zero
    torch.cuda.synchronize(device)
    shares = torch.cuda.device_count() < ranks
    return PeerMemory(own, list(handle.buffer_ptrs), rank, keep=(handle, group), shares_device=shares)


def _mapped(size: int, store: Store, rank: int, ranks: int) -> PeerMemory:
    shared = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(prefix="cumulo-peers-", dir=shared if shared.is_dir() else None) as own:
        own.truncate(size)
        store.set(f"path {rank}", own.name)
        views: list[Tensor] = []
        for peer in range(ranks):
            with Path(store.get(f"path {peer}").decode()).open("r+b") as file:
                views.append(torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8))
        store.set(f"mapped {rank}", "yes")
        store.wait([f"mapped {peer}" for peer in range(ranks)])  # the names may go
    return PeerMemory(views[rank], [view.data_ptr() for view in views], rank, keep=views)
