"""A player by the name of its transport, for ranks that can reach a store. The command, benchmarks and `ranks`
make one."""

from datetime import timedelta
from typing import Literal, Protocol, get_args

import torch.distributed as dist
from torch import Tensor, uint8
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from cumulo.collectives.decide.schedule import CollectiveSchedule, Transfer
from cumulo.collectives.play.messages import CollectiveStanding, MessagePlayer, Parts
from cumulo.collectives.play.shared_memory import SharedMemoryPlayer
from cumulo.collectives.play.sockets import LinkShaper, SocketExchange
from cumulo.errors import ConfigError


class TorchExchange:
    """Messages over torch.distributed's send and receive: any backend that has them."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
        self._group, self._timeout_s = group, timeout_s

    def prepare(self, schedule: CollectiveSchedule) -> None: ...

    def exchange(self, number: int, standing: CollectiveStanding, sends: Parts, receives: Parts) -> None:
        works: list[tuple[Transfer, dist.Work | None]] = []
        for transfer, views in sends:
            for view in views:
                works.append((transfer, self._start(dist.isend, view, transfer, standing.channel)))
        for transfer, views in receives:
            for view in views:
                works.append((transfer, self._start(dist.irecv, view, transfer, standing.channel)))
        for transfer, work in works:
            try:
                if work is not None:
                    work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    raise standing.late(transfer, self._timeout_s) from None
                raise standing.failed(transfer, str(error).splitlines()[0]) from None

    def _start(self, call, view: Tensor, transfer: Transfer, channel: int) -> dist.Work | None:  # type: ignore[no-untyped-def]
        """Bytes: not every backend knows every dtype. Nothing is sent of nothing."""
        if not view.numel():
            return None
        data = view.view(uint8)
        if self._group is None:
            return call(data, transfer.peer, tag=channel)  # type: ignore[no-any-return]
        keyword = {"group_dst" if call is dist.isend else "group_src": transfer.peer}
        return call(data, group=self._group, tag=channel, **keyword)  # type: ignore[no-any-return]


Transport = Literal["shm", "tcp", "torch"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


class CollectivePlayer(Protocol):
    def run(self, schedule: CollectiveSchedule, tensor: Tensor, received: Tensor | None = None) -> None: ...


def make_player(
    transport: str,
    rank: int,
    nodes: int,
    store: Store,
    timeout_s: float = 60.0,
    name: str = "world",
    group: ProcessGroup | None = None,
    shaper: LinkShaper | None = None,
) -> CollectivePlayer:
    """`nodes`: ranks, and switches that are played by processes. All of them call it. `group`: whose members
    messages of torch.distributed go to; None: all ranks. `shaper`: the card that TCP's bytes pass."""
    own = PrefixStore(f"collectives {name}", store)
    if transport == "shm":
        return SharedMemoryPlayer(rank, nodes, own, timeout_s)
    if transport == "tcp":
        return MessagePlayer(rank, SocketExchange(rank, own, timeout_s, shaper=shaper))
    if transport == "torch":
        return MessagePlayer(rank, TorchExchange(group, timeout_s))
    raise ConfigError(f"there is no transport {transport!r}; there are {', '.join(TRANSPORTS)}")
