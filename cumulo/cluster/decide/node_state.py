"""What is free on one node while jobs are taken off it: for searches for room and for reservations."""

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity


class NodeState:
    """One node, and how many tasks of a job fit there."""

    __slots__ = ("cpu_milli", "job", "memory_mib", "shares")

    def __init__(self, job: JobRequest, free: FreeCapacity, node: int) -> None:
        self.job = job
        self.shares: list[int] = free.gpu_milli[node].tolist()
        self.cpu_milli, self.memory_mib = int(free.cpu_milli[node]), int(free.memory_mib[node])

    def move(self, one: RunningJob, name: str, sign: int) -> None:
        """All tasks of a job that are on the node of this name: 1 takes them off it, -1 puts them back."""
        for place in one.places:
            if place.node == name:
                self.move_task(one.request, place, sign)

    def move_task(self, request: JobRequest, place: TaskPlace, sign: int) -> None:
        self.cpu_milli += sign * request.cpu_milli
        self.memory_mib += sign * request.memory_mib
        for gpu in place.gpus:
            self.shares[gpu] += sign * request.gpu_milli

    def tasks(self) -> int:
        job = self.job
        fits = job.tasks
        if job.fractional:
            fits = sum([share // job.gpu_milli for share in self.shares])
        elif job.gpus_per_task:
            fits = self.shares.count(WHOLE_GPU) // job.gpus_per_task
        if job.cpu_milli:
            fits = min(fits, self.cpu_milli // job.cpu_milli)
        if job.memory_mib:
            fits = min(fits, self.memory_mib // job.memory_mib)
        return fits
