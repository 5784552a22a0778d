"""The jobs that run, with what policies ask about all of them kept up to date: GPUs and cores of each tenant, how
many could be preempted at each priority, and views that a policy wants kept."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

from cumulo.cluster.decide.jobs import JobRequest, RunningJob


class RunningView(Protocol):
    """What is worked out from all running jobs, one job at a time."""

    def add(self, job: RunningJob) -> None: ...
    def remove(self, job: RunningJob) -> None: ...
    def swap(self, old: RunningJob, job: RunningJob) -> None:
        """The same job, about which more is known."""
        self.remove(old)
        self.add(job)


View = TypeVar("View", bound=RunningView)


class RunningTable(dict[str, RunningJob]):
    """Players keep one; a policy that gets any other mapping counts for itself."""

    def __init__(self, jobs: Iterable[RunningJob] = ()) -> None:
        super().__init__()
        self.changes = 0  # how often a job started, ended, or became better known
        self._views: dict[Any, RunningView] = {}
        for job in jobs:
            self.put(job)

    def put(self, job: RunningJob) -> None:
        self[job.job_id] = job
        self.changes += 1
        for view in self._views.values():
            view.add(job)

    def drop(self, job_id: str) -> RunningJob:
        job = self.pop(job_id)
        self.changes += 1
        for view in self._views.values():
            view.remove(job)
        return job

    def swap(self, job: RunningJob) -> None:
        """More is known about a job that runs; it keeps its places."""
        old, self[job.job_id] = self[job.job_id], job
        self.changes += 1
        for view in self._views.values():
            view.swap(old, job)

    def view(self, key: Any, make: Callable[[], View]) -> View:
        """The view of this key, kept from the first time it is asked for."""
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = make()
            for job in self.values():
                found.add(job)
        return cast(View, found)

    @cached_property
    def milli(self) -> Counter[str]:
        """Of each tenant: thousandths of GPUs. Like the others below, kept from the first time it is asked for."""
        return self.view(TenantUse, TenantUse).milli

    @cached_property
    def cpu_milli(self) -> Counter[str]:
        """Of each tenant: thousandths of cores."""
        return self.view(TenantUse, TenantUse).cpu_milli

    @cached_property
    def preemptible(self) -> Counter[int]:
        """Jobs of each priority that some have."""
        return self.view(PreemptibleJobs, PreemptibleJobs).by_priority


class TenantUse(RunningView):
    """Thousandths of GPUs and cores of each tenant."""

    def __init__(self) -> None:
        self.milli: Counter[str] = Counter()
        self.cpu_milli: Counter[str] = Counter()

    def add(self, job: RunningJob) -> None:
        self._count(job.request, len(job.places))

    def remove(self, job: RunningJob) -> None:
        self._count(job.request, -len(job.places))

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        pass  # it keeps its places

    def _count(self, request: JobRequest, tasks: int) -> None:
        self.milli[request.tenant] += tasks * request.milli_per_task
        if request.cpu_milli:
            self.cpu_milli[request.tenant] += tasks * request.cpu_milli


class PreemptibleJobs(RunningView):
    """How many jobs could be preempted, of each priority that some have."""

    def __init__(self) -> None:
        self.by_priority: Counter[int] = Counter()

    def add(self, job: RunningJob) -> None:
        if job.request.preemptible:
            self.by_priority[job.request.priority] += 1

    def remove(self, job: RunningJob) -> None:
        request = job.request
        if request.preemptible:
            self.by_priority[request.priority] -= 1
            if not self.by_priority[request.priority]:
                del self.by_priority[request.priority]

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        pass  # it keeps its priority


class JobsOnNodes(RunningView):
    """The jobs on each node, by name."""

    def __init__(self) -> None:
        self.on: dict[str, dict[str, RunningJob]] = {}

    def add(self, job: RunningJob) -> None:
        for place in job.places:
            self.on.setdefault(place.node, {})[job.job_id] = job

    def remove(self, job: RunningJob) -> None:
        for place in job.places:
            self.on[place.node].pop(job.job_id, None)

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        for place in job.places:
            self.on[place.node][job.job_id] = job


class TouchedTenants(RunningView):
    """Those whose jobs started or ended, in that order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, job: RunningJob) -> None:
        self.names.append(job.request.tenant)

    def remove(self, job: RunningJob) -> None:
        self.names.append(job.request.tenant)

    def swap(self, old: RunningJob, job: RunningJob) -> None:
        pass  # it keeps its places


def table_of(running: Mapping[str, RunningJob]) -> RunningTable:
    return running if isinstance(running, RunningTable) else RunningTable(running.values())


def jobs_on_nodes(running: Mapping[str, RunningJob]) -> Mapping[str, Mapping[str, RunningJob]]:
    return table_of(running).view(JobsOnNodes, JobsOnNodes).on


def touched_tenants(running: RunningTable) -> list[str]:
    """The tenants of jobs that started or ended, in that order, from the first time that somebody asks."""
    return running.view(TouchedTenants, TouchedTenants).names
