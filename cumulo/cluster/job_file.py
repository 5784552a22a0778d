"""JobFile: what `cumulo launch` is told: what to run, on how many of which devices, and what to do when it fails.

    job = read_job(Path("examples/job-train.yaml"))
    job.ranks           # 2
    job.request("tiny-1", arrival_s=0.0)    # as a policy sees it

The same file runs on this machine, Ray, Slurm and Kubernetes. Every setting is documented where it is defined.
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from cumulo.base.strict import build
from cumulo.base.yaml_text import load_yaml, yaml_problem
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.kubernetes_settings import KubernetesSettings
from cumulo.errors import ConfigError

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")  # a name that Slurm, Ray and Kubernetes all take
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")
_TENANT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # as the value of a label
_SLURM_WORD = re.compile(r"[A-Za-z0-9_.,+-]+")
_RAY_ADDRESS = re.compile(r"(ray://)?([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\]):(\d{1,5})")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


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
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))

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
        content = load_yaml(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the job file {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {yaml_problem(error)}") from error
    return resolved(job_from(content, str(path)), path.resolve().parent)


def job_from(content: Any, where: str = "the job") -> JobFile:
    try:
        return build(JobFile, content, where)
    except ConfigError as error:
        text = str(error)
        raise error if where in text else ConfigError(f"{where}: {text}") from None


def resolved(job: JobFile, folder: Path) -> JobFile:
    """Paths relative to the job file become absolute, so that the job runs anywhere; missing ones are named."""

    def found(name: str | None, must: bool) -> str | None:
        if name is None or (not must and not (folder / name).exists()):
            return name
        if not (path := folder / name).exists():
            raise ConfigError(f"{job.name}: there is no {path}, which the job file names")
        if must and not path.is_file():
            raise ConfigError(f"{job.name}: {path} is a folder, and the job file needs a file there")
        return str(path.resolve())

    train, serve = job.train, job.serve
    if train is not None:
        train = dataclasses.replace(
            train,
            config=found(train.config, True),
            plan=found(train.plan, True),
            folder=None if train.folder is None else str((folder / train.folder).resolve()),
        )
    if serve is not None:
        serve = dataclasses.replace(serve, plan=found(serve.plan, True), model=found(serve.model, False))
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


def seconds(text: str, what: str) -> float:
    """`seconds("30min", "deadline")` is 1800.0."""
    if (match := _DURATION.fullmatch(str(text).strip())) is None:
        raise ConfigError(f"{what} must be a time such as 90s, 30min, 2h or 1d, got {text!r}")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def memory_mib(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB)", text.strip())
    if match is None:
        raise ConfigError(f"devices.memory must be a size such as 512MiB or 8GiB, got {text!r}")
    return int(float(match[1]) * {"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20}[match[2]])


def _problems(job: JobFile) -> Iterator[str]:
    if not _NAME.fullmatch(job.name):
        yield (
            f"name must be lower-case letters, digits and hyphens, at most 42, such as tiny-lm; got {job.name!r}"
        )
    if (job.train is None) == (job.serve is None):
        given = "both" if job.train is not None else "neither"
        yield f"a job has either `train:` or `serve:`, and this one has {given}"
    if job.train is not None and (job.train.config is None) == (job.train.plan is None):
        yield "train needs `config:`, a training configuration, or `plan:`, what `cumulo plan train --out` wrote"
    if job.serve is not None:
        yield from _serve_problems(job.serve)
    if not job.devices:
        yield "devices must name at least one group, such as {count: 8, kind: h200}"
    for group in job.devices:
        yield from _device_problems(group)
    if job.elastic is not None and not 1 <= job.elastic.min <= job.ranks <= job.elastic.max:
        yield f"elastic must contain devices.count {job.ranks}: got {job.elastic.min} to {job.elastic.max}"
    if job.elastic is not None and len(job.devices) > 1:
        yield "elastic is for jobs with one kind of devices"
    if job.restart.most < 0:
        yield f"restart.most must be 0 or more, got {job.restart.most}"
    for name in ("deadline", "time_limit", "save_before"):
        if (text := getattr(job, name)) is not None:
            try:
                seconds(text, name)
            except ConfigError as error:
                yield str(error)
                return
    if job.time_limit is not None:
        limit_s, before_s = seconds(job.time_limit, "time_limit"), seconds(job.save_before, "save_before")
        if limit_s <= before_s:
            yield f"time_limit {job.time_limit} must be longer than save_before, {job.save_before}"
    if not _TENANT.fullmatch(job.tenant):
        yield f"tenant must be letters, digits, '-', '_' and '.', at most 63, got {job.tenant!r}"
    yield from _target_problems(job)


def _target_problems(job: JobFile) -> Iterator[str]:
    for name in ("partition", "account", "qos"):
        word = getattr(job.slurm, name)
        if word is not None and not _SLURM_WORD.fullmatch(word):
            yield f"slurm.{name} must be letters, digits, '-', '_', '.', '+' and ',', got {word!r}"
    address = job.ray.address
    if address not in (None, "auto", "local") and not _RAY_ADDRESS.fullmatch(str(address)):
        yield f"ray.address must be HOST:PORT, such as 10.0.0.7:6379, got {address!r}"
    for work in (job.train, job.serve):
        for option in work.options if work is not None else ():
            if option.startswith("--") and " " in option and "=" not in option:
                first, _, rest = option.partition(" ")
                yield f"options is a list of words: write [{first}, {rest!r}] instead of {option!r}"


def _serve_problems(serve: ServeWork) -> Iterator[str]:
    low = serve.replicas if serve.min_replicas is None else serve.min_replicas
    high = serve.replicas if serve.max_replicas is None else serve.max_replicas
    if not 0 <= low <= serve.replicas <= high or high < 1:
        yield f"serve.replicas {serve.replicas} must be between min_replicas {low} and max_replicas {high}"
    if not 0 <= serve.port < 65536:
        yield f"serve.port must be 0 to 65535, got {serve.port}"
    if serve.model is not None and serve.plan is not None:
        yield "serve needs `model:` or `plan:`, not both"


def _device_problems(group: DeviceGroup) -> Iterator[str]:
    if group.count < 1:
        yield f"devices.count must be 1 or more, got {group.count}"
    if group.per_node is not None and (group.per_node < 1 or group.count % group.per_node):
        yield f"devices.count {group.count} is not a multiple of per_node {group.per_node}"
    if group.memory is not None:
        try:
            memory_mib(group.memory)
        except ConfigError as error:
            yield str(error)
