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
    """Nodes with the most room first, and for the rest the tightest node that takes it all."""
    chosen: list[tuple[int, int]] = []
    missing = job.tasks
    room = int(fits.max())
    while missing:
        if room > missing:  # one node takes the rest: the one with the least room for it
            able = np.flatnonzero(fits >= missing)
            able = able[fits[able] == fits[able].min()]
            return [*chosen, (int(able[free.whole[able].argmin()]), missing)]
        same = np.flatnonzero(fits == room)
        same = same[np.argsort(free.whole[same], kind="stable")]
        taken = same[: missing // room] if room else same
        chosen += [(node, room) for node in taken.tolist()]
        missing -= room * len(taken)
        if len(taken) == len(same):
            room = int(fits[fits < room].max(initial=0))
        elif missing:
            fits = fits.copy()
            fits[taken] = 0
            able = np.flatnonzero(fits >= missing)
            able = able[fits[able] == fits[able].min()]
            return [*chosen, (int(able[free.whole[able].argmin()]), missing)]
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
