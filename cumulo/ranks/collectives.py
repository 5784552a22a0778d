"""Collectives without gradients. Everyone in a group calls them in the same order; a group of None is this rank
alone, for which nothing is sent or copied. `differentiable.py` has those that gradients pass through."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from cumulo.collectives.decide.measured import parse_choices, read_collective_profile
from cumulo.collectives.decide.schedule import Collective
from cumulo.ranks.groups import Group, lane_group
from cumulo.ranks.scheduled import CollectiveChoices, ScheduledCollectives

# Bytes on the busiest link over bytes of the buffer, as nccl-tests counts bus bandwidth.
_BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Calls of one kind and size, together."""

    kind: str
    ranks: int
    size_bytes: int
    calls: int
    seconds: float

    @property
    def bus_bytes_per_s(self) -> float:
        share = _BUS[self.kind] * (self.ranks - 1) / self.ranks
        return self.calls * self.size_bytes * share / self.seconds if self.seconds else 0.0


class CollectiveMeter:
    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int], tuple[int, float]] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, tensor: Tensor, ranks: int, began: float) -> None:
        """A call that began at this `time.perf_counter()` has ended."""
        if tensor.device.type != "cpu":
            return
        seconds, key = time.perf_counter() - began, (kind, ranks, tensor.nbytes)
        with self._lock:
            calls, so_far = self._found.get(key, (0, 0.0))
            self._found[key] = (calls + 1, so_far + seconds)

    def take_times(self) -> list[CollectiveTime]:
        """Since it was last asked, the longest first."""
        with self._lock:
            found, self._found = self._found, {}
        times = [CollectiveTime(*key, calls, seconds) for key, (calls, seconds) in found.items()]
        return sorted(times, key=lambda one: -one.seconds)


meter = CollectiveMeter()


Work: TypeAlias = dist.Work  # something on its way: `wait()` for it

# Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_schedules = ScheduledCollectives(CollectiveChoices())
_Ours: TypeAlias = Callable[[Group, str], None]  # in this group, by this algorithm
_Theirs: TypeAlias = Callable[..., Any]  # torch's, of `group` and perhaps `async_op`


def use_collectives(choices: str | CollectiveChoices, profile: str = "") -> None:
    """Which algorithms of ours carry out collectives of CPU tensors, such as `all_reduce=ring`, from now on in this
    process; empty: torch.distributed's. `profile`: a file of measurements that decides the rest. All ranks say the
    same."""
    global _schedules
    _schedules.close()
    if isinstance(choices, str):
        choices = CollectiveChoices(parse_choices(choices), read_collective_profile(profile))
    _schedules = ScheduledCollectives(choices)


def _run(kind: Collective, sized: Tensor, group: Group, ours: _Ours, theirs: _Theirs) -> None:
    """By our schedule, where one is chosen; `sized`: the tensor whose size counts."""
    group, began = lane_group(group), time.perf_counter()
    if (algorithm := _schedules.algorithm(kind, sized, group.size())) is not None:
        ours(group, algorithm)
    else:
        theirs(group=group)
    meter.add(kind, sized, group.size(), began)


def _start(kind: Collective, sized: Tensor, group: Group, ours: _Ours, theirs: _Theirs) -> Work | None:
    """None: it is done."""
    if _schedules.algorithm(kind, sized, group.size()) is not None:
        return _schedules.start(lambda: _run(kind, sized, group, ours, theirs))
    began = time.perf_counter()
    return _timed(theirs(group=lane_group(group), async_op=True), kind, sized, group.size(), began)


class _TimedWork(dist.Work):
    """For gloo's reduce-scatter: nobody is told when it ends: it is timed until it is waited for."""

    def __init__(self, work: Work, ended: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._ended = work, ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._work.wait()
        self._ended()
        return bool(done)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _timed(work: Work | None, kind: str, tensor: Tensor, ranks: int, began: float) -> Work | None:
    if work is None or tensor.device.type != "cpu":
        return work
    try:
        work.get_future().add_done_callback(lambda _: meter.add(kind, tensor, ranks, began))
    except RuntimeError:
        return _TimedWork(work, lambda: meter.add(kind, tensor, ranks, began))
    return work


def all_reduce(tensor: Tensor, group: Group | None) -> None:
    """The sum over ranks, in place."""
    if group is not None:
        _run(
            "all_reduce",
            tensor,
            group,
            partial(_schedules.all_reduce, tensor),
            partial(dist.all_reduce, tensor),
        )


def start_all_reduce(tensor: Tensor, group: Group | None) -> Work | None:
    if group is None:
        return None
    theirs = partial(dist.all_reduce, tensor)
    return _start("all_reduce", tensor, group, partial(_schedules.all_reduce, tensor), theirs)


def all_gather(whole: Tensor, own: Tensor, group: Group) -> None:
    """Every rank's `own`, one after another along the first dimension."""
    _run(
        "all_gather",
        whole,
        group,
        partial(_schedules.all_gather, whole, own),
        partial(_all_gather, whole, own),
    )


def start_all_gather(whole: Tensor, own: Tensor, group: Group) -> Work | None:
    ours, theirs = partial(_schedules.all_gather, whole, own), partial(_all_gather, whole, own)
    return _start("all_gather", whole, group, ours, theirs)


def all_gather_list(own: Tensor, group: Group) -> list[Tensor]:
    """Every rank's tensor; all have one shape."""
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    return found


def reduce_scatter(own: Tensor, whole: Tensor, group: Group) -> None:
    """This rank's part of the sum over ranks, cut along the first dimension."""
    ours, theirs = partial(_schedules.reduce_scatter, own, whole), partial(_reduce_scatter, own, whole)
    _run("reduce_scatter", whole, group, ours, theirs)


def start_reduce_scatter(own: Tensor, whole: Tensor, group: Group) -> Work | None:
    ours, theirs = partial(_schedules.reduce_scatter, own, whole), partial(_reduce_scatter, own, whole)
    return _start("reduce_scatter", whole, group, ours, theirs)


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: Group,
    receives: list[int] | None = None,
    sends: list[int] | None = None,
) -> None:
    """Runs of rows to all ranks and from all ranks; None: equal ones."""
    ours = partial(_schedules.all_to_all, received, sent, (receives, sends))
    _run("all_to_all", sent, group, ours, partial(dist.all_to_all_single, received, sent, receives, sends))


def gather_objects(own: Any, group: Group) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


def barrier(group: Group) -> None:
    dist.barrier(group=group)


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
