"""Jobs that run as fast as their placement lets them: a step takes what the collective model says for the nodes
a gang has and the jobs beside it. Without a step profile a job runs at speed 1.
"""

from collections import Counter
from collections.abc import Mapping

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, StepProfile, TaskPlace
from cumulo.cluster.decide.step_time import LeafFabric, uplinks_of


class LeafSpeed:
    """Work is counted in seconds at the step time of a gang that lies under one leaf with nobody beside it. The
    price of a placement is that of the moment it starts: jobs that start later do not change it."""

    refreshes = False

    def __init__(self, fabric: LeafFabric) -> None:
        self.fabric = fabric
        self.running: Mapping[str, RunningJob] = {}
        self._best_s: dict[tuple[StepProfile | None, int, int], float] = {}
        self._alone: LeafFabric | None = None  # the same nodes under one leaf
        self._names: list[str] = []
        self.steps: dict[str, tuple[float, float]] = {}  # of each job: its step, and the best there is

    def beside(self, running: Mapping[str, RunningJob]) -> None:
        self.running = running

    def rate(self, job: JobRequest, places: tuple[TaskPlace, ...], done: float) -> tuple[float, float]:
        if job.step is None:
            return 1.0, float("inf")
        others = uplinks_of(self.fabric, self.running).busy
        crossed = self.fabric.crossing(places)
        if crossed and job.job_id in self.running:
            others = Counter(others)
            others.subtract(crossed)
        best_s = self.best_s(job)
        step_s = self.fabric.step_s(job, places, others)
        self.steps[job.job_id] = (step_s, best_s)
        return best_s / step_s, float("inf")

    def best_s(self, job: JobRequest) -> float:
        """Under one leaf, on as few nodes as the gang can have."""
        key = job.step, job.tasks, job.gpus_per_task
        known = self._best_s.get(key)
        if known is None:
            known = self._best_s[key] = self._alone_s(job)
        return known

    def _alone_s(self, job: JobRequest) -> float:
        if self._alone is None:
            names = [f"node-{number}" for number in range(len(self.fabric.leaf_of))]
            self._alone = LeafFabric(
                self.fabric.machine, dict.fromkeys(names, "one"), self.fabric.oversubscription
            )
            self._names = names
        per_node, nodes = max(1, self.fabric.machine.node.gpus // max(1, job.gpus_per_task)), len(self._names)
        places = [TaskPlace(self._names[task // per_node % nodes]) for task in range(job.tasks)]
        return self._alone.step_s(job, places, {})

    def refreshed(self, job: JobRequest, done: float) -> JobRequest:
        return job
