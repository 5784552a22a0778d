"""KubernetesSettings: what only Kubernetes has words for, in a job file under `kubernetes:`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


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
