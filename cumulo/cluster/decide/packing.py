"""Which node gets a task, by a score per node: the packing rules that the FGD paper compares (Weng et al., USENIX
ATC 2023, section 6.1). Tasks may be shares of a GPU.

A scorer sees the nodes that could take the task and returns one number for each, higher is better. The rules
compare whole percents, as Kubernetes does; among equals the first node in an order that the seed draws once. That
order is what makes them pack: with a new draw for every task FGD allocates 5 points less of the published trace.

FGD's measure is how much of a node's free GPU share the workload cannot use. A workload is what tasks usually
ask for, and how often. A node's fragmentation is the expected share of its free GPUs that a task drawn from
the workload cannot use: all of it if the task does not fit, else what lies on GPUs with too little left for
it (section 3.2).
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.fit import task_places, tasks_that_fit
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, Ints

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TaskShape:
    """What one task asks for, as far as fragmentation is concerned."""

    gpus: int
    gpu_milli: int
    cpu_milli: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskMix:
    """Shapes of tasks and how often each is asked for; the frequencies add up to 1."""

    shapes: tuple[TaskShape, ...]
    frequency: tuple[float, ...]

    @cached_property
    def columns(self) -> tuple[Ints, Ints, Ints, Floats]:
        gpus = np.array([shape.gpus for shape in self.shapes], dtype=np.int32)
        # A task without GPUs uses none of the free share: a request that no GPU can meet says the same.
        milli = np.array(
            [shape.gpu_milli if shape.gpus else 1 << 14 for shape in self.shapes], dtype=np.int16
        )
        cpu = np.array([shape.cpu_milli for shape in self.shapes], dtype=np.int32)
        return np.maximum(gpus, 1), milli, cpu, np.array(self.frequency)


def shape_of(job: JobRequest) -> TaskShape:
    return TaskShape(job.gpus_per_task, job.gpu_milli if job.gpus_per_task else 0, job.cpu_milli, job.devices)


def task_mix(jobs: Iterable[JobRequest], share: float = 0.95) -> TaskMix:
    """The most frequent shapes that together make up `share` of all tasks (95%, as the paper's experiments
    use)."""
    shapes: Counter[TaskShape] = Counter()
    for job in jobs:
        shapes[shape_of(job)] += job.tasks
    total, reached = shapes.total(), 0
    chosen: list[tuple[TaskShape, int]] = []
    for shape, count in shapes.most_common():
        if reached >= share * total:
            break
        chosen.append((shape, count))
        reached += count
    return TaskMix(tuple(shape for shape, _ in chosen), tuple(count / reached for _, count in chosen))


def fragmentation(gpu_milli: Ints, cpu_milli: Ints, mix: TaskMix, reachable: Ints | None = None) -> Floats:
    """Fragmentation of states of nodes: GPU thousandths that the mix cannot use. `gpu_milli` is [states, GPUs];
    `reachable` is [states, shapes], False where a shape does not accept the node's device."""
    gpus, milli, cpu, frequency = mix.columns
    enough = gpu_milli[:, :, None] >= milli  # [states, GPUs, shapes]
    fits = (enough.sum(axis=1) >= gpus) & (cpu_milli[:, None] >= cpu)
    if reachable is not None:
        fits &= reachable
    usable = np.where(enough, gpu_milli[:, :, None], 0).sum(axis=1)
    total = gpu_milli.sum(axis=1, dtype=np.float64)
    return total - np.where(fits, usable, 0) @ frequency  # type: ignore[no-any-return]


