"""Nodes as a policy sees them: what each has, where it hangs, and what is free, in columns so that ten thousand
nodes are searched in microseconds."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace

NodeHealth = Literal["ready", "cordoned", "down"]
Ints = NDArray[Any]  # small integers, so that a copy of ten thousand nodes costs microseconds


UNLIMITED = 1 << 30
_versions = itertools.count()


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One machine. Only `ready` nodes get tasks; tasks on a `cordoned` one run on, those on one that is `down`
    are lost."""

    name: str
    gpus: int = 8
    device: str = ""
    cpu_milli: int = UNLIMITED  # as good as unlimited, for clusters whose CPUs nobody counts
    memory_mib: int = UNLIMITED
    nvlink_domain: str = ""  # nodes of one domain reach each other over scale-up links; "": this node alone
    leaf: str = ""  # the switch its network cards hang on; "": all nodes alike
    leaf_oversubscription: float = 2.0  # what the leaf's nodes can send over what its uplinks carry
    health: NodeHealth = "ready"
    failures: int = 0  # recent ones; policies cordon nodes that fail again and again


class FreeCapacity:
    """What is free on every node. Policies try placements on a `copy()`; players keep one up to date."""

    __slots__ = (
        "_device_masks",
        "cpu_milli",
        "gpu_milli",
        "gpus",
        "index",
        "memory_mib",
        "nodes",
        "ready",
        "version",
        "whole",
    )

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self.nodes = nodes
        self.index = {node.name: number for number, node in enumerate(nodes)}
        self.gpus: Ints = np.array([node.gpus for node in nodes], dtype=np.int32)
        width = max([1, *(node.gpus for node in nodes)])
        present = np.arange(width) < self.gpus[:, None]
        self.gpu_milli: Ints = np.where(present, WHOLE_GPU, 0).astype(np.int16)
        self.whole: Ints = self.gpus.copy()  # GPUs that are entirely free
        self.cpu_milli: Ints = np.array([node.cpu_milli for node in nodes], dtype=np.int32)
        self.memory_mib: Ints = np.array([node.memory_mib for node in nodes], dtype=np.int32)
        self.ready: NDArray[np.bool_] = np.array([node.health == "ready" for node in nodes], dtype=np.bool_)
        # A number that no other state of a node has: what was worked out for it stays right, also in copies.
        self.version: Ints = np.array([next(_versions) for _ in nodes], dtype=np.int64)
        self._device_masks: dict[tuple[str, ...], NDArray[np.bool_]] = {}

    def copy(self) -> "FreeCapacity":
        other: Any = object.__new__(FreeCapacity)
        for name in ("nodes", "index", "gpus", "_device_masks"):  # these never change
            setattr(other, name, getattr(self, name))
        for name in ("gpu_milli", "whole", "cpu_milli", "memory_mib", "ready", "version"):
            setattr(other, name, getattr(self, name).copy())
        return other  # type: ignore[no-any-return]

    def device_mask(self, devices: tuple[str, ...]) -> NDArray[np.bool_]:
        """Which nodes have one of these devices, worked out once."""
        known = self._device_masks.get(devices)
        if known is None:
            known = self._device_masks[devices] = np.array([node.device in devices for node in self.nodes])
        return known

    def take(self, job: JobRequest, places: Iterable[TaskPlace]) -> None:
        for place in places:
            self._move(job, place, -1)

    def give(self, job: JobRequest, places: Iterable[TaskPlace]) -> None:
        for place in places:
            self._move(job, place, 1)

    def _move(self, job: JobRequest, place: TaskPlace, sign: int) -> None:
        node = self.index[place.node]
        self.version[node] = next(_versions)
        if job.cpu_milli:
            self.cpu_milli[node] += sign * job.cpu_milli
        if job.memory_mib:
            self.memory_mib[node] += sign * job.memory_mib
        if job.gpu_milli == WHOLE_GPU:
            self.gpu_milli[node, list(place.gpus)] += sign * WHOLE_GPU
            self.whole[node] += sign * len(place.gpus)
            return
        for gpu in place.gpus:
            before = int(self.gpu_milli[node, gpu])
            after = before + sign * job.gpu_milli
            self.gpu_milli[node, gpu] = after
            self.whole[node] += int(after == WHOLE_GPU) - int(before == WHOLE_GPU)

    def overcommitted(self) -> list[str]:
        """Names of nodes with less than nothing free."""
        bad = (self.gpu_milli < 0).any(axis=1) | (self.cpu_milli < 0) | (self.memory_mib < 0)
        return [self.nodes[number].name for number in np.flatnonzero(bad).tolist()]


def free_capacity(nodes: Sequence[ClusterNode], running: Iterable[RunningJob]) -> FreeCapacity:
    """What the running jobs leave free."""
    free = FreeCapacity(nodes)
    for job in running:
        free.take(job.request, job.places)
    return free
