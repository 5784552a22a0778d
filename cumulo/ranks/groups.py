"""Groups: the process groups of a layout, as one rank sees them. Everything that talks between ranks asks here.

groups = Groups(layout, rank)
dist.all_reduce(gradient, group=groups.of("dp"))
"""

from typing import get_args

import torch.distributed as dist

from cumulo.errors import ConfigError
from cumulo.layout.layout import Axis, Layout


class Groups:
    def __init__(self, layout: Layout, rank: int) -> None:
        """Call it on every rank, after `init_process_group`: groups are made together."""
        if dist.get_world_size() != layout.world:
            raise ConfigError(
                f"layout {layout} has {layout.world} ranks and {dist.get_world_size()} were started; "
                "change the layout or the number of processes"
            )
        self.layout, self.rank, self.place = layout, rank, layout.place(rank)
        self._members: dict[Axis, tuple[int, ...]] = {
            axis: layout.group(axis, rank) for axis in get_args(Axis)
        }
        # Each rank makes only its own groups: making all of them would cost world² in a large job. That needs care:
        # no two ranks meet in different order, because an axis's groups are disjoint and all ranks go through the
        # axes alike; and all make as many, since torch names a group after its members and how many were before.
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for members in self._members.values():
            if members not in self._groups:
                self._groups[members] = _make(members, layout.world)

    def of(self, axis: Axis) -> dist.ProcessGroup:
        return self._groups[self._members[axis]]

    def members(self, axis: Axis) -> tuple[int, ...]:
        """Their ranks in the world, in the order in which they count themselves."""
        return self._members[axis]

    def size(self, axis: Axis) -> int:
        return len(self._members[axis])

    def index(self, axis: Axis) -> int:
        """This rank's number in its group."""
        return self._members[axis].index(self.rank)


def _make(members: tuple[int, ...], world: int) -> dist.ProcessGroup:
    if len(members) == world:
        made = dist.group.WORLD
    else:
        made = dist.new_group(list(members), use_local_synchronization=True)
    if made is None:
        raise ConfigError("torch.distributed is not initialised: call init_process_group first")
    return made
