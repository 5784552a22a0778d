"""Whether a gang fits, and on which nodes: tight packing, blind to topology. Policies place with it, or
better."""

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, Ints


def tasks_that_fit(job: JobRequest, free: FreeCapacity) -> Ints:
    """Of each node: how many tasks of this job it could take now."""
    if job.gpus_per_task == 0:
        fits = np.full(len(free.nodes), job.tasks, dtype=np.int64)
    elif job.fractional:
        fits = (free.gpu_milli // job.gpu_milli).sum(axis=1)
    else:
        fits = free.whole // job.gpus_per_task
    if job.cpu_milli:
        fits = np.minimum(fits, free.cpu_milli // job.cpu_milli)
    if job.memory_mib:
        fits = np.minimum(fits, free.memory_mib // job.memory_mib)
    fits = np.where(free.ready, fits, 0)
    if job.devices:
        fits = np.where(free.device_mask(job.devices), fits, 0)
    return fits


def pack_gang(job: JobRequest, free: FreeCapacity) -> tuple[TaskPlace, ...] | None:
    """Places for all tasks, or None. As few nodes as a gang can do with; among equals those with the least
    left."""
    fits = tasks_that_fit(job, free)
    if job.tasks == 1:
        able = np.flatnonzero(fits)
        if not len(able):
            return None
        left = free.gpu_milli[able].sum(axis=1) if job.fractional else free.whole[able]
        return task_places(job, free, [(int(able[int(left.argmin())]), 1)])
    if int(fits.sum()) < job.tasks:
        return None
    return task_places(job, free, _nodes_for(job, fits, free))


def _nodes_for(job: JobRequest, fits: Ints, free: FreeCapacity) -> list[tuple[int, int]]:
    able = np.flatnonzero(fits)
    # The fullest hold first, and the node with the least room left over for the rest.
    order = able[np.lexsort((free.whole[able], -fits[able]))]
    chosen: list[tuple[int, int]] = []
    missing = job.tasks
    for node in order.tolist():
        room = int(fits[node])
        if room >= missing:
            enough = able[fits[able] >= missing]
            used = {number for number, _ in chosen}
            last = min(
                (n for n in enough.tolist() if n not in used), key=lambda n: (fits[n], free.whole[n], n)
            )
            return [*chosen, (int(last), missing)]
        chosen.append((node, room))
        missing -= room
    return chosen


def task_places(job: JobRequest, free: FreeCapacity, counts: list[tuple[int, int]]) -> tuple[TaskPlace, ...]:
    """The GPUs of each task: the fullest that still has the share, or whole ones from the first."""
    places: list[TaskPlace] = []
    for node, tasks in counts:
        name, shares = free.nodes[node].name, free.gpu_milli[node].tolist()
        for _ in range(tasks):
            if job.gpus_per_task == 0:
                places.append(TaskPlace(name))
                continue
            able = [gpu for gpu, share in enumerate(shares) if share >= job.gpu_milli]
            if job.fractional:
                able.sort(key=shares.__getitem__)
            taken = tuple(able[: job.gpus_per_task])
            for gpu in taken:
                shares[gpu] -= job.gpu_milli
            places.append(TaskPlace(name, taken))
    return tuple(places)
