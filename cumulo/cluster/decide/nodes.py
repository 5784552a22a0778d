"""Nodes as a policy sees them: what each has, where it hangs, and what is free, in columns and in sets of nodes
with equally many free GPUs, so that ten thousand nodes are searched in microseconds."""

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
_FIRST_GPU = (0,)
_FEW = 4  # GPUs that are faster written one by one
_MANY = 24  # members of a set that are faster found together
_MOST_CHANGES = 50_000  # of nodes that are written down
_ALL_DEVICES = (None,)
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
    leaf: str = ""  # the switch its network cards hang on; "": all nodes alike
    leaf_oversubscription: float = 2.0  # what the leaf's nodes can send over what its uplinks carry
    health: NodeHealth = "ready"
    failures: int = 0  # recent ones; policies cordon nodes that fail again and again


class NodeChanges:
    """Which nodes changed, in order; the oldest are forgotten."""

    __slots__ = ("count", "forgotten", "nodes")

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.count = self.forgotten = 0  # those that are forgotten are counted as well

    def add(self, node: int) -> None:
        self.nodes.append(node)
        self.count += 1
        if len(self.nodes) > _MOST_CHANGES:
            self.forgotten += len(self.nodes) // 2
            del self.nodes[: len(self.nodes) // 2]


class FreeCapacity:
    """What is free on every node. Policies try placements on a `copy()`; players keep one up to date."""

    __slots__ = (
        "_device_masks",
        "_left",
        "_single_places",
        "_slots",
        "_usable_sets",
        "_whole_places",
        "capacity",
        "changes",
        "copied",
        "cpu_milli",
        "device_of",
        "devices",
        "fit_tables",
        "free_gpus",
        "gains",
        "gpu_milli",
        "gpus",
        "index",
        "largest",
        "memory_mib",
        "nodes",
        "ready",
        "ready_set",
        "room",
        "tally",
        "version",
        "whole",
        "within",
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
        self.devices = {name: at for at, name in enumerate(dict.fromkeys(node.device for node in nodes))}
        self.device_of: Ints = np.array([self.devices[node.device] for node in nodes], dtype=np.int64)
        self._left: tuple[Ints, Ints] | None = None  # what `milli_left` found, and of which versions
        self._single_places: dict[int, tuple[TaskPlace, ...]] = {}
        self._whole_places: dict[int, TaskPlace] = {}
        # Thousandths of GPUs and of cores of all nodes, for shares.
        self.capacity = (
            float(max(WHOLE_GPU, WHOLE_GPU * int(self.gpus.sum()))),
            float(max(1, sum(node.cpu_milli for node in nodes))),
        )
        self.gains = 0  # how often something became free: while it stays, what did not fit does not fit
        # What `fit_table` found for shapes of tasks, and the changes since; what the original of a copy knew, and
        # up to which change; of which capacity this is a part.
        self.fit_tables: dict[Any, Any] = {}
        self.changes = NodeChanges()
        self.copied: tuple[dict[Any, Any], int] | None = None
        self.within: FreeCapacity | None = None
        self._count_room()

    def _count_room(self) -> None:
        """Nodes by their entirely free GPUs. A set of nodes is an integer with a bit for each: copied for nothing,
        and its first member and its size are found in a microsecond."""
        self.room = [node_set(self.whole == free) for free in range(self.gpu_milli.shape[1] + 1)]
        self.ready_set = node_set(self.ready)
        self.largest = int(self.gpus[self.ready].max(initial=0))  # GPUs of a ready node
        self._usable_sets: dict[tuple[str, ...], int] = {}
        # Tasks of so many whole GPUs that fit, on all devices (None) and on each that somebody asked for.
        self._slots: dict[int, dict[str | None, int]] = {}
        self.tally = [(some & self.ready_set).bit_count() for some in self.room]  # of the ready ones
        self.free_gpus = sum(
            free * nodes for free, nodes in enumerate(self.tally)
        )  # entirely free, on ready nodes

    def copy(self) -> "FreeCapacity":
        other: Any = object.__new__(FreeCapacity)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        for name in ("gpu_milli", "whole", "cpu_milli", "memory_mib", "ready", "version", "room", "tally"):
            setattr(other, name, getattr(self, name).copy())
        other._slots = {each: known.copy() for each, known in self._slots.items()}
        other.copied = None if self.within is not None else (self.fit_tables, self.changes.count)
        other.within = None
        other.fit_tables, other.changes = {}, NodeChanges()
        return other  # type: ignore[no-any-return]

    def device_mask(self, devices: tuple[str, ...]) -> NDArray[np.bool_]:
        """Which nodes have one of these devices, worked out once."""
        known = self._device_masks.get(devices)
        if known is None:
            known = self._device_masks[devices] = np.array([node.device in devices for node in self.nodes])
        return known

    def milli_left(self) -> Ints:
        """Thousandths of GPUs that are free on each node. Only nodes that changed are added up again; copies have
        theirs from the same books, because every version is another one."""
        if self._left is None:
            self._left = self.version.copy(), self.gpu_milli.sum(axis=1)
        versions, left = self._left
        changed = np.flatnonzero(versions != self.version)
        if len(changed):
            left[changed] = self.gpu_milli[changed].sum(axis=1)
            versions[changed] = self.version[changed]
        return left

    def single_places(self, node: int) -> tuple[TaskPlace, ...]:
        """A place on each GPU of a node, made once: elastic jobs have thousands of tasks of one GPU."""
        known = self._single_places.get(node)
        if known is None:
            one = self.nodes[node]
            known = tuple(TaskPlace(one.name, (gpu,)) for gpu in range(one.gpus))
            self._single_places[node] = known
        return known

    def whole_place(self, node: int) -> TaskPlace:
        """A place on all GPUs of a node, made once."""
        known = self._whole_places.get(node)
        if known is None:
            one = self.nodes[node]
            known = self._whole_places[node] = TaskPlace(one.name, tuple(range(one.gpus)))
        return known

    def usable_set(self, devices: tuple[str, ...]) -> int:
        """The ready nodes with one of these devices."""
        if not devices:
            return self.ready_set
        known = self._usable_sets.get(devices)
        if known is None:
            known = self._usable_sets[devices] = node_set(self.device_mask(devices)) & self.ready_set
        return known

    def set_ready(self, ready: NDArray[np.bool_]) -> None:
        """Which nodes may get tasks."""
        self.ready = ready
        self.fit_tables, self.copied = {}, None
        self.gains += 1
        self._count_room()

    def narrowed(self, able: int) -> "FreeCapacity":
        """The same capacity, to look at only: with this set of nodes alone."""
        other: Any = object.__new__(FreeCapacity)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.within, other._slots, other._usable_sets = self, {}, {}
        other.ready = self.ready & node_mask(able, len(self.nodes))
        other.ready_set = self.ready_set & able
        other.tally = [
            (some & other.ready_set).bit_count() if nodes else 0
            for some, nodes in zip(self.room, self.tally, strict=True)
        ]
        return other  # type: ignore[no-any-return]

    def allocate(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        self._move_all(job, places, -1)

    def release(self, job: JobRequest, places: Sequence[TaskPlace]) -> None:
        self.gains += 1
        self._move_all(job, places, 1)

    def _move_all(self, job: JobRequest, places: Sequence[TaskPlace], sign: int) -> None:
        index = self.index
        if len(places) == 1 or job.gpu_milli != WHOLE_GPU or job.gpus_per_task != 1:
            for place in places:
                self._move(job, index[place.node], place.gpus, sign, 1)
            return
        at, many = 0, len(places)
        while at < many:  # neighbouring tasks of one GPU on one node together
            first = places[at]
            node, end = index[first.node], at + 1
            every = self.single_places(node) if first.gpus == _FIRST_GPU else ()
            if every and places[at : at + len(every)] == every:  # all of it, as large gangs have it
                end = at + len(every)
                gpus: Sequence[int] = range(len(every))
            else:
                while end < many and places[end].node == first.node:
                    end += 1
                gpus = [gpu for place in places[at:end] for gpu in place.gpus]
            self._move(job, node, gpus, sign, end - at)
            at = end

    def _move(self, job: JobRequest, node: int, gpus: Sequence[int], sign: int, tasks: int) -> None:
        self.version[node] = next(_versions)
        if self.fit_tables or self.copied is not None:
            self.changes.add(node)
        if job.cpu_milli:
            self.cpu_milli[node] += sign * tasks * job.cpu_milli
        if job.memory_mib:
            self.memory_mib[node] += sign * tasks * job.memory_mib
        if not gpus:
            return
        if job.gpu_milli == WHOLE_GPU:
            left, whole = WHOLE_GPU if sign > 0 else 0, sign * len(gpus)
            if len(gpus) > _FEW and gpus[-1] + 1 - gpus[0] == len(gpus):  # in a row, as nearly always
                self.gpu_milli[node, gpus[0] : gpus[-1] + 1] = left
            else:
                for gpu in gpus:
                    self.gpu_milli[node, gpu] = left
            self._set_whole(node, whole)
            return
        whole = 0
        for gpu in gpus:
            before = int(self.gpu_milli[node, gpu])
            after = before + sign * job.gpu_milli
            self.gpu_milli[node, gpu] = after
            whole += int(after == WHOLE_GPU) - int(before == WHOLE_GPU)
        if whole:
            self._set_whole(node, whole)

    def _set_whole(self, node: int, change: int) -> None:
        before: int = self.whole.item(node)
        after = before + change
        self.whole[node] = after
        bit = 1 << node
        room = self.room
        room[before] ^= bit
        room[after] ^= bit
        if self.ready.item(node):
            self.tally[before] -= 1
            self.tally[after] += 1
            self.free_gpus += change
            for each, known in self._slots.items():
                if gained := after // each - before // each:
                    device = self.nodes[node].device
                    if None in known:
                        known[None] += gained
                    if device in known:
                        known[device] += gained

    def task_slots(self, each: int, devices: tuple[str, ...]) -> int:
        """How many tasks of so many whole GPUs fit on the nodes with one of these devices. Kept up to date from the
        first time it is asked for."""
        known = self._slots.get(each)
        if known is None:
            known = self._slots[each] = {}
        found = 0
        for device in devices or _ALL_DEVICES:
            some = known.get(device)
            if some is None:
                some = known[device] = self._count_slots(each, device)
            found += some
        return found

    def _count_slots(self, each: int, device: str | None) -> int:
        if device is None:
            return sum([self.tally[room] * (room // each) for room in range(each, len(self.tally))])
        return self.slots_among(each, self.usable_set((device,)))

    def slots_among(self, each: int, among: int) -> int:
        """Of a set of ready nodes: how many tasks of so many whole GPUs fit there."""
        return sum(
            [
                (self.room[room] & among).bit_count() * (room // each)
                for room in range(each, len(self.tally))
                if self.tally[room]
            ]
        )


def node_set(mask: NDArray[np.bool_]) -> int:
    """The nodes where the mask is true, as the bits of an integer."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def node_mask(some: int, nodes: int) -> NDArray[np.bool_]:
    """Of so many nodes, which are in a set."""
    bits = np.frombuffer(some.to_bytes((nodes + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(bits, count=nodes, bitorder="little").astype(np.bool_)


def members(some: int, at_most: int) -> list[int]:
    """The first nodes of a set, in order."""
    if at_most > _MANY:
        bits = np.frombuffer(some.to_bytes((some.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little"))[:at_most].tolist()
        return found
    found = []
    while some and len(found) < at_most:
        without = some & (some - 1)
        found.append((some ^ without).bit_length() - 1)
        some = without
    return found


def first_member(some: int) -> int:
    return (some ^ (some - 1)).bit_length() - 1


def free_capacity(nodes: Sequence[ClusterNode], running: Iterable[RunningJob]) -> FreeCapacity:
    """What the running jobs leave free."""
    free = FreeCapacity(nodes)
    for job in running:
        free.allocate(job.request, job.places)
    return free
