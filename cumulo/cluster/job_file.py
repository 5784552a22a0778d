"""JobFile: what `cumulo launch` is told: what to run, on how many of which devices, and what to do when it fails.

    job = read_job(Path("examples/job-train.yaml"))
    job.ranks           # 2
    job.request("tiny-1", arrival_s=0.0)    # as a policy sees it

The same file runs on this machine, Ray, Slurm and Kubernetes. Every setting is documented where it is defined.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from cumulo.base.strict import build
from cumulo.base.yaml_text import load_yaml, yaml_problem
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.job_amounts import memory_mib, seconds
from cumulo.cluster.job_check import JobFileError, in_file, launch_problems, problems
from cumulo.cluster.kubernetes_settings import KubernetesSettings
from cumulo.errors import ConfigError

_ROOT = "the job"


@dataclass(frozen=True, slots=True)
class TrainWork:
    """A run of `cumulo train`."""

    config: str | None = None  # a training configuration
    plan: str | None = None  # instead: what `cumulo plan train --out` wrote
    folder: str | None = None  # of the run; a run that is in it is resumed. None: a new one of the job's own
    options: tuple[str, ...] = ()  # further options of `cumulo train`, as typed: [--set, steps=40]

    @property
    def source(self) -> str | None:
        return self.config or self.plan


@dataclass(frozen=True, slots=True)
class ReplicaScaling:
    """What the autoscaling rule must know of a replica (`cumulo simulate autoscale` rehearses it with the same)."""

    prompt_tok_s: float  # prompt tokens/s that a replica computes within the SLO
    output_tok_s: float  # output tokens/s
    start_up_s: float = 60.0  # from the order of a replica to its first token
    ttft_s: float | None = 2.0  # the SLO
    itl_s: float | None = None
    interval_s: float = 10.0  # between two looks
    cooldown_s: float | None = None  # before a replica is removed; None: two or ten times its start-up
    idle_s: float = 300.0  # without a request, before the last replica goes, where min_replicas is 0


@dataclass(frozen=True, slots=True)
class ServeWork:
    """Replicas of `cumulo serve` behind one address."""

    model: str | None = None  # a folder, a GGUF file or a Hugging Face name; None: the built-in model
    plan: str | None = None  # what `cumulo plan serve --out` wrote
    port: int = 8000  # 0: any free one
    replicas: int = 1  # at the start
    min_replicas: int | None = None  # with max_replicas and autoscale: the rule chooses between them
    max_replicas: int | None = None
    autoscale: ReplicaScaling | None = None
    options: tuple[str, ...] = ()  # further options of `cumulo serve`, as typed


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of one kind; a heterogeneous job lists several groups."""

    count: int = 1  # in all; a device has one rank
    kind: str = "cpu"  # cpu: cores; gpu: any GPU; or the name of a GPU, such as h200
    per_node: int | None = None  # this many on each node; None: wherever they fit
    memory: str | None = None  # of the host, for each device: 8GiB

    @property
    def on_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def each(self) -> int:
        """Devices of one task of the gang."""
        return self.per_node or 1

    @property
    def tasks(self) -> int:
        return self.count // self.each

    @property
    def memory_mib(self) -> int:
        return memory_mib(self.memory) if self.memory else 0


@dataclass(frozen=True, slots=True)
class ElasticRange:
    """With how many devices the job makes sense; the policy chooses."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class RestartRule:
    most: int = 3  # restarts after failures; then the job has failed
    # What a policy may do with a gang that lost a node: replace it with a spare one, shrink to the nodes that are
    # left, wait for as many as before. The cheapest is taken.
    ways: tuple[Literal["spare", "shrink", "wait"], ...] = ("spare", "shrink", "wait")


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """What only Slurm has words for."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclusive: bool = False
    options: tuple[str, ...] = ()  # further lines of #SBATCH, as typed: ["--constraint=ib"]


@dataclass(frozen=True, slots=True)
class RaySettings:
    address: str | None = None  # of the head, HOST:PORT; None: the cluster of this machine
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None  # None: by per_node