def stranded(gpu_milli: Ints, cpu_milli: Ints, mix: TaskMix, reachable: Ints | None = None) -> Floats:
    """As `fragmentation`, looking ahead: half of it, and half of what is left over when a node is filled up with
    tasks of one shape, the mean over the shapes. That half sees what the next task alone does not: GPUs for whose
    tasks there will be no cores, and what a share leaves on its GPU for good."""
    gpus, milli, cpu, frequency = mix.columns
    each = milli.astype(np.int32)
    tasks = (gpu_milli[:, :, None] // each).sum(axis=1) // gpus  # [states, shapes]
    cores = np.maximum(cpu_milli, 0)[:, None] // np.maximum(cpu, 1)
    tasks = np.where(cpu > 0, np.minimum(tasks, cores), tasks)
    if reachable is not None:
        tasks = np.where(reachable, tasks, 0)
    filled = (tasks * (each * gpus)) @ frequency
    left = gpu_milli.sum(axis=1, dtype=np.float64) - filled
    return 0.5 * (fragmentation(gpu_milli, cpu_milli, mix, reachable) + left)  # type: ignore[no-any-return]


def reachable_shapes(free: FreeCapacity, nodes: Ints, mix: TaskMix) -> Ints | None:
    """[nodes, shapes]: whether the shape accepts the node's device; None: every shape accepts all."""
    if not any(shape.devices for shape in mix.shapes):
        return None
    everywhere = np.ones(len(nodes), dtype=np.bool_)
    masks = [free.accepted(shape.devices)[nodes] if shape.devices else everywhere for shape in mix.shapes]
    return np.stack(masks, axis=1)


_MOST_CPU, _MOST_GPU = 128_000, 8_000  # the largest node of the published comparison, in thousandths

Scorer = Callable[
    [JobRequest, FreeCapacity, Ints], tuple[Floats, Ints | None]
]  # scores, and the GPU for a share


def place_by_score(
    job: JobRequest, free: FreeCapacity, scorer: Scorer, seed: int, any_gpu: bool = False
) -> TaskPlace | None:
    """The place of a job's only task: the node with the best score; None: it fits nowhere. `any_gpu`: among equals
    any node, and shares go on any GPU with room, not on the fullest."""
    able = np.flatnonzero(tasks_that_fit(job, free))
    if not len(able):
        return None
    draw = np.random.Generator(np.random.PCG64(zlib.crc32(f"{seed} {job.job_id}".encode())))
    scores, gpus = scorer(job, free, able)
    best = np.flatnonzero(scores == scores.max())
    order = _order(len(free.nodes), seed)
    chosen = int(best[draw.integers(len(best))]) if any_gpu else int(best[order[able[best]].argmin()])
    node = int(able[chosen])
    if job.fractional and (gpus is not None or any_gpu):
        room = np.flatnonzero(free.gpu_milli[node] >= job.gpu_milli)
        gpu = int(gpus[chosen]) if gpus is not None else int(room[draw.integers(len(room))])
        return TaskPlace(free.nodes[node].name, (gpu,))
    return task_places(job, free, [(node, 1)])[0]


@lru_cache(maxsize=16)
def _order(nodes: int, seed: int) -> Ints:
    """Among equal scores the first in this order: the same for every job, so that ties do not scatter tasks."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(nodes)


def random_score(job: JobRequest, free: FreeCapacity, able: Ints) -> tuple[Floats, None]:
    return np.zeros(len(able)), None


def best_fit(job: JobRequest, free: FreeCapacity, able: Ints) -> tuple[Floats, None]:
    """The node with the least left over, CPU and GPU alike."""
    gpu = free.gpu_milli[able].sum(axis=1) - job.milli_per_task
    cpu = free.cpu_milli[able] - job.cpu_milli
    return np.floor(100 * (1 - 0.5 * cpu / _MOST_CPU - 0.5 * gpu / _MOST_GPU)), None


def dot_product(job: JobRequest, free: FreeCapacity, able: Ints) -> tuple[Floats, None]:
    """The node whose free resources point least along the request (Tetris, Grandl et al. 2014)."""
    gpu = free.gpu_milli[able].sum(axis=1) / _MOST_GPU * (job.milli_per_task / _MOST_GPU)
    cpu = free.cpu_milli[able] / _MOST_CPU * (job.cpu_milli / _MOST_CPU)
    return np.floor(100 * (1 - (gpu + cpu) / 2)), None


def gpu_packing(job: JobRequest, free: FreeCapacity, able: Ints) -> tuple[Floats, None]:
    """GPUs in use before free ones, nodes in use before free ones (Weng et al., NSDI 2022)."""
    if not job.gpus_per_task:
        return np.zeros(len(able)), None
    shares, whole = free.gpu_milli[able], free.whole[able]
    unused = whole == free.gpus[able]
    in_use = np.where((shares >= job.gpu_milli) & (shares < WHOLE_GPU), shares, 2 * WHOLE_GPU).min(axis=1)
    shared = np.where(in_use < WHOLE_GPU, np.maximum(100 - in_use * 100 // WHOLE_GPU // 10, 50), 0)
    if not job.fractional:
        shared = np.zeros(len(able))
    used_node = np.maximum(50 - job.gpus_per_task, 33)
    score = np.where(unused, np.maximum(33 - whole, whole), np.where(shared > 0, shared, used_node))
    return score.astype(np.float64), None


@dataclass
class Clustering:
    """Tasks of one kind (shares, one GPU, two ...) lie together (Xiao et al., OSDI 2018). Remembers what it
    placed, because a snapshot of shares does not say of which kind they are."""

    kinds: dict[str, set[str]] = field(default_factory=dict)  # of each node

    def __call__(self, job: JobRequest, free: FreeCapacity, able: Ints) -> tuple[Floats, None]:
        if not job.gpus_per_task:
            return np.zeros(len(able)), None
        kind = kind_of(job)
        left = free.gpu_milli[able].sum(axis=1)
        base = np.empty(len(able))
        for position, node in enumerate(able.tolist()):
            kinds = self.kinds.get(free.nodes[node].name, set())
            if kind in kinds:
                base[position] = 75 if len(kinds) == 1 else 50
            else:
                base[position] = 25 if not kinds else 0
        return base + 25 * (_MOST_GPU - left) // _MOST_GPU, None


def kind_of(job: JobRequest) -> str:
    return "share" if job.fractional else f"{job.gpus_per_task}-gpu"


@dataclass
class GradientDescent:
    """FGD: the node, and for a share the GPU, where the task adds the least fragmentation. With `stranded` as the
    measure it looks ahead. What was found for a node is found again only when its free capacity is another."""

    mix: TaskMix
    measure: Callable[[Ints, Ints, TaskMix, Ints | None], Floats] = fragmentation
    _found: dict[TaskShape, tuple[Ints, Floats, Ints]] = field(default_factory=dict, repr=False)

    def __call__(self, job: JobRequest, free: FreeCapacity, able: Ints) -> tuple[Floats, Ints | None]:
        shape, size = shape_of(job), len(free.nodes)
        now = np.column_stack((free.gpu_milli[able], free.cpu_milli[able]))
        if shape not in self._found:
            nothing = np.full((size, now.shape[1]), -1)
            self._found[shape] = nothing, np.zeros(size), np.zeros(size, dtype=np.int64)
        seen, saved, gpus = self._found[shape]
        stale = able[(seen[able] != now).any(axis=1)]
        if len(stale):
            saved[stale], gpus[stale] = self._less_fragmented(job, free, stale)
            seen[able] = now
        return _percent(saved[able]), gpus[able] if job.fractional else None

    def _less_fragmented(self, job: JobRequest, free: FreeCapacity, nodes: Ints) -> tuple[Floats, Ints]:
        """By how much fragmentation falls if the task goes there, and on which GPU it falls most."""
        shares, cpu = free.gpu_milli[nodes], free.cpu_milli[nodes]
        reachable = reachable_shapes(free, nodes, self.mix)
        before = self.measure(shares, cpu, self.mix, reachable)
        width = shares.shape[1]
        if job.fractional:
            after = np.repeat(shares, width, axis=0).reshape(len(nodes), width, width)
            gpu = np.arange(width)
            after[:, gpu, gpu] -= job.gpu_milli
            possible = shares >= job.gpu_milli
            wide = None if reachable is None else np.repeat(reachable, width, axis=0)
            amounts = self.measure(
                after.reshape(-1, width), np.repeat(cpu - job.cpu_milli, width), self.mix, wide
            ).reshape(len(nodes), width)
            gain = np.where(possible, before[:, None] - amounts, -np.inf)
            best = _percent(gain).argmax(axis=1)
            return gain[np.arange(len(nodes)), best], best
        after = shares.copy()
        if job.gpus_per_task:
            order = np.cumsum(shares == WHOLE_GPU, axis=1)
            after[(shares == WHOLE_GPU) & (order <= job.gpus_per_task)] = 0
        amount = self.measure(after, cpu - job.cpu_milli, self.mix, reachable)
        return before - amount, np.zeros(len(nodes), dtype=np.int64)


def _percent(gain: Floats) -> Floats:
    """Fragmentation saved, as the published rule compares it: whole percents of a sigmoid, in GPUs."""
    return np.floor(100 / (1 + np.exp(-gain / WHOLE_GPU)))
