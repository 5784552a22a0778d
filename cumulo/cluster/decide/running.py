"""The jobs that run, with what policies ask about all of them kept up to date: GPUs and cores of each tenant, and
how many could be preempted at each priority."""

from collections import Counter
from collections.abc import Iterable, Mapping

from cumulo.cluster.decide.jobs import WHOLE_GPU, RunningJob


class RunningTable(dict[str, RunningJob]):
    """Players keep one; a policy that gets any other mapping counts for itself."""

    def __init__(self, jobs: Iterable[RunningJob] = ()) -> None:
        super().__init__()
        self.milli: Counter[str] = Counter()  # of each tenant: thousandths of GPUs
        self.cpu_milli: Counter[str] = Counter()
        self.preemptible: Counter[int] = Counter()  # jobs of each priority
        for job in jobs:
            self.put(job)

    def put(self, job: RunningJob) -> None:
        self[job.job_id] = job
        self._count(job, 1)

    def drop(self, job_id: str) -> RunningJob:
        job = self.pop(job_id)
        self._count(job, -1)
        return job

    def _count(self, job: RunningJob, sign: int) -> None:
        request, tasks = job.request, sign * job.tasks
        self.milli[request.tenant] += tasks * request.milli_per_task
        if request.cpu_milli:
            self.cpu_milli[request.tenant] += tasks * request.cpu_milli
        if request.preemptible:
            self.preemptible[request.priority] += sign


def table_of(running: Mapping[str, RunningJob]) -> RunningTable:
    return running if isinstance(running, RunningTable) else RunningTable(running.values())


def gpus_by_tenant(running: Mapping[str, RunningJob]) -> dict[str, float]:
    """GPUs that each tenant's running jobs have."""
    return {name: milli / WHOLE_GPU for name, milli in table_of(running).milli.items() if milli}
