"""What of the free GPUs a workload cannot use."""

import random

import numpy as np
import pytest

from cumulo.cluster.decide.fit import pack_gang
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.packing import (
    TaskMix,
    TaskShape,
    fragmentation,
    reachable_shapes,
    stranded,
    task_mix,
)


def test_looking_ahead_sees_gpus_without_cores():
    mix = TaskMix((TaskShape(1, 1000, 8000),), (1.0,))
    node = FreeCapacity([ClusterNode("n", 4, cpu_milli=16_000)])
    now = (node.gpu_milli, node.cpu_milli, mix)
    assert fragmentation(*now) == [0.0]  # the next task fits
    assert stranded(*now) == [1000.0]  # two of four GPUs have no cores: half of 2,000


def unused(free: FreeCapacity, mix: TaskMix) -> float:
    """The definition, node by node and shape by shape."""
    found = 0.0
    for node, frequency, shape in (
        (node, frequency, shape)
        for node in range(len(free.nodes))
        for frequency, shape in zip(mix.frequency, mix.shapes, strict=True)
    ):
        gpus = free.gpu_milli[node].tolist()
        enough = [left for left in gpus if shape.gpus and left >= shape.gpu_milli]
        fits = len(enough) >= max(1, shape.gpus) and free.cpu_milli[node] >= shape.cpu_milli
        accepted = not shape.devices or free.nodes[node].device in shape.devices
        found += frequency * (sum(gpus) - (sum(enough) if fits and accepted else 0))
    return found


def fragmented(free: FreeCapacity, mix: TaskMix) -> float:
    nodes = np.arange(len(free.nodes))
    return fragmentation(free.gpu_milli, free.cpu_milli, mix, reachable_shapes(free, nodes, mix)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_fragmentation_is_what_its_definition_says(seed: int):
    draw = random.Random(seed)
    free = FreeCapacity([ClusterNode(f"n{at}", 4, "abc"[at % 3], cpu_milli=24_000) for at in range(30)])
    jobs = []
    for number in range(60):
        share = draw.random() < 0.5
        job = JobRequest(
            f"j{number}", 1, draw.choice((0, 1)) if share else draw.choice((1, 2, 4)), 250 if share else 1000,
            draw.choice((0, 2000, 8000)), devices=draw.choice(((), (), ("a",), ("a", "c"), ("c", "gone"))),
        )  # fmt: skip
        jobs.append(job)
        places = pack_gang(job, free)
        if places is not None:
            free.allocate(job, places)
    mix = task_mix(jobs)
    assert len(mix.shapes) > 15
    assert fragmented(free, mix) == pytest.approx(unused(free, mix))


def test_devices_that_no_task_accepts_are_of_no_use():
    free = FreeCapacity([ClusterNode("x", 4, "a"), ClusterNode("y", 4, "b")])
    assert fragmented(free, TaskMix((TaskShape(1, 1000, 0, ("a",)),), (1.0,))) == 4000
