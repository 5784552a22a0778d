"""The workloads of Pollux (Qiao et al., OSDI 2021): jobs whose speed depends on GPUs, placement and batch size,
and whose steps are worth less in large batches. `play` asks this file how fast a job advances.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from cumulo.base.strict import package_yaml
from cumulo.cluster.decide.jobs import JobRequest, SpeedTable, TaskPlace
from cumulo.cluster.simulate.job_speed import JobSpeed, TraceJob
from cumulo.cluster.simulate.synthetic import error_of
from cumulo.cluster.simulate.traces import once, read_lines
from cumulo.errors import ConfigError

RESTART_S = 30.0  # of every start and every change of the allocation, as the artifact counts it
_MOST_GPUS = 64
_NEAR_GPUS = 16  # beyond, the exchange grows more slowly with each GPU


@dataclass(frozen=True, slots=True)
class Application:
    """A training job of the workloads; see pollux_applications.yaml for the formulas."""

    name: str
    initial_batch: int
    max_batch: int
    local_batch: tuple[int, int]
    progress: float
    noise: tuple[tuple[float, float], ...]
    compute: tuple[float, float]
    network: dict[str, tuple[float, ...]]
    overlap: float

    def step_s(self, gpus: int, nodes: int, local: float, accumulated: int) -> float:
        """Seconds for a step of `accumulated` further passes before the gradients are exchanged."""
        compute = self.compute[0] + self.compute[1] * local
        first, per_gpu, *far = self.network["one" if nodes == 1 else "two" if nodes == 2 else "more"]
        near = min(gpus, _NEAR_GPUS) if far else gpus
        network = 0.0 if gpus == 1 else first + per_gpu * (near - 2) + sum(far) * (gpus - near)
        return accumulated * compute + float(
            (compute**self.overlap + network**self.overlap) ** (1 / self.overlap)
        )

    def worth(self, batch: float, done: float) -> float:
        """Steps of the initial batch that a step of this batch replaces."""
        noise, scale = self.noise_at(done)[0], batch / self.initial_batch
        return (noise + 1) / (noise / scale + 1)

    def noise_at(self, done: float) -> tuple[float, float]:
        """The noise scale now, and the progress until which it holds."""
        for share, noise in self.noise:
            if done < share * self.progress * (1 - 1e-9):
                return noise, share * self.progress
        return self.noise[-1][1], math.inf

    def goodput(self, gpus: int, nodes: int, done: float, batch: int | None) -> float:
        """Progress per second; `batch` None: of the best batch size."""
        if batch is not None:
            return self._goodput_of(gpus, nodes, done, batch)
        return _best_goodput(self.name, gpus, min(nodes, 3), self.noise_at(done)[0])

    def _goodput_of(self, gpus: int, nodes: int, done: float, batch: float) -> float:
        local = math.ceil(batch / gpus - 1e-8)
        if local < self.local_batch[0]:
            return 0.0
        accumulated = math.ceil(local / self.local_batch[1] - 1e-8) - 1
        if gpus == 1 and batch > self.initial_batch:
            accumulated = max(1, accumulated)  # one batch alone says nothing about the noise
        each = math.ceil(local / (accumulated + 1) - 1e-8)
        if each < self.local_batch[0] and batch > self.initial_batch:
            return 0.0
        return self.worth(each * (accumulated + 1) * gpus, done) / self.step_s(gpus, nodes, each, accumulated)


@cache
def applications() -> dict[str, Application]:
    return {
        name: Application(
            name, row["initial_batch"], row["max_batch"], tuple(row["local_batch"]), row["progress"],
            tuple(tuple(pair) for pair in row["noise"]), tuple(row["compute"]),
            {key: tuple(pair) for key, pair in row["network"].items()}, row["overlap"],
        )
        for name, row in package_yaml("cumulo.cluster", "data/pollux_applications.yaml").items()
    }  # fmt: skip


@cache
def _best_goodput(name: str, gpus: int, nodes: int, noise: float) -> float:
    app = applications()[name]
    done = next(
        (share * app.progress * 0.999 for share, value in app.noise if value == noise), app.progress * 0.999
    )
    least = max(app.initial_batch, app.local_batch[0] * gpus)
    if least > app.max_batch:
        return 0.0
    sizes = np.geomspace(least, app.max_batch, 50)
    return max(app._goodput_of(gpus, nodes, done, float(size)) for size in sizes)


@dataclass
class PolluxSpeed(JobSpeed):
    """How the jobs of a workload advance. `adaptive`: each job takes the best batch size for the GPUs it has,
    and the policy sees its goodput with every number of GPUs; else the batch size of the trace."""

    adaptive: bool
    batches: dict[str, int]
    error: float = 0.0  # of the predicted remaining time

    def __post_init__(self) -> None:
        self.refreshes = self.adaptive
        self.most_gpus: dict[str, int] = {}

    def rate(self, job: JobRequest, places: tuple[TaskPlace, ...], done: float) -> tuple[float, float]:
        app = application_of(job.job_id)
        nodes = len({place.node for place in places})
        self.most_gpus[job.job_id] = max(len(places), self.most_gpus.get(job.job_id, 0))
        batch = None if self.adaptive and app.name != "ncf" else self.batches[job.job_id]
        return app.goodput(len(places), nodes, done, batch), app.noise_at(done)[1]

    def refreshed(self, job: JobRequest, done: float) -> JobRequest:
        """A job shows its goodput with up to twice the GPUs it has had: nobody has measured it with more."""
        if not self.adaptive:
            return job
        app = application_of(job.job_id)
        known = self.most_gpus.get(job.job_id, 0)
        most = (
            1
            if app.name == "ncf"
            else max(1, min(2 * known, _MOST_GPUS, app.max_batch // app.local_batch[0]))
        )
        table = _table(app.name, app.noise_at(done)[0])
        left_s = (app.progress - done) / table.goodput(1, 1)  # on one GPU
        return replace(
            job, max_tasks=most, speed=table, predicted_s=left_s * error_of(job.job_id, self.error)
        )


@cache
def _table(name: str, noise: float) -> SpeedTable:
    most = 1 if name == "ncf" else _MOST_GPUS
    return SpeedTable(
        tuple(_best_goodput(name, gpus, 1, noise) for gpus in range(1, min(most, 4) + 1)),
        tuple(_best_goodput(name, gpus, max(2, -(-gpus // 4)), noise) if gpus > 1 else 0.0
              for gpus in range(1, most + 1)),
    )  # fmt: skip


def application_of(job_id: str) -> Application:
    name = job_id.rpartition("-")[0]
    if name not in applications():
        raise ConfigError(
            f"job {job_id} is of no application of Pollux' workloads: {', '.join(applications())}"
        )
    return applications()[name]


def read_pollux(path: Path, adaptive: bool, error: float = 0.0) -> tuple[list[TraceJob], PolluxSpeed]:
    """A workload of the artifact: name,time,application,num_replicas,batch_size."""
    lines = read_lines(path)
    once(lines, (line.text("name") for line in lines), "name")
    jobs = []
    for line in lines:
        request = JobRequest(
            line.text("name"),
            1 if adaptive else line.whole("num_replicas", least=1),
            1,
            arrival_s=line.real("time"),
            checkpoint_s=RESTART_S,
            startup_s=RESTART_S,
            min_tasks=1 if adaptive else None,
            max_tasks=1 if adaptive else None,
        )
        jobs.append(TraceJob(request, application_of(line.text("name")).progress))
    return jobs, PolluxSpeed(
        adaptive, {line.text("name"): line.whole("batch_size", least=1) for line in lines}, error
    )


def is_pollux(path: Path) -> bool:
    return {"name", "time", "application", "num_replicas", "batch_size"} <= set(read_lines(path)[0].fields)
