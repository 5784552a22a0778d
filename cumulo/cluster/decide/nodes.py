"""Nodes as a policy sees them: what each has, which switch it is connected to, and what is free, in columns."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace

NodeHealth = Literal["ready", "cordoned", "down"]
Ints = NDArray[Any]
Flags = NDArray[np.bool_]

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One machine. Only `ready` nodes get tasks; tasks on a `cordoned` one run on, those on one that is `down`
    are lost."""

    name: str
    gpus: int = 8
    device: str = ""
    cpu_milli: int = UNLIMITED  # as good as unlimited, for clusters whose CPUs nobody counts
    memory_mib: int = UNLIMITED
    leaf: str = ""  # the switch its network cards hang on; "": all nodes alike
    leaf_oversubscription: float = 2.0  # what the leaf's nodes can send over what its uplinks carry
    health: NodeHealth = "ready"
    failures: int = 0  # recent ones; policies cordon nodes that fail again and again


class FreeCapacity:
    """What is free on every node. Players keep one up to date; the one in a snapshot is read-only, and policies
    try placements on a `copy()`."""

    __slots__ = (
        "cpu_milli", "device_of", "devices", "gpu_milli", "gpus", "index", "memory_mib", "nodes", "ready", "whole",
    )  # fmt: skip
    _CHANGING = ("gpu_milli", "whole", "cpu_milli", "memory_mib", "ready")

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self.nodes = nodes
        self.index = {node.name: number for number, node in enumerate(nodes)}
        self.gpus: Ints = np.array([node.gpus for node in nodes], dtype=np.int32)
        width = max([1, *(node.gpus for node in nodes)])
        present = np.arange(width) < self.gpus[:, None]
        self.gpu_milli: Ints = np.where(present, WHOLE_GPU, 0).astype(np.int16)  # [nodes, GPUs]
        self.whole: Ints = self.gpus.copy()  # GPUs that are entirely free
        self.cpu_milli: Ints = np.array([node.cpu_milli for node in nodes], dtype=np.int32)
        self.memory_mib: Ints = np.array([node.memory_mib for node in nodes], dtype=np.int32)
        self.ready: Flags = np.array([node.health == "ready" for node in nodes], dtype=np.bool_)
        self.devices = {name: at for at, name in enumerate(dict.fromkeys(node.device for node in nodes))}
        self.device_of: Ints = np.array([self.devices[node.device] for node in nodes], dtype=np.int64)

    def copy(self) -> "FreeCapacity":
        return self._with(np.ndarray.copy)

    def read_only(self) -> "FreeCapacity":
        """The same capacity, which changes with this one and cannot be changed by others."""
        return self._with(_locked)

    def among(self, nodes: Flags) -> "FreeCapacity":
        """The same capacity, to look at, where only these nodes get tasks."""
        other = self.read_only()
        other.ready = self.ready & nodes
        return other

    def _with(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "FreeCapacity":
        other: FreeCapacity = object.__new__(FreeCapacity)
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(other, name, change(value) if name in self._CHANGING else value)
        return other

    def accepted(self, devices: tuple[str, ...]) -> Flags:
        """Which nodes have one of these devices."""
        known = np.zeros(len(self.devices), dtype=np.bool_)
        known[[self.devices[name] for name in devices if name in self.devices]] = True
        return known[self.device_of]

    def numbers(self, places: Sequence[TaskPlace]) -> list[int]:
        """The nodes of these places, each once."""
        index = self.index
        return list(dict.fromkeys([index[place.node] for place in places]))

    def replace_node(self, number: int, node: ClusterNode) -> None:
        """The same node with another health."""
        self.nodes = (*self.nodes[:number], node, *self.nodes[number + 1 :])
        self.ready[number] = node.health == "ready"

    def allocate(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        self._add(job, places, -1)

    def release(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        self._add(job, places, 1)

    def _add(self, job: JobRequest, places: Sequence[TaskPlace], sign: int) -> None:
        cpu_milli, memory_mib, share = sign * job.cpu_milli, sign * job.memory_mib, sign * job.gpu_milli
        for place in places:
            node = self.index[place.node]
            if cpu_milli:
                self.cpu_milli[node] += cpu_milli
            if memory_mib:
                self.memory_mib[node] += memory_mib
            if place.gpus:
                shares = self.gpu_milli[node]
                for gpu in place.gpus:
                    shares[gpu] += share
        for node in self.numbers(places) if job.gpus_per_task else ():
            self.whole[node] = np.count_nonzero(self.gpu_milli[node] == WHOLE_GPU)


def _locked(column: NDArray[Any]) -> NDArray[Any]:
    view = column.view()
    view.flags.writeable = False
    return view


class HeldPlaces:
    """What some running jobs have, in columns: a cluster without the first of them is worked out at once."""

    def __init__(self, free: FreeCapacity, jobs: Sequence[RunningJob]) -> None:
        self.free, self.jobs = free, jobs
        places = [place for one in jobs for place in one.places]
        index, width = free.index, free.gpu_milli.shape[1]
        self._node = np.array([index[place.node] for place in places], dtype=np.int64)
        self._of_place = np.repeat(
            np.arange(len(jobs)), [len(one.places) for one in jobs]
        )  # the job's number
        gpus = [place.gpus for place in places]
        counts = np.array([len(some) for some in gpus], dtype=np.int64)
        self._of_gpu = np.repeat(self._of_place, counts)
        self._gpu = width * np.repeat(self._node, counts)
        self._gpu += np.fromiter(itertools.chain.from_iterable(gpus), np.int64, len(self._gpu))
        asked = [(job.gpu_milli, job.cpu_milli, job.memory_mib) for job in [one.request for one in jobs]]
        self._asked = np.array(asked, dtype=np.int64).reshape(-1, 3)
        self._known: dict[int, FreeCapacity] = {}

    def released(self, count: int) -> FreeCapacity:
        """What is free without the first so many jobs. To look at only."""
        if count not in self._known:
            self._known[count] = self._released(count)
        return self._known[count]

    def _released(self, count: int) -> FreeCapacity:
        then = self.free.copy()
        until = np.searchsorted(self._of_gpu, count)
        shares = self._asked[self._of_gpu[:until], 0]
        freed = np.bincount(self._gpu[:until], shares, then.gpu_milli.size)
        then.gpu_milli += freed.reshape(then.gpu_milli.shape).astype(np.int16)
        then.whole = (then.gpu_milli == WHOLE_GPU).sum(axis=1, dtype=np.int32)
        until = np.searchsorted(self._of_place, count)
        for number, column in ((1, then.cpu_milli), (2, then.memory_mib)):
            if self._asked[:count, number].any():
                amounts = self._asked[self._of_place[:until], number]
                column += np.bincount(self._node[:until], amounts, len(column)).astype(np.int32)
        return then


def free_capacity(nodes: Sequence[ClusterNode], running: Sequence[RunningJob]) -> FreeCapacity:
    """What the running jobs leave free."""
    free = FreeCapacity(nodes)
    for job in running:
        free.allocate(job.request, job.places)
    return free