@dataclass(frozen=True, slots=True)
class JobFile:
    name: str
    train: TrainWork | None = None
    serve: ServeWork | None = None
    devices: tuple[DeviceGroup, ...] = (DeviceGroup(),)
    priority: int = 0  # higher is more urgent
    tenant: str = "default"
    deadline: str | None = None  # from the submission: 90s, 30min, 2h, 1d
    time_limit: str | None = None  # of a run; it saves a checkpoint before, and is queued again
    save_before: str = "60s"  # how long before the time limit the job is asked to save
    elastic: ElasticRange | None = None  # None: always all devices
    restart: RestartRule = field(default_factory=RestartRule)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    ray: RaySettings = field(default_factory=RaySettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)

    def __post_init__(self) -> None:
        if found := list(problems(self)):
            raise JobFileError(found)

    @property
    def ranks(self) -> int:
        return sum(group.count for group in self.devices)

    @property
    def kind(self) -> Literal["train", "serve"]:
        return "train" if self.train is not None else "serve"

    def request(self, job_id: str, arrival_s: float, predicted_s: float | None = None) -> JobRequest:
        """The gang that a policy places. A task is what must be on one node."""
        group = self.devices[0]
        if len(self.devices) > 1:
            raise ConfigError(
                f"{self.name} asks for {len(self.devices)} kinds of devices, and Cumulo's own policies place "
                "gangs of one kind: launch it --on slurm"
            )
        elastic = self.elastic
        return JobRequest(
            job_id,
            tasks=group.tasks,
            gpus_per_task=0 if group.on_cpu else group.each,
            cpu_milli=1000 * group.each if group.on_cpu else 0,
            memory_mib=group.memory_mib * group.each,
            devices=() if group.kind in ("cpu", "gpu") else (group.kind,),
            tenant=self.tenant,
            priority=self.priority,
            arrival_s=arrival_s,
            deadline_s=None if self.deadline is None else arrival_s + seconds(self.deadline, "deadline"),
            predicted_s=predicted_s,
            min_tasks=None if elastic is None else elastic.min // group.each,
            max_tasks=None if elastic is None else elastic.max // group.each,
        )


def read_job(path: Path) -> JobFile:
    try:
        text = path.read_text("utf-8")
        content = load_yaml(text)
    except OSError as error:
        raise ConfigError(f"cannot read the job file {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {yaml_problem(error)}") from error
    try:
        job = build(JobFile, content, _ROOT)
        check_names(job)
        return resolved(job, path.resolve().parent)
    except ConfigError as error:
        raise in_file(error, str(path), text, _ROOT) from None


def check_names(job: JobFile) -> None:
    """Refuses names and amounts that cannot be meant. A job that is stored already is read without it."""
    if found := list(launch_problems(job)):
        raise JobFileError(found)


def job_from(content: Any, where: str = _ROOT) -> JobFile:
    try:
        return build(JobFile, content, where)
    except ConfigError as error:
        text = str(error)
        raise error if where in text else ConfigError(f"{where}: {text}") from None


def resolved(job: JobFile, folder: Path) -> JobFile:
    """Paths relative to the job file become absolute, so that the job runs anywhere; missing ones are named."""

    def found(setting: str, name: str | None, must: bool = True) -> str | None:
        if name is None or (not must and not (folder / name).exists()):
            return name
        if not (path := folder / name).exists():
            raise JobFileError([(setting, f"{job.name}: there is no {path}, which {setting} names")])
        if must and not path.is_file():
            text = f"{job.name}: {path} is a folder, and the job file needs a file there"
            raise JobFileError([(setting, text)])
        return str(path.resolve())

    train, serve = job.train, job.serve
    if train is not None:
        train = dataclasses.replace(
            train,
            config=found("train.config", train.config),
            plan=found("train.plan", train.plan),
            folder=None if train.folder is None else str((folder / train.folder).resolve()),
        )
    if serve is not None:
        plan, model = found("serve.plan", serve.plan), found("serve.model", serve.model, must=False)
        serve = dataclasses.replace(serve, plan=plan, model=model)
    return dataclasses.replace(job, train=train, serve=serve)


def plain_job(job: JobFile) -> dict[str, Any]:
    """A table that `job_from` reads back, without what is as usual."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            kept = {}
            for one in dataclasses.fields(value):
                usual = (
                    one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
                )
                if (content := getattr(value, one.name)) != usual:
                    kept[one.name] = plain(content)
            return kept
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    table = plain(job)
    assert isinstance(table, dict)
    for work in ("train", "serve"):
        if getattr(job, work) is not None:
            table.setdefault(work, {})
    return table
