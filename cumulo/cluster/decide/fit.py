"""Whether a gang fits, and on which nodes it goes: tight packing, or the emptiest nodes first, both blind to
topology."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, Ints
from cumulo.cluster.decide.snapshot import Snapshot

Places = tuple[TaskPlace, ...]
NodeCounts = list[tuple[int, int]]  # nodes by number, and how many tasks each gets
_ALL: Any = slice(None)


def tasks_that_fit(job: JobRequest, free: FreeCapacity, nodes: Any = _ALL) -> Ints:
    """Of each node, or of these ones by number: how many tasks of this job it could take now."""
    if not job.gpus_per_task:
        fits: Ints = np.full(len(free.whole[nodes]), job.tasks)
    elif job.fractional:
        fits = (free.gpu_milli[nodes] // job.gpu_milli).sum(axis=1)
    else:
        fits = free.whole[nodes] // job.gpus_per_task
    if job.cpu_milli:
        fits = np.minimum(fits, free.cpu_milli[nodes] // job.cpu_milli)
    if job.memory_mib:
        fits = np.minimum(fits, free.memory_mib[nodes] // job.memory_mib)
    usable = free.ready[nodes]
    if job.devices:
        usable = usable & free.accepted(job.devices)[nodes]
    if job.avoid:
        usable = usable & ~np.isin([node.name for node in free.nodes], job.avoid)[nodes]
    if job.spread == "apart":
        fits = np.minimum(fits, 1)
    elif job.spread == "together":
        fits = np.where(fits >= job.tasks, fits, 0)
    return np.where(usable, fits, 0)


def slots(job: JobRequest, free: FreeCapacity) -> int:
    """How many tasks of this job fit now, on all nodes together."""
    return int(tasks_that_fit(job, free).sum())


def why_not(job: JobRequest, free: FreeCapacity) -> str:
    """One sentence for the person who asks why a job waits."""
    amount, unit = float(job.gpus_per_task) if job.gpus_per_task != 1 else job.gpu_milli / WHOLE_GPU, "GPU"
    if not job.gpus_per_task:
        amount, unit = job.cpu_milli / 1000, "core"
    each = f"{amount:g} {unit}{'' if amount <= 1 else 's'}"
    kind = f" of {' or '.join(job.devices)}" if job.devices else ""
    tasks = "1 task" if job.tasks == 1 else f"{job.tasks} tasks"
    out = [node for node in free.nodes if node.health not in ("ready", "down")]
    closed = "".join(f"; {node.name} is {node.health}" for node in out[:3]) + ", and others are" * (
        len(out) > 3
    )
    where = {"any": "", "apart": " on different nodes", "together": " on one node"}[job.spread]
    return f"the gang needs {tasks}{where} with {each}{kind} each; {slots(job, free)} fit now{closed}"


def pack_gang(job: JobRequest, free: FreeCapacity) -> Places | None:
    """Places for all tasks, or None. As few nodes as a gang can do with; among equals those with the least
    left."""
    counts = packed_nodes(job, free, tasks_that_fit(job, free))
    return None if counts is None else task_places(job, free, counts)


def packed_nodes(job: JobRequest, free: FreeCapacity, fits: Ints) -> NodeCounts | None:
    """The nodes of `pack_gang`: those with the most room first, and for the rest the tightest node that takes it
    all."""
    if fits.sum() < job.tasks:
        return None
    if job.tasks == 1:
        able = np.flatnonzero(fits)
        left = free.gpu_milli[able].sum(axis=1) if job.fractional else free.whole[able]
        return [(int(able[left.argmin()]), 1)]
    chosen: NodeCounts = []
    missing, able = job.tasks, np.flatnonzero(fits)
    able = able[np.lexsort((free.whole[able], -fits[able]))]
    first = able[: job.tasks]
    for node, room in zip(first.tolist(), fits[first].tolist(), strict=True):
        if room > missing:
            rest = able[len(chosen) :]
            rest = rest[fits[rest] >= missing]
            last = rest[np.lexsort((rest, free.whole[rest], fits[rest]))[0]]
            return [*chosen, (int(last), missing)]
        chosen.append((node, room))
        missing -= room
        if not missing:
            break
    return chosen


def emptiest_first(job: JobRequest, free: FreeCapacity) -> Places | None:
    """Tasks of one GPU, always from the node with the most free GPUs: how the published simulators place."""
    if job.gpus_per_task != 1 or job.fractional:
        return pack_gang(job, free)
    fits = tasks_that_fit(job, free)
    if fits.sum() < job.tasks:
        return None
    order = np.argsort(-fits, kind="stable")
    return task_places(job, free, fill_nodes(job.tasks, order, fits))


def fill_nodes(tasks: int, nodes: Ints, fits: Ints) -> NodeCounts:
    """Fills nodes, each with the tasks that fit there, in the order given until all tasks have a place."""
    chosen: NodeCounts = []
    for node, room in zip(nodes.tolist(), fits[nodes].tolist(), strict=True):
        if room:
            chosen.append((node, min(room, tasks)))
            tasks -= room
            if tasks <= 0:
                break
    return chosen


def task_places(job: JobRequest, free: FreeCapacity, counts: NodeCounts) -> Places:
    """The GPUs of each task: the fullest that still has the share, or whole ones from the first."""
    places: list[TaskPlace] = []
    each = job.gpus_per_task
    for node, tasks in counts:
        name, shares = free.nodes[node].name, free.gpu_milli[node].tolist()
        if job.fractional:
            for _ in range(tasks):
                able = [gpu for gpu, share in enumerate(shares) if share >= job.gpu_milli]
                fullest = min(able, key=shares.__getitem__)
                shares[fullest] -= job.gpu_milli
                places.append(TaskPlace(name, (fullest,)))
        else:
            whole = [gpu for gpu, share in enumerate(shares) if share == WHOLE_GPU]
            places += [
                TaskPlace(name, tuple(whole[task * each : task * each + each])) for task in range(tasks)
            ]
    return tuple(places)


class Placer:
    """Where gangs go, for one decision: by one function, wherever other gangs are. It is told of the gangs that the
    decision starts and stops."""

    def __init__(self, place: Callable[[JobRequest, FreeCapacity], Places | None] = pack_gang) -> None:
        self._place = place

    def places(self, job: JobRequest, free: FreeCapacity) -> Places | None:
        """Places for all tasks; None: they do not fit. Where enough tasks fit, there are always places."""
        return self._place(job, free)

    def started(self, job: JobRequest, places: Sequence[TaskPlace]) -> None: ...
    def stopped(self, job: JobRequest, places: Sequence[TaskPlace]) -> None: ...

    def why(self, job: JobRequest) -> str:
        """Between which ways it chose for this job; "": there was no choice."""
        return ""


PlacerOf = Callable[[Snapshot], Placer]


def packed(snapshot: Snapshot) -> Placer:
    return Placer(pack_gang)


def emptiest(snapshot: Snapshot) -> Placer:
    return Placer(emptiest_first)
