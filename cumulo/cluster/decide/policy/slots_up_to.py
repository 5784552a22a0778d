"""How many tasks would fit if all preemptible jobs up to a priority stopped. A search for room asks it first, for
every priority at once: it is kept up to date node by node.
"""

import bisect
import itertools
from collections import Counter

import numpy as np

from cumulo.cluster.decide.jobs import WHOLE_GPU
from cumulo.cluster.decide.nodes import FreeCapacity

_NOBODY = 0  # the number of the step at which nobody stops; the priorities follow, in order
_Steps = tuple[tuple[int | None, int], ...]


class SlotsUpTo:
    """Of one cluster. The free GPUs of a node grow in a few steps as more and more urgent jobs stop, so that a job
    that starts or ends changes a few numbers, however many priorities and nodes there are."""

    def __init__(self, free: FreeCapacity, levels: list[int]) -> None:
        self.free = free
        self.levels = levels.copy()  # priorities, in order
        self._steps: list[
            _Steps
        ] = []  # of each node: a priority, None: nobody, and free GPUs if all up to it stop
        self._width = free.gpu_milli.shape[1]
        # Of free GPUs before and after a step: GPUs of a task, less one, and how many more of these tasks fit.
        self._more = [
            [
                [(each - 1, after // each - before // each) for each in range(1, after + 1)
                 if after // each > before // each]
                for after in range(self._width + 1)
            ]
            for before in range(self._width + 1)
        ]  # fmt: skip
        # Of all nodes (None), and of those of each device where there are several.
        # [GPUs of a task - 1][step]: tasks that fit from that step on.
        self._devices = {node.device for node in free.nodes}
        several = self._devices if len(self._devices) > 1 else ()
        self._gained: dict[str | None, list[list[int]]] = {
            device: [[0] * (len(levels) + 1) for _ in range(self._width)] for device in (None, *several)
        }
        self._until: dict[tuple[int, tuple[str, ...]], list[int]] = {}  # sums, as far as somebody asked
        self._begin()

    def _begin(self) -> None:
        """Nobody can be stopped yet, on any node."""
        free = self.free
        # Never more than a node has, also where a driver counted a GPU twice.
        rooms: list[int] = np.clip(
            free.gpu_milli.sum(axis=1, dtype=np.int64) // WHOLE_GPU, 0, self._width
        ).tolist()
        one_step: list[_Steps] = [((None, room),) for room in range(self._width + 1)]
        ready: list[bool] = free.ready.tolist()
        self._steps = [one_step[room] if able else () for room, able in zip(rooms, ready, strict=True)]
        many = Counter(zip((node.device for node in free.nodes), self._steps, strict=True))
        for (device, steps), nodes in many.items():
            self._count(device, steps, nodes)

    def insert(self, priority: int) -> None:
        """A priority that was not seen before."""
        at = bisect.bisect_left(self.levels, priority)
        self.levels.insert(at, priority)
        self._until.clear()
        for gained in itertools.chain(*self._gained.values()):
            gained.insert(at + 1, 0)

    def set_node(self, node: int, stoppable: dict[int, int]) -> None:
        """What is free there has changed, or what could be stopped: thousandths of GPUs of each priority."""
        steps = self._grows(node, stoppable)
        before = self._steps[node]
        if steps == before:
            return
        self._steps[node] = steps
        self._until.clear()
        device = self.free.nodes[node].device
        self._count(device, before, -1)
        self._count(device, steps, 1)

    def _grows(self, node: int, stoppable: dict[int, int]) -> _Steps:
        free = self.free
        if not free.ready.item(node):
            return ()
        milli, most = sum(free.gpu_milli[node].tolist()), self._width
        room = min(max(milli // WHOLE_GPU, 0), most)
        steps: list[tuple[int | None, int]] = [(None, room)]
        for priority in sorted(stoppable) if len(stoppable) > 1 else stoppable:
            milli += stoppable[priority]
            now = min(max(milli // WHOLE_GPU, 0), most)
            if now > room:
                steps.append((priority, now))
                room = now
        return tuple(steps)

    def _count(self, device: str, steps: _Steps, nodes: int) -> None:
        """So many nodes more have these steps."""
        of_all, of_device, before = self._gained[None], self._gained.get(device), 0
        for priority, room in steps:
            step = _NOBODY if priority is None else bisect.bisect_left(self.levels, priority) + 1
            for each, more in self._more[before][room]:
                of_all[each][step] += nodes * more
                if of_device is not None:
                    of_device[each][step] += nodes * more
            before = room

    def first_with(self, tasks: int, gpus: int, devices: tuple[str, ...]) -> int | None:
        """The number of the lowest priority up to which jobs would have to stop so that so many tasks fit;
        None: even all of them are too few."""
        if not self.levels or gpus > self._width:
            return None
        until = self._until.get((gpus, devices))
        if until is None:
            until = self._until[gpus, devices] = self._sums(gpus, devices)
        found = bisect.bisect_left(until, tasks, 1) - 1
        return None if found == len(self.levels) else found

    def _sums(self, gpus: int, devices: tuple[str, ...]) -> list[int]:
        names = self._devices.intersection(devices)
        if not devices or names == self._devices:
            return list(itertools.accumulate(self._gained[None][gpus - 1]))
        some = [self._gained[name][gpus - 1] for name in names]
        if len(some) == 1:
            return list(itertools.accumulate(some[0]))
        return list(itertools.accumulate(map(sum, zip(*some, strict=True)))) or [0] * (len(self.levels) + 1)
