"""Groups: the process groups of a layout, as one rank sees them. Everything that talks between ranks asks here.

    groups = Groups(layout, rank)
    all_reduce(gradient, groups.group("dp"))

A layout of one rank has no process group and talks to nobody: torch.distributed need not be started for it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeAlias, get_args

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from cumulo.errors import ConfigError
from cumulo.layout.layout import Axis, Layout

Group: TypeAlias = dist.ProcessGroup


class Groups:
    def __init__(self, layout: Layout, rank: int = 0) -> None:
        """Call it on every rank, after `join_ranks`: groups are made together."""
        started = dist.get_world_size() if dist.is_initialized() else 1
        if started != layout.world:
            raise ConfigError(
                f"layout {layout} has {layout.world} ranks and {started} were started; "
                "change the layout or the number of processes"
            )
        if layout.world == 1:
            layout = replace(layout, zero=0, shard=None)  # there is nobody to share with
        self.layout, self.rank, self.place = layout, rank, layout.place(rank)
        self._members: dict[Axis, tuple[int, ...]] = {
            axis: layout.group(axis, rank) for axis in get_args(Axis)
        }
        # Each rank makes only its own groups: making all of them would cost world² in a large job. That needs care:
        # no two ranks meet in different order, because an axis's groups are disjoint and all ranks go through the
        # axes alike; and all make as many, since torch names a group after its members and how many were before.
        self._groups: dict[tuple[int, ...], Group] = {}
        for members in self._members.values():
            if layout.world > 1 and members not in self._groups:
                self._groups[members] = world_group() if len(members) == layout.world else new_group(members)

    def group(self, axis: Axis) -> Group:
        """A group of a layout of several ranks; a group may still have one member."""
        return self._groups[self._members[axis]]

    def group_of_several(self, axis: Axis) -> Group | None:
        """None: this rank is the only member, and a collective has nothing to do."""
        return self.group(axis) if self.size(axis) > 1 else None

    def members(self, axis: Axis) -> tuple[int, ...]:
        """Their ranks in the world, in the order in which they count themselves."""
        return self._members[axis]

    def size(self, axis: Axis) -> int:
        return len(self._members[axis])

    def index(self, axis: Axis) -> int:
        """This rank's number in its group."""
        return self._members[axis].index(self.rank)


def world_group() -> Group:
    """All ranks that were started."""
    if (world := dist.group.WORLD) is None:
        raise ConfigError("no ranks were started: call it inside join_ranks")
    return world


def world_store() -> Store:
    """Where the ranks met."""
    return dist.distributed_c10d._get_default_store()


def new_group(members: tuple[int, ...]) -> Group:
    """Made by its members alone, which all call it in the same order."""
    made = dist.new_group(list(members), use_local_synchronization=True)
    assert isinstance(made, Group)
    return made


def control_group(timeout: timedelta | None = None) -> Group:
    """All ranks again, over gloo: for objects and files, apart from the messages of training."""
    made = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(made, Group)
    return made


_AXES: tuple[Axis, ...] = ("tp", "cp", "ulysses", "ring", "ep")  # those that a layer's collectives use
_this_thread = threading.local()


class SecondLane:
    def __init__(self, groups: Groups) -> None:
        """All ranks make it, in the same order of axes."""
        self._twins: dict[Group, Group] = {}
        for axis in _AXES:
            group = groups.group_of_several(axis)
            if group is not None and group not in self._twins:
                self._twins[group] = new_group(groups.members(axis))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While it is entered, this thread's collectives use the second groups."""
        _this_thread.twins = self._twins
        try:
            yield
        finally:
            _this_thread.twins = {}


def lane_group(group: Group) -> Group:
    twins: dict[Group, Group] = getattr(_this_thread, "twins", {})
    return twins.get(group, group)
