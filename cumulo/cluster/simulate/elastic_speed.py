"""Elastic jobs of a trace: how fast each runs with every number of GPUs, by the planner's model of its step. The
elastic policies resize jobs by these tables, and the simulator lets them run as fast."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, SpeedTable, StepProfile, TaskPlace
from cumulo.cluster.decide.step_time import LeafFabric
from cumulo.cluster.simulate.job_speed import TraceJob

_ONE_LEAF = "one"


class ElasticSpeed:
    """Work is counted in seconds with the GPUs that the job asks for."""

    refreshes = False

    def beside(self, running: Mapping[str, RunningJob]) -> None:
        pass  # neighbours do not slow each other down here

    def rate(self, job: JobRequest, places: tuple[TaskPlace, ...], done: float) -> tuple[float, float]:
        if job.speed is None:
            return 1.0, float("inf")
        nodes = len({place.node for place in places})
        asked = (
            job.speed.one_node[job.tasks - 1 : job.tasks] or job.speed.many_nodes[job.tasks - 1 : job.tasks]
        )
        return job.speed.goodput(len(places), nodes) / asked[0], float("inf")

    def refreshed(self, job: JobRequest, done: float) -> JobRequest:
        return job


def elastic_jobs(trace: Sequence[TraceJob], fabric: LeafFabric) -> list[TraceJob]:
    """The same jobs; those with an elastic range, tasks of one GPU and a known step get a speed table."""
    tables: dict[tuple[StepProfile, int, int], SpeedTable] = {}
    alone = LeafFabric(fabric.machine, dict.fromkeys(fabric.leaf_of, _ONE_LEAF), fabric.oversubscription)
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
