"""What is asked for and what runs: jobs as a policy sees them. Traces, job files and drivers write them."""

from dataclasses import dataclass, replace
from typing import Literal

from cumulo.errors import ConfigError

GangShape = tuple[object, ...]
WHOLE_GPU = 1000  # shares of a GPU are counted in thousandths, as integers, so that sums are exact


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One training step of a job: what it computes, and what its tasks exchange. The collective model prices
    it."""

    compute_s: float
    all_reduce_bytes: float = 0.0  # of each GPU, over all tasks: gradients
    all_to_all_bytes: float = 0.0  # of each GPU, over all tasks: experts


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """Goodput of an elastic job in examples/s: `one_node[g - 1]` with g GPUs on one node, `many_nodes[g - 1]` on
    several. 0: this size is not possible."""

    one_node: tuple[float, ...]
    many_nodes: tuple[float, ...]

    def goodput(self, gpus: int, nodes: int) -> float:
        table = self.one_node if nodes <= 1 else self.many_nodes
        return table[gpus - 1] if 0 < gpus <= len(table) else 0.0


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A gang of equal tasks, placed all together or not at all. Resources are those of one task."""

    job_id: str
    tasks: int = 1
    gpus_per_task: int = 1
    gpu_milli: int = WHOLE_GPU  # share of the GPU; below 1000 only for tasks of one GPU
    cpu_milli: int = 0
    memory_mib: int = 0
    devices: tuple[str, ...] = ()  # accepted device names; (): any
    spread: Literal["any", "apart", "together"] = "any"  # apart: one task per node; together: all on one node
    avoid: tuple[str, ...] = ()  # nodes where it failed again and again
    tenant: str = "default"
    priority: int = 0  # higher is more urgent
    arrival_s: float = 0.0
    deadline_s: float | None = None
    predicted_s: float | None = None  # remaining duration with all tasks, as predicted; None: unknown
    min_tasks: int | None = None  # elastic range; None: rigid
    max_tasks: int | None = None
    preemptible: bool = True
    checkpoint_s: float = 0.0  # what an eviction or a move costs: writing, restarting, reading
    startup_s: float = 0.0  # before the first step of the first run
    attained_gpu_s: float = 0.0  # GPU time of its earlier runs
    step: StepProfile | None = None
    speed: SpeedTable | None = None

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.gpus_per_task < 0:
            raise ConfigError(f"job {self.job_id}: a job needs 1 or more tasks and 0 or more GPUs per task")
        if not 0 < self.gpu_milli <= WHOLE_GPU:
            raise ConfigError(
                f"job {self.job_id}: a share of a GPU is 1 to {WHOLE_GPU} thousandths, not {self.gpu_milli}"
            )
        if self.gpu_milli < WHOLE_GPU and self.gpus_per_task > 1:
            raise ConfigError(
                f"job {self.job_id}: a task with a share of a GPU has one GPU, not {self.gpus_per_task}"
            )
        if len(self.devices) > 1 and len(set(self.devices)) != len(self.devices):
            raise ConfigError(f"job {self.job_id}: {', '.join(self.devices)} names a device twice")
        if not (self.min_tasks or self.tasks) <= self.tasks <= (self.max_tasks or self.tasks):
            raise ConfigError(
                f"job {self.job_id}: {self.tasks} tasks are outside its elastic range "
                f"{self.min_tasks} to {self.max_tasks}"
            )

    @property
    def fractional(self) -> bool:
        return self.gpus_per_task == 1 and self.gpu_milli < WHOLE_GPU

    @property
    def elastic(self) -> bool:
        return self.min_tasks is not None or self.max_tasks is not None

    @property
    def gpus(self) -> float:
        """GPUs of the whole gang; a share counts as its fraction."""
        return self.tasks * self.milli_per_task / WHOLE_GPU

    @property
    def milli_per_task(self) -> int:
        return self.gpus_per_task * self.gpu_milli

    @property
    def shape(self) -> "GangShape":
        """What its gang asks for: jobs of one shape fit at the same moments, and wait for the same reason."""
        return (
            self.tasks, self.gpus_per_task, self.gpu_milli, self.cpu_milli, self.memory_mib, self.devices,
            self.spread, self.avoid,
        )  # fmt: skip

    def after_run(self, attained_gpu_s: float, predicted_s: float | None) -> "JobRequest":
        """The same job, as it waits again: with the GPU time it has had, and the seconds that are left."""
        return replace(self, attained_gpu_s=attained_gpu_s, predicted_s=predicted_s)


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where one task of a gang runs: a node and its GPUs, by number."""

    node: str
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A placed gang. `request.tasks` is what it asked for, `places` what it has."""

    request: JobRequest
    places: tuple[TaskPlace, ...]
    started_s: float = 0.0
    expected_end_s: float | None = None  # None: unknown
    restarts: int = 0

    @property
    def job_id(self) -> str:
        return self.request.job_id

    @property
    def tasks(self) -> int:
        return len(self.places)

    @property
    def gpus(self) -> float:
        return self.tasks * self.request.milli_per_task / WHOLE_GPU

    def attained_gpu_s(self, now_s: float) -> float:
        """GPU time received so far, over all its runs."""
        return self.request.attained_gpu_s + self.gpus * (now_s - self.started_s)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.node for place in self.places))
