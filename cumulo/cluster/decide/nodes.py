"""Nodes as a policy sees them: what each has, which switch it is connected to, and what is free, in columns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace

NodeHealth = Literal["ready", "cordoned", "draining", "down"]
Ints = NDArray[Any]
Flags = NDArray[np.bool_]

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One machine. Only `ready` nodes get tasks; tasks on a `cordoned` one run on, those on a `draining` one leave
    it after a checkpoint, those on one that is `down` are lost."""

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

    def without(self, jobs: Iterable[RunningJob]) -> "FreeCapacity":
        """A copy of this capacity in which these running jobs have stopped."""
        then = self.copy()
        for one in jobs:
            then.release(one.request, one.places)
        return then

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


def free_capacity(nodes: Sequence[ClusterNode], running: Sequence[RunningJob]) -> FreeCapacity:
    """What the running jobs leave free."""
    free = FreeCapacity(nodes)
    for job in running:
        free.allocate(job.request, job.places)
    return free
