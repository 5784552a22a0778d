"""JobFile: what a job file can say, setting by setting. `job_check` says what is wrong with it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cumulo.base.quantities import parse_duration_s
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.errors import ConfigError


def seconds(text: str, what: str) -> float:
    """`seconds("30min", "deadline")` is 1800.0."""
    return parse_duration_s(str(text), what, "be a time such as 90s, 30min, 2h or 1d")


def memory_mib(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB)", text.strip())
    if match is None:
        raise ConfigError(f"devices.memory must be a size such as 512MiB or 8GiB, got {text!r}")
    return int(float(match[1]) * {"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20}[match[2]])


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    image: str = "cumulo:latest"  # a container image with Cumulo
    namespace: str = "default"
    # Who admits the job: Volcano, Kueue, KubeRay with its own cluster, or Kubernetes alone (no gangs).
    scheduler: Literal["volcano", "kueue", "ray", "none"] = "volcano"
    queue: str | None = None  # of Volcano or Kueue; None: the tenant's name
    quota: int | None = None  # GPUs of the queue, which is then written too; None: the cluster has the queue
    node_gpus: int = 8
    gpu_resource: str = "nvidia.com/gpu"
    node_labels: Mapping[str, str] = field(default_factory=dict)  # nodes that the pods may use
    leaf_label: str = "cumulo.dev/leaf"  # label of a node that names its leaf switch
    leafs: tuple[str, ...] = ()  # values of that label: Volcano's HyperNodes, Kueue's Topology
    rdma: str | None = None  # resource of the RDMA devices, such as rdma/hca
    nccl: Mapping[str, str] = field(default_factory=dict)  # further variables: {NCCL_IB_GID_INDEX: "3"}
    claim: str | None = None  # PersistentVolumeClaim with models and runs, mounted at /data
    secret: str | None = (
        None  # Secret with fleet-key and hf-token; None: one is written, with values to fill in
    )
    api_keys: bool = False  # the Secret has api-keys, too, a file that `cumulo serve --new-api-key` made
    # With min_replicas and max_replicas: KEDA on Prometheus' metrics, an HPA, or KEDA with Cumulo's own rule.
    autoscaler: Literal["keda", "hpa", "cumulo"] = "keda"
    gateway: str | None = (
        None  # URL of a `cumulo gateway` before the pods, where requests wait while there is none
    )
    waiting_per_replica: int = 4  # waiting requests at which one more replica starts
    prometheus: str = "http://prometheus-operated.monitoring:9090"
    monitor: bool = True  # a ServiceMonitor for Prometheus' operator
    inference_pool: bool = False  # an InferencePool for the Gateway API
    endpoint_picker: str | None = (
        None  # of the pool, a Service as NAME or NAME:PORT; None: the gateway chooses pods
    )
    cpus_per_gpu: int = 8
    memory_per_gpu: str = "64Gi"


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
    interval_s: float = 10.0  # between two decisions
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

    @property
    def fewest(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def autoscale_rule(self) -> str:
        """The rule as `cumulo serve --autoscale` takes it; empty where nothing scales."""
        asked = self.autoscale
        if asked is None:
            return ""
        parts = [
            f"{self.fewest}..{self.most}",
            f"interval={asked.interval_s:g}s",
            f"start-up={asked.start_up_s:g}s",
        ]
        parts += [f"idle={asked.idle_s:g}s"] if self.fewest == 0 else []
        parts += [f"prompt-tok-s={asked.prompt_tok_s:.12g}", f"output-tok-s={asked.output_tok_s:.12g}"]
        for name, value in (("ttft", asked.ttft_s), ("tpot", asked.itl_s), ("cooldown", asked.cooldown_s)):
            parts += [f"{name}={value:g}s"] if value is not None else []
        return ",".join(parts)


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
    """The numbers of devices with which the job makes sense; the policy chooses."""

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
    check_nodes: bool = True  # a check of seconds before a gang starts: a node that fails it is cordoned
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    ray: RaySettings = field(default_factory=RaySettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)

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
