"""What is free on one node while jobs are taken off it: for searches for room and for reservations."""

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity


class NodeState:
    """One node, and how many tasks of a job fit there."""

    __slots__ = ("cpu_milli", "job", "memory_mib", "shares")

    def __init__(self, job: JobRequest, free: FreeCapacity, node: int) -> None:
        self.job = job
        self.shares: list[int] = free.gpu_milli[node].tolist()
        self.cpu_milli: int = free.cpu_milli.item(node)
        self.memory_mib: int = free.memory_mib.item(node)

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
        if not job.gpus_per_task:
            fits = job.tasks
        elif job.gpu_milli == WHOLE_GPU:
            fits = self.shares.count(WHOLE_GPU) // job.gpus_per_task
        else:
            fits = sum([share // job.gpu_milli for share in self.shares])
        if job.cpu_milli and (by_cores := self.cpu_milli // job.cpu_milli) < fits:
            fits = by_cores
        if job.memory_mib and (by_memory := self.memory_mib // job.memory_mib) < fits:
            fits = by_memory
        return fits
