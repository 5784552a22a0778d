"""RankGroup: ranks of an engine that talk to each other over gloo. Made by each of them alike.

It stands apart from torch's default group, of which a process has only one: several engines may live in a process.
Every call is counted before it waits, so that whoever looks for a rank that hangs finds the one that is behind, and
how long it waits is measured.
"""

import contextlib
import socket
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from cumulo.collectives.decide.measured import parse_choices, read_collective_profile, split_profile
from cumulo.collectives.play.groups import make_player
from cumulo.errors import CumuloError
from cumulo.ranks.collectives import Work
from cumulo.ranks.scheduled import scheduled

THIS_HOST = "127.0.0.1"
__all__ = ["THIS_HOST", "RankGroup", "TCPStore", "meeting_point"]


class RankGroup:
    def __init__(
        self,
        store: TCPStore,
        name: str,
        members: tuple[int, ...],
        rank: int,
        timeout_s: float,
        meter: AbstractContextManager[None] | None = None,
        host: str = THIS_HOST,
        collective: str = "",
    ) -> None:
        """`rank` is one of the members; all of them make it. `meter` is entered while others are waited for.
        `host`: the address of this one's at which the others reach it. `collective`: which of our schedules add,
        on one host, such as all_reduce=ring or profile=FILE; empty: gloo."""
        self.members, self.index, self.size = members, members.index(rank), len(members)
        self._waiting = meter or contextlib.nullcontext()
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group = gloo(PrefixStore(name, store), self.index, self.size, options)
        algorithms, profile = split_profile(collective if host == THIS_HOST else "")
        self._algorithm = parse_choices(algorithms).get("all_reduce")
        self._profile = read_collective_profile(profile)
        if self._algorithm or self._profile is not None:
            self._player = make_player("shm", self.index, self.size, store, timeout_s, f"ranks {name}")

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all members, in place, with the same bits on all of them."""
        with self._waiting:
            if not tensor.numel():
                return tensor
            if (ours := self._chosen(tensor.nbytes)) is not None:
                whole = tensor.contiguous()
                self._player.run(
                    scheduled("all_reduce", ours, self.size, whole.numel(), whole.element_size()), whole
                )
                if whole is not tensor:
                    tensor.copy_(whole)
            else:
                self._group.allreduce([tensor]).wait()
        return tensor

    def _chosen(self, size_bytes: int) -> str | None:
        """The schedule that adds; None: gloo does."""
        if self._profile is None or self._algorithm not in (None, "auto"):
            return self._algorithm
        return self._profile.fastest("all_reduce", size_bytes, self.size, self._algorithm)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every member's tensor; all have one shape."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self.gather_into(found, tensor.contiguous())
        return found

    def gather_into(self, found: list[Tensor], tensor: Tensor) -> None:
        """The same, into memory that the caller keeps."""
        with self._waiting:
            if tensor.numel():
                self._group.allgather([found], [tensor]).wait()

    def share(self, tensor: Tensor) -> Tensor:
        """The first member's tensor, in place on the others."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self._waiting:
            self._group.broadcast([tensor], options).wait()
        return tensor

    def send(self, tensor: Tensor, to: int) -> Work:
        """To the member of this number; the tensor must stay as it is until the work is done."""
        work: Work = self._group.send([tensor.contiguous()], to, 0)
        return work

    def receive(self, tensor: Tensor, sender: int, counted: bool = True) -> Tensor:
        """`counted`: every rank waits as often as this one, so that how often says who is behind."""
        with self._waiting if counted else contextlib.nullcontext():
            self._group.recv([tensor], sender, 0).wait()
        return tensor


def _check_own(host: str) -> None:
    """torch would try for minutes to reach another one."""
    try:
        with socket.socket() as found:
            found.bind((host, 0))
    except (OSError, UnicodeError) as error:
        raise CumuloError(
            f"{host!r} is no address of this host ({error}): rank_address is the one at which other hosts reach it"
        ) from error


def meeting_point(port: int | None = None, host: str = THIS_HOST) -> TCPStore:
    """Where ranks find each other: opened by one of them, at a port for the others."""
    if port is None:
        if host != THIS_HOST:
            _check_own(host)
        return TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return TCPStore(host, port, is_master=False)
