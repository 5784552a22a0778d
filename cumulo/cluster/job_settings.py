"""JobSettings: what a job file can say, setting by setting. `JobFile` checks it; `job_check` says what is wrong."""

from dataclasses import dataclass, field
from typing import Literal

from cumulo.cluster.job_amounts import memory_mib
from cumulo.cluster.kubernetes_settings import KubernetesSettings


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
class JobSettings:
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

    @property
    def ranks(self) -> int:
        return sum(group.count for group in self.devices)

    @property
    def kind(self) -> Literal["train", "serve"]:
        return "train" if self.train is not None else "serve"
