"""Room for gangs under leaf switches: few nodes one by one, and all nodes in columns, say the same."""

import random

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest, StepProfile, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.policy import leaf_room
from cumulo.cluster.decide.policy.leaf_room import Leaves, fill_nodes
from cumulo.cluster.decide.policy.topology import TopologyPlacer
from cumulo.cluster.decide.step_time import leaf_fabric


def test_nodes_that_a_gang_takes_under_many_leaves_are_those_that_it_takes_under_each():
    draw = random.Random(9)
    nodes = [ClusterNode(f"n{n}", leaf=f"leaf-{draw.randrange(5)}") for n in range(40)]
    leaves, fabric = Leaves(nodes), leaf_fabric(nodes)
    for _ in range(100):
        fits, tasks = np.array([draw.choice((0, 0, 1, 2, 8)) for _ in nodes]), draw.randint(2, 20)
        job = JobRequest("gang", tasks, step=StepProfile(0.1, 1e9, draw.choice((0.0, 1e8))))
        able = [leaf for leaf, room in enumerate(leaves.sums(fits)) if room >= tasks]
        draw.shuffle(able)
        found = leaves.taken(tasks, fits, able)
        for leaf, (used, most) in zip(able, found, strict=True):
            counts = fill_nodes(tasks, leaves.rooms(fits, leaf))
            assert (used, most) == (len(counts), max(count for _, count in counts))
            on = {nodes[node].name: count for node, count in counts}
            assert fabric.step_under_a_leaf(job, used, most) == fabric.step_of(job, on, {})


def test_a_gang_gets_the_same_places_whether_few_nodes_are_looked_at_or_all(monkeypatch):
    draw = random.Random(4)
    nodes = [
        ClusterNode(f"n{n}", device=f"d{n % 2}", cpu_milli=64_000, leaf=f"leaf-{n % 5}") for n in range(40)
    ]
    free, placed = FreeCapacity(nodes), 0
    for number in range(300):
        tasks, gpus, cpu = draw.choice((1, 2, 3, 6, 12)), draw.choice((1, 2, 4)), draw.choice((0, 12_000))
        step, devices = StepProfile(0.1, 1e9, draw.choice((0.0, 1e8))), draw.choice(((), ("d1",)))
        job = JobRequest(f"gang-{number}", tasks, gpus, cpu_milli=cpu, devices=devices, step=step)
        part = free if draw.random() < 0.7 else free.narrowed(draw.getrandbits(len(nodes)))
        found = []
        for few in (len(nodes), -1):
            monkeypatch.setattr(leaf_room, "_FEW_NODES", few)
            placer = TopologyPlacer(leaf_fabric(nodes), Leaves(nodes), {"leaf-1": 2})
            found.append((placer(job, part), placer.why))
        assert found[0] == found[1]
        if found[0][0] is not None:
            placed += tasks > 1
            free.allocate(job, found[0][0])
        for node in [one for one in nodes if draw.random() < 0.08]:  # others leave it
            at = free.index[node.name]
            busy = [gpu for gpu, share in enumerate(free.gpu_milli[at].tolist()) if not share]
            free.release(
                JobRequest("other", 1, len(busy)), [TaskPlace(node.name, tuple(busy))] if busy else []
            )
    assert placed > 50
