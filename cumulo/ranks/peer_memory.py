"""Memory that the ranks of one host read in each other's place: on GPUs PyTorch's symmetric memory, on CPUs a file
that all of them map. What lies in it, and when who may read, is the kernels' matter (kernels/cuda/collective)."""

import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from cumulo.errors import ConfigError
from cumulo.kernels.cuda.collective.peers import PeerMemory, PeerTensor
from cumulo.ranks.device_group import MessageGroup

Together = Callable[[Callable[[], Any]], Any]
_met = False


def _alone(work: Callable[[], Any]) -> Any:
    return work()


def peer_memory(
    size: int,
    store: Store,
    name: str,
    rank: int,
    ranks: int,
    device: torch.device,
    together: Together = _alone,
) -> PeerMemory:
    """`size` zero bytes on every rank. All of them call it; they meet in the store under a name that is theirs.
    `together`: does what one rank may fail at, such that all hear of it before they wait for each other."""
    if device.type == "cuda":
        return _symmetric(size, store, name, rank, ranks, device, together)
    return _mapped(size, PrefixStore(name, store), rank, ranks, together)


def _symmetric(
    size: int, store: Store, name: str, rank: int, ranks: int, device: torch.device, together: Together
) -> PeerMemory:
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

    def zeros() -> Tensor:
        made: Tensor = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, name).zero_()
        torch.cuda.synchronize(device)
        return made

    own = together(zeros)
    handle = together(lambda: _SymmetricMemory.rendezvous(own, name))
    handle.barrier()  # all of them are zero
    torch.cuda.synchronize(device)
    shares = torch.cuda.device_count() < ranks
    return PeerMemory(own, list(handle.buffer_ptrs), rank, keep=(handle, group), shares_device=shares)


def _mapped(size: int, store: Store, rank: int, ranks: int, together: Together) -> PeerMemory:
    with together(lambda: _room(size)) as own:
        store.set(f"path {rank}", own.name)
        views: list[Tensor] = []
        for peer in range(ranks):
            with Path(store.get(f"path {peer}").decode()).open("r+b") as file:
                views.append(torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8))
        store.set(f"mapped {rank}", "yes")
        store.wait([f"mapped {peer}" for peer in range(ranks)])  # the names may go
    return PeerMemory(views[rank], [view.data_ptr() for view in views], rank, keep=views)


def _room(size: int) -> Any:
    """A file of so many zeros that others can map."""
    shared = Path("/dev/shm")
    folder = shared if shared.is_dir() else None
    own = tempfile.NamedTemporaryFile(prefix="cumulo-peers-", dir=folder)  # noqa: SIM115
    own.truncate(size)
    return own


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
