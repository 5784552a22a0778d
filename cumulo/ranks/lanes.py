"""Lanes: a second set of groups for what a rank computes beside something else, so that collectives of the two
never meet. The pipeline's executor computes a forward beside another micro-batch's backward in it.

Ranks of a group call collectives in one order. Two threads of a rank have no common order; each has its own groups
instead, and its own order in them, which is the schedule's and so the same on all ranks.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cumulo.layout.layout import Axis
from cumulo.ranks.groups import Group, Groups, new_group

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
