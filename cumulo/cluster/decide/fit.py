"""Whether a gang fits, and on which nodes: tight packing, blind to topology. Policies place with it, or
better."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from cumulo.cluster.decide.fit_tables import fit_table
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, Ints, first_member, members

_MORE_THAN_ANY = 1 << 30  # GPUs or thousandths of them

Placer = Callable[[JobRequest, FreeCapacity], tuple[TaskPlace, ...] | None]
AbleNode = tuple[int, int, int]  # what is left there, the node, and how many tasks of a job fit
# A placer may have `nodes_then`: the nodes of a gang of whole GPUs, and the tasks on each, at another moment. It is
# given all nodes that can take a task then, in order, and the GPUs of nodes that are free then and not now.
NodesThen = Callable[[JobRequest, FreeCapacity, list[AbleNode], Mapping[int, int]], list[tuple[int, int]]]


def tell_started(place: Placer, job: JobRequest, places: Sequence[TaskPlace]) -> None:
    """What a placer found may be refused. One that looks at the gangs that a decision starts is told of them."""
    told = getattr(place, "started", None)
    if told is not None:
        told(job, places)


def tell_stopped(place: Placer, stopped: Iterable[RunningJob]) -> None:
    """A placer that looks at the gangs that run is told of those that stop before it is asked."""
    told = getattr(place, "stopped", None)
    if told is not None:
        for one in stopped:
            told(one.request, one.places)


def packs(place: Placer, job: JobRequest) -> bool:
    """Whether a placer is known to place this job as `pack_gang` does."""
    told = getattr(place, "packs", None)
    return place is pack_gang or (told is not None and told(job))


def tasks_that_fit(job: JobRequest, free: FreeCapacity) -> Ints:
    """Of each node: how many tasks of this job it could take now. To look at only."""
    return fit_table(job, free).fits


def only_gpus(job: JobRequest) -> bool:
    """Whether the job asks for whole GPUs and for nothing else that is counted."""
    return bool(job.gpus_per_task) and job.gpu_milli == WHOLE_GPU and not job.cpu_milli and not job.memory_mib


def slots(job: JobRequest, free: FreeCapacity) -> int:
    """How many tasks of this job fit now, on all nodes together."""
    if not only_gpus(job):
        return fit_table(job, free).total
    return free.task_slots(job.gpus_per_task, job.devices)


def pack_gang(job: JobRequest, free: FreeCapacity) -> tuple[TaskPlace, ...] | None:
    """Places for all tasks, or None. As few nodes as a gang can do with; among equals those with the least
    left."""
    if job.tasks == 1 and only_gpus(job):
        node = tightest(free, job.gpus_per_task, free.usable_set(job.devices))
        return None if node is None else (first_gpus(job, free, node),)
    counts = packed_nodes(job, free)
    return None if counts is None else task_places(job, free, counts)


def packed_nodes(job: JobRequest, free: FreeCapacity) -> list[tuple[int, int]] | None:
    """The nodes of `pack_gang`, and how many tasks each gets."""
    if only_gpus(job):
        return None if slots(job, free) < job.tasks else _fewest_nodes(job, free)
    table = fit_table(job, free)
    if table.total < job.tasks:
        return None
    if job.tasks > 1:
        if free.within is None and table.total == table.able.bit_count():
            return _one_task_each(job, table.able, free)
        return _nodes_for(job.tasks, table.fits, free.whole)
    if job.fractional:
        left = free.milli_left()
        return [(int(np.where(table.fits > 0, left, _MORE_THAN_ANY).argmin()), 1)]
    node = tightest(free, job.gpus_per_task, table.able)
    assert node is not None  # there is room
    return [(node, 1)]


def tightest(free: FreeCapacity, gpus: int, among: int, below: int = _MORE_THAN_ANY) -> int | None:
    """The first node with the fewest free GPUs that are enough; `below`: and fewer than so many."""
    for room in range(gpus, min(below, len(free.room))):
        if free.tally[room] and free.room[room] & among:
            return first_member(free.room[room] & among)
    return None


def first_gpus(job: JobRequest, free: FreeCapacity, node: int) -> TaskPlace:
    """The first whole GPUs of a node."""
    if job.gpus_per_task == free.nodes[node].gpus:
        return free.whole_place(node)
    shares: list[int] = free.gpu_milli[node].tolist()
    if job.gpus_per_task == 1:
        return free.single_places(node)[shares.index(WHOLE_GPU)]
    able = [gpu for gpu, share in enumerate(shares) if share == WHOLE_GPU]
    return TaskPlace(free.nodes[node].name, tuple(able[: job.gpus_per_task]))


def _fewest_nodes(job: JobRequest, free: FreeCapacity) -> list[tuple[int, int]]:
    """As `_nodes_for`, from the sets of nodes with equally many free GPUs. All tasks are known to fit."""
    each, missing, chosen = job.gpus_per_task, job.tasks, []
    among = free.usable_set(job.devices)
    for room in range((len(free.room) - 1) // each, 0, -1):
        for whole in range(room * each, min(room * each + each, len(free.room))):
            if not missing // room:
                break
            taken = members(free.room[whole] & among, missing // room)
            chosen += [(node, room) for node in taken]
            missing -= room * len(taken)
        if missing and missing < room:  # one node takes the rest: the one with the least room for it
            for node, _ in chosen:
                among &= ~(1 << node)
            last = tightest(free, missing * each, among)
            if last is not None:
                return [*chosen, (last, missing)]
        if not missing:
            break
    return chosen


def _one_task_each(job: JobRequest, able: int, free: FreeCapacity) -> list[tuple[int, int]]:
    """As `_nodes_for`, where no node takes two tasks, from the sets of nodes with equally many free GPUs."""
    chosen: list[int] = []
    for some in free.room:
        if some & able:
            chosen += members(some & able, job.tasks - len(chosen))
            if len(chosen) == job.tasks:
                break
    return [(node, 1) for node in chosen]


def _nodes_for(tasks: int, fits: Ints, whole: Ints) -> list[tuple[int, int]]:
    """Nodes with the most room first, and for the rest the tightest node that takes it all. `whole`: their free
    GPUs."""
    chosen: list[tuple[int, int]] = []
    missing = tasks
    room = int(fits.max())
    while missing:
        if room > missing:  # one node takes the rest: the one with the least room for it
            able = np.flatnonzero(fits >= missing)
            able = able[fits[able] == fits[able].min()]
            return [*chosen, (int(able[whole[able].argmin()]), missing)]
        same = np.flatnonzero(fits == room)
        same = same[np.argsort(whole[same], kind="stable")]
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
            return [*chosen, (int(able[whole[able].argmin()]), missing)]
    return chosen


def able_nodes(job: JobRequest, free: FreeCapacity, at_most: int) -> list[AbleNode] | None:
    """All nodes that could take a task now, in order, with their free GPUs; None: they are more than so many."""
    if only_gpus(job):
        each, among = job.gpus_per_task, free.usable_set(job.devices)
        rooms = range(each, len(free.room))
        some = [(room, free.room[room] & among) for room in rooms if free.tally[room]]
        if (many := sum([nodes.bit_count() for _, nodes in some])) > at_most:
            return None
        found = [(room, node, room // each) for room, nodes in some for node in members(nodes, many)]
        found.sort(key=operator.itemgetter(1))
        return found
    all_of_it = free
    while all_of_it.within is not None:
        all_of_it = all_of_it.within
    table = fit_table(job, all_of_it)
    able = table.able & free.ready_set
    if (many := able.bit_count()) > at_most:
        return None
    whole, fits = free.whole, table.fits
    return [(whole.item(node), node, fits.item(node)) for node in members(able, many)]


def packed_among(job: JobRequest, able: list[AbleNode]) -> list[tuple[int, int]]:
    """The nodes of `pack_gang`, and how many tasks each gets, if these are all that could take a task, and enough.
    What is left: free GPUs, or thousandths of them where a single task asks for a share."""
    if job.tasks == 1:
        return [(min(able)[1], 1)]
    chosen: list[tuple[int, int]] = []
    missing, by_room = job.tasks, sorted(able, key=_most_room_first)
    for at, (_, node, tasks) in enumerate(by_room):
        if tasks > missing:  # one node takes the rest: the one with the least room for it
            last = min([(room, left, one) for left, one, room in by_room[at:] if room >= missing])
            return [*chosen, (last[2], missing)]
        chosen.append((node, tasks))
        missing -= tasks
        if not missing:
            break
    return chosen


def _most_room_first(node: AbleNode) -> tuple[int, int, int]:
    left, number, tasks = node
    return -tasks, left, number


def task_places(job: JobRequest, free: FreeCapacity, counts: list[tuple[int, int]]) -> tuple[TaskPlace, ...]:
    """The GPUs of each task: the fullest that still has the share, or whole ones from the first."""
    places: list[TaskPlace] = []
    single = job.gpus_per_task == 1 and not job.fractional
    for node, tasks in counts:
        gpus = free.nodes[node].gpus
        if single and tasks == gpus == free.whole[node]:
            places += free.single_places(node)
            continue
        if tasks == 1 and job.gpus_per_task == gpus and gpus > 1:
            places.append(free.whole_place(node))
            continue
        chosen = task_gpus(job, free.gpu_milli[node].tolist(), tasks)
        if single:
            every = free.single_places(node)
            places += [every[gpu] for (gpu,) in chosen]
        else:
            places += [TaskPlace(free.nodes[node].name, one) for one in chosen]
    return tuple(places)


def task_gpus(job: JobRequest, shares: list[int], tasks: int) -> list[tuple[int, ...]]:
    """The GPUs of each of so many tasks on one node. `shares`: what is free of each of its GPUs."""
    each = job.gpus_per_task
    if not each:
        return [()] * tasks
    if not job.fractional:
        able = [gpu for gpu, share in enumerate(shares) if share == WHOLE_GPU]
        return [tuple(able[first : first + each]) for first in range(0, tasks * each, each)]
    chosen: list[tuple[int, ...]] = []
    for _ in range(tasks):
        fullest = min(
            (gpu for gpu, share in enumerate(shares) if share >= job.gpu_milli), key=shares.__getitem__
        )
        shares[fullest] -= job.gpu_milli
        chosen.append((fullest,))
    return chosen
