"""A job of a trace, and how fast it runs: at speed 1, as fast as its nodes let it exchange data, or by how many
GPUs it has. The simulator's player asks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest, SpeedTable, StepProfile, TaskPlace
from cumulo.cluster.decide.step_time import LeafFabric

_ONE_LEAF = "one"
_Places = tuple[TaskPlace, ...]


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace: what is asked for, and how much work it really is: seconds at speed 1."""

    request: JobRequest
    work: float


class JobSpeed:
    """How fast a placed job advances: at speed 1, wherever it is placed. Others say what differs."""

    refreshes = False  # whether a policy shall know more about a job while it runs or waits

    def rate(self, job: JobRequest, places: _Places, done: float) -> tuple[float, float]:
        """Work per second from now on, and the amount of work done at which it may change."""
        return 1.0, float("inf")

    def refreshed(self, job: JobRequest, done: float) -> JobRequest:
        """What the policy shall know about this job now: a prediction or a speed table may have changed."""
        return job

    def started(self, job: JobRequest, places: _Places) -> None:
        """Told of every job that begins to run, after its rate was asked for."""

    def left(self, job: JobRequest, places: _Places) -> None:
        """Told of every job that ends or stops."""


class LeafSpeed(JobSpeed):
    """A step takes what the collective model says for the nodes a gang has and the jobs beside it; without a step
    profile a job runs at speed 1. Work is counted in seconds at the step time of a gang that lies under one leaf
    with nobody beside it. The price of a placement is that of the moment it starts: jobs that start later do not
    change it."""

    def __init__(self, fabric: LeafFabric) -> None:
        self.fabric = fabric
        self.busy: Counter[str] = Counter()  # jobs on the uplinks of each leaf
        self._best_s: dict[tuple[StepProfile | None, int, int], float] = {}
        self.steps: dict[str, tuple[float, float]] = {}  # of each job: its step, and the best there is

    def rate(self, job: JobRequest, places: _Places, done: float) -> tuple[float, float]:
        if job.step is None:
            return 1.0, float("inf")
        best_s = self.best_s(job)
        step_s = self.fabric.step_s(job, places, self.busy)
        self.steps[job.job_id] = (step_s, best_s)
        return best_s / step_s, float("inf")

    def started(self, job: JobRequest, places: _Places) -> None:
        if job.step is not None:
            self.busy.update(self.fabric.crossing(places))

    def left(self, job: JobRequest, places: _Places) -> None:
        if job.step is not None:
            self.busy.subtract(self.fabric.crossing(places))

    def best_s(self, job: JobRequest) -> float:
        """Under one leaf, on as few nodes as the gang can have."""
        key = job.step, job.tasks, job.gpus_per_task
        if key not in self._best_s:
            node_gpus, nodes = self.fabric.machine.node.gpus, len(self.fabric.leaf_of)
            per_node = max(1, node_gpus // max(1, job.gpus_per_task))
            places = [TaskPlace(f"node-{task // per_node % nodes}") for task in range(job.tasks)]
            self._best_s[key] = _under_one_leaf(self.fabric, nodes).step_s(job, places, {})
        return self._best_s[key]


def _under_one_leaf(fabric: LeafFabric, nodes: int) -> LeafFabric:
    leaf_of = {f"node-{number}": _ONE_LEAF for number in range(nodes)}
    return LeafFabric(fabric.device, leaf_of, fabric.oversubscription)


class ElasticSpeed(JobSpeed):
    """The speed of its table. Work is counted in seconds with the GPUs that the job asks for."""

    def rate(self, job: JobRequest, places: _Places, done: float) -> tuple[float, float]:
        if job.speed is None:
            return 1.0, float("inf")
        nodes = len({place.node for place in places})
        asked = (
            job.speed.one_node[job.tasks - 1 : job.tasks] or job.speed.many_nodes[job.tasks - 1 : job.tasks]
        )
        return job.speed.goodput(len(places), nodes) / asked[0], float("inf")


def elastic_jobs(trace: Sequence[TraceJob], fabric: LeafFabric) -> list[TraceJob]:
    """The same jobs; those with an elastic range, tasks of one GPU and a known step get a speed table."""
    tables: dict[tuple[StepProfile, int, int], SpeedTable] = {}
    alone = _under_one_leaf(fabric, len(fabric.leaf_of))
    found = []
    for job in trace:
        request = job.request
        if request.elastic and request.gpus_per_task == 1 and not request.fractional and request.step:
            most = request.max_tasks or request.tasks
            key = request.step, request.tasks, most
            if key not in tables:
                tables[key] = _table(request, most, alone)
            job = replace(job, request=replace(request, speed=tables[key]))
        found.append(job)
    return found


def _table(job: JobRequest, most: int, fabric: LeafFabric) -> SpeedTable:
    """Steps per second: what a step computes is divided over the GPUs, its gradients are as large as before. Their
    exchange is priced for powers of two and interpolated between them."""
    assert job.step is not None
    priced = [1]
    while priced[-1] < most:
        priced.append(min(2 * priced[-1], most))
    exchange_s = np.interp(
        np.arange(1, most + 1), priced, [0.0, *(_exchange_s(job, size, fabric) for size in priced[1:])]
    )
    compute_s = job.step.compute_s * job.tasks / np.arange(1, most + 1)
    speeds = (1.0 / (compute_s + exchange_s)).tolist()
    return SpeedTable(tuple(speeds[: fabric.machine.node.gpus]), tuple(speeds))


def _exchange_s(job: JobRequest, gpus: int, fabric: LeafFabric) -> float:
    assert job.step is not None
    nodes, per_node = list(fabric.leaf_of), fabric.machine.node.gpus
    places = [TaskPlace(nodes[gpu // per_node % len(nodes)]) for gpu in range(gpus)]
    return fabric.step_s(replace(job, step=replace(job.step, compute_s=0.0)), places, {})
