"""How much of a node's free GPU share the workload cannot use: the measure of FGD (Weng et al., USENIX ATC 2023).

A workload is what tasks usually ask for, and how often. A node's fragmentation is the expected share of its free
GPUs that a task drawn from the workload cannot use: all of it if the task does not fit, else what lies on GPUs
with too little left for it (section 3.2).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.jobs import JobRequest
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

    def on(self, device: str) -> "TaskMix":
        """What it asks of nodes with this device: shapes that differ only in the devices they accept are one, and
        the frequencies of those that do not accept it are missing."""
        found = dict[TaskShape, float]()
        for shape, frequency in zip(self.shapes, self.frequency, strict=True):
            if not shape.devices or device in shape.devices:
                same = replace(shape, devices=())
                found[same] = found.get(same, 0.0) + frequency
        return TaskMix(tuple(found), tuple(found.values()))


def shape_of(job: JobRequest) -> TaskShape:
    return TaskShape(job.gpus_per_task, job.gpu_milli if job.gpus_per_task else 0, job.cpu_milli, job.devices)


def task_mix(jobs: Iterable[JobRequest], share: float = 0.95) -> TaskMix:
    """The most frequent shapes that together make up `share` of all tasks (95%, as the paper's experiments
    use)."""
    counts: Counter[tuple[int, int, int, tuple[str, ...]]] = Counter()
    for job in jobs:
        counts[job.gpus_per_task, job.gpu_milli, job.cpu_milli, job.devices] += job.tasks
    shapes: Counter[TaskShape] = Counter()
    for (gpus, milli, cpu, devices), tasks in counts.items():
        shapes[TaskShape(gpus, milli if gpus else 0, cpu, devices)] += tasks
    total, reached = shapes.total(), 0
    chosen: list[tuple[TaskShape, int]] = []
    for shape, count in shapes.most_common():
        if reached >= share * total:
            break
        chosen.append((shape, count))
        reached += count
    return TaskMix(tuple(shape for shape, _ in chosen), tuple(count / reached for _, count in chosen))


def fragmentation(gpu_milli: Ints, cpu_milli: Ints, mix: TaskMix, reachable: Ints | None = None) -> Floats:
    """Of states of nodes: GPU thousandths that the mix cannot use. `gpu_milli` is [states, GPUs]; `reachable` is
    [states, shapes], False where a shape does not accept the node's device."""
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


def fragmented_share(free: FreeCapacity, mix: TaskMix, most_nodes: int = 2000) -> float:
    """Of the GPUs that are free, the share that a task drawn from the mix cannot use; of the first nodes of a
    large cluster."""
    first = slice(min(len(free.nodes), most_nodes))
    gpu_milli, cpu_milli, device_of = free.gpu_milli[first], free.cpu_milli[first], free.device_of[first]
    left = float(gpu_milli.sum())
    if not left:
        return 0.0
    unused = 0.0
    for device, number in free.devices.items():
        nodes = device_of == number
        unused += float(fragmentation(gpu_milli[nodes], cpu_milli[nodes], mix.on(device)).sum())
    return unused / left
