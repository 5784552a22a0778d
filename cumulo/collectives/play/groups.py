"""A player by the name of its transport, for ranks that can reach a store. The command, benchmarks and `ranks`
make one."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, get_args

import torch.distributed as dist
from torch import Tensor, empty_like, uint8
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from cumulo.collectives.decide.schedule import Transfer
from cumulo.collectives.play.messages import CollectiveStanding, MessagePlayer, Parts
from cumulo.collectives.play.shared_memory import SharedMemoryExchange
from cumulo.errors import ConfigError


class TorchExchange:
    """Messages over torch.distributed's send and receive: any backend that has them."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def exchange(self, number: int, standing: CollectiveStanding, sends: Parts, receives: Parts) -> Parts:
        arrived = [(transfer, [empty_like(view) for view in views]) for transfer, views in receives]
        works: list[tuple[Transfer, dist.Work]] = []
        for call, parts in ((dist.irecv, arrived), (dist.isend, sends)):  # a missing message is named first
            for transfer, views in parts:
                with self._named(standing, transfer):
                    some = [view for view in views if view.numel()]  # nothing is sent of nothing
                    works += [
                        (transfer, self._start(call, view, transfer, standing.channel)) for view in some
                    ]
        for transfer, work in works:
            with self._named(standing, transfer):
                work.wait(timedelta(seconds=self._timeout_s))
        return arrived

    @contextmanager
    def _named(self, standing: CollectiveStanding, transfer: Transfer) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            if "timed out" in text:
                raise standing.late(transfer, self._timeout_s) from None
            if "by peer" in text or "broken pipe" in text:
                raise standing.gone(transfer) from None
            raise standing.failed(transfer, str(error).splitlines()[0]) from None

    def _start(self, call, view: Tensor, transfer: Transfer, channel: int) -> dist.Work:  # type: ignore[no-untyped-def]
        """Bytes: not every backend knows every dtype."""
        data = view.view(uint8)
        if self._group is None:
            return call(data, transfer.peer, tag=channel)  # type: ignore[no-any-return]
        keyword = {"group_dst" if call is dist.isend else "group_src": transfer.peer}
        return call(data, group=self._group, tag=channel, **keyword)  # type: ignore[no-any-return]

    def used(self, standing: CollectiveStanding, receives: Parts) -> None:
        """It has memory of its own."""

    def close(self) -> None:
        """The group is its maker's."""


Transport = Literal["shm", "torch"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


def make_player(
    transport: str,
    rank: int,
    nodes: int,
    store: Store,
    timeout_s: float = 60.0,
    name: str = "world",
    group: ProcessGroup | None = None,
) -> MessagePlayer:
    """`nodes`: ranks, and switches that are played by processes. All of them call it. `group`: whose members
    messages of torch.distributed go to; None: all ranks."""
    if transport == "shm":
        own = PrefixStore(f"collectives {name}", store)
        return MessagePlayer(rank, SharedMemoryExchange(rank, nodes, own, timeout_s))
    if transport == "torch":
        return MessagePlayer(rank, TorchExchange(group, timeout_s))
    raise ConfigError(f"there is no transport {transport!r}; there are {', '.join(TRANSPORTS)}")
