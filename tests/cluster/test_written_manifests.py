"""Manifests that Cumulo writes, with one thing changed: programs, gangs, queues, autoscalers and Ray's groups that
no longer fit together are named at their field.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from cumulo.cluster.drivers.kubernetes.check import check_bodies
from cumulo.cluster.drivers.kubernetes.manifests import assumed, job_manifests
from cumulo.cluster.job_file import JobFile, job_from
from tests.cli.conftest import ROOT
from tests.cluster.broken_manifests import GONE, broken, plain, steps_to

CONFIG = str(ROOT / "examples" / "train-tiny.yaml")
SERVE: dict[str, Any] = {"model": "org/model", "replicas": 2, "min_replicas": 1, "max_replicas": 6}
TRAIN: dict[str, Any] = {"config": CONFIG, "options": ["--set", "layout.dp=16"]}
SCALE = {"prompt_tok_s": 400, "output_tok_s": 60, "start_up_s": 20, "ttft_s": 2.0}
GPUS_16 = {"count": 16, "kind": "gpu", "per_node": 8}
POD = "spec.template.spec"
C = f"{POD}.containers.0"
GROUP = "spec.leaderWorkerTemplate"
LEADER, WORKER = (f"{GROUP}.{name}Template.spec.containers.0" for name in ("leader", "worker"))
TASK = "spec.tasks.0.template.spec.containers.0"
RAY = "spec.rayClusterConfig"
KUEUE_LEVEL = "kueue.x-k8s.io/podset-preferred-topology"
QUOTA = "spec.resourceGroups.0.flavors.0.resources"
ASKED = "spec.triggers.0.metadata"
BEHAVIOR = "spec.advanced.horizontalPodAutoscalerConfig.behavior.scaleUp"


def job(name: str, work: str, content: dict[str, Any], devices: dict[str, Any], **settings: Any) -> JobFile:
    return job_from({"name": name, work: content, "devices": devices, "kubernetes": settings})


JOBS = {
    "serve": job(
        "llm", "serve", SERVE | {"options": ["--tp", "4"]}, {"count": 8, "kind": "gpu"},
        scheduler="kueue", quota=24, leafs=["a", "b"], inference_pool=True, queue="research",
        node_labels={"nvidia.com/gpu.product": "NVIDIA-H200"},
    ),
    "wide": job(
        "big", "serve", SERVE | {"options": ["--tp", "8", "--pp", "2"]}, {"count": 32, "kind": "gpu"},
        scheduler="volcano", quota=64, leafs=["a"], autoscaler="hpa", queue="research",
    ),
    "ray": job("rays", "serve", SERVE | {"options": ["--tp", "4"]}, {"count": 8, "kind": "gpu"}, scheduler="ray"),
    "ray-train": job("rayt", "train", TRAIN, GPUS_16, scheduler="ray"),
    "kueue": job("ktrain", "train", TRAIN, GPUS_16, scheduler="kueue", quota=32, leafs=["a"]),
    "volcano": job("vtrain", "train", TRAIN, GPUS_16, quota=32, leafs=["a", "b"], rdma="rdma/hca"),
    "own": job(
        "own", "serve", SERVE | {"options": ["--tp", "2"], "min_replicas": 0, "autoscale": SCALE},
        {"count": 4, "kind": "gpu"}, scheduler="none", autoscaler="cumulo",
    ),
}  # fmt: skip


@functools.cache
def bodies_of(name: str) -> list[dict[str, Any]]:
    return job_manifests(JOBS[name])


def words(old: str, new: str) -> Callable[[Any], Any]:
    """A command, or a text, with another word."""
    return lambda given: (
        given.replace(old, new)
        if isinstance(given, str)
        else [new if word == old else word for word in given]
    )


def after(option: str, value: str) -> Callable[[list[str]], list[str]]:
    return lambda given: [value if at and given[at - 1] == option else word for at, word in enumerate(given)]


# Which job, object, field, its new value (or what is made of the old one), the field that is blamed, words of it.
BROKEN: list[tuple[str, str, str, Any, str, str]] = [
    ("serve", "Deployment/llm", f"{POD}.terminationGracePeriodSeconds", 30,
     f"{POD}.terminationGracePeriodSeconds", "drains for 65 s"),
    ("serve", "Deployment/llm", f"{POD}.nodeSelector.nvidia.com/gpu.product", "NVIDIA-A100",
     f"{POD}.nodeSelector.nvidia.com/gpu.product", "they have NVIDIA-H200"),
    ("serve", "Deployment/llm", f"{POD}.volumes.0.emptyDir.sizeLimit", "512Gi",
     f"{POD}.volumes.0.emptyDir.sizeLimit", "more than the memory"),
    ("serve", "Deployment/llm", f"{C}.command", words("8000", "9000"), f"{C}.command", "use --port 8000"),
    ("serve", "ClusterQueue/research-quota", f"{QUOTA}.1.nominalQuota", "100Gi",
     "metadata.labels.kueue.x-k8s.io/queue-name", "asks for 512Gi of memory"),
    ("serve", "ClusterQueue/research-quota", f"{QUOTA}.0.nominalQuota", 8,
     "metadata.labels.kueue.x-k8s.io/queue-name", "asks for 64 of cpu"),
    ("serve", "InferencePool/llm", "spec.targetPorts.0.number", 80, "spec.targetPorts.0.number", "listen on 8000"),
    ("serve", "InferencePool/llm", "spec.endpointPickerRef.port.number", 9002,
     "spec.endpointPickerRef.port.number", "its ports are 80"),
    ("serve", "PodDisruptionBudget/llm", "spec.maxUnavailable", 0, "spec.maxUnavailable", "never be drained"),
    ("serve", "PodDisruptionBudget/llm", "spec.maxUnavailable", "0%", "spec.maxUnavailable", "never be drained"),
    ("serve", "PodDisruptionBudget/llm", "spec", lambda old: {"minAvailable": 2, "selector": old["selector"]},
     "spec.minAvailable", "2 of 2 pods"),
    ("serve", "ScaledObject/llm", f"{ASKED}.query", words("waiting", "waitin"), f"{ASKED}.query", "did you mean"),
    ("serve", "ScaledObject/llm", f"{ASKED}.query", words('"})', '"}'), f"{ASKED}.query", "( is not closed"),
    ("serve", "ScaledObject/llm", f"{ASKED}.serverAddress", "prometheus:9090", f"{ASKED}.serverAddress", "http://"),
    ("serve", "ScaledObject/llm", f"{ASKED}.threshold", "four", f"{ASKED}.threshold", "a number"),
    ("serve", "ScaledObject/llm", "spec.triggers.1.name", "waiting", "spec.triggers.1.name", "its own name"),
    ("serve", "Service/llm", "spec.ports.0.name", "HTTP_main", "spec.ports.0.name", "not a port's name"),
    ("wide", "LeaderWorkerSet/big", "spec.rolloutStrategy.rollingUpdateConfiguration.maxUnavailable", 0,
     "spec.rolloutStrategy.rollingUpdateConfiguration", "both 0"),
    ("wide", "LeaderWorkerSet/big", "spec.rolloutStrategy.rollingUpdateConfiguration.maxSurge", "some",
     "spec.rolloutStrategy.rollingUpdateConfiguration.maxSurge", "percentage"),
    ("wide", "LeaderWorkerSet/big", f"{WORKER}.command", words("$(LWS_LEADER_ADDRESS):9100", "lead:9200"),
     f"{WORKER}.command", "its leader waits at 9100"),
    ("wide", "LeaderWorkerSet/big", f"{WORKER}.command",
     words("$(LWS_LEADER_ADDRESS):9100", "$(LEADER_ADDRESS):9100"), f"{WORKER}.command", "LWS_LEADER_ADDRESS"),
    ("wide", "LeaderWorkerSet/big", f"{WORKER}.command", words("org/model", "org/other"), f"{WORKER}.command",
     "its leader has org/model"),
    ("wide", "LeaderWorkerSet/big", f"{GROUP}.leaderTemplate.metadata.annotations.scheduling.k8s.io/group-name",
     "bigg", f"{GROUP}.leaderTemplate.metadata.annotations.scheduling.k8s.io/group-name", "did you mean big?"),
    ("wide", "LeaderWorkerSet/big", f"{GROUP}.workerTemplate.spec.schedulerName", "vulcano",
     f"{GROUP}.workerTemplate.spec.schedulerName", "volcano"),
    ("wide", "PodGroup/big", "spec.minMember", 10, "spec.minMember", "more than the 4 pods"),
    ("wide", "PodGroup/big", "spec.minResources", {"nvidia.com/gpu": 128}, "spec.minResources.nvidia.com/gpu",
     "64"),
    ("wide", "Queue/research", "spec.capability.nvidia.com/gpu", 8, "spec.queue", "ask for 32"),
    ("wide", "HorizontalPodAutoscaler/big", "spec.metrics.0.pods.metric.name", "cumulo:num_request_waiting",
     "spec.metrics.0.pods.metric.name", "cumulo:num_requests_waiting"),
    ("wide", "HorizontalPodAutoscaler/big", "spec.metrics.0.pods.target",
     {"type": "Utilization", "averageUtilization": 50}, "spec.metrics.0.pods.target.type", "AverageValue"),
    ("wide", "HorizontalPodAutoscaler/big", "spec.behavior.scaleDown.stabilizationWindowSeconds", 4000,
     "spec.behavior.scaleDown.stabilizationWindowSeconds", "0 to 3600"),
    ("wide", "HorizontalPodAutoscaler/big", "spec.behavior.scaleDown.policies.0.periodSeconds", 0,
     "spec.behavior.scaleDown.policies.0.periodSeconds", "1 to 1800"),
    ("wide", "HorizontalPodAutoscaler/big", "spec.metrics.0.pods.target.averageValue", "-4",
     "spec.metrics.0.pods.target.averageValue", "more than 0"),
    ("wide", "Queue/research", "spec.deserved", {"nvidia.com/gpu": 128}, "spec.deserved.nvidia.com/gpu",
     "more than capability, 64"),
    ("serve", "PodDisruptionBudget/llm", "spec.maxUnavailable", "150%", "spec.maxUnavailable", "100% or less"),
    ("serve", "Deployment/llm", f"{C}.env.0.name", "NCCL DEBUG", f"{C}.env.0.name", "not a variable's name"),
    ("serve", "Deployment/llm", "spec.selector", {"matchLabels": {}}, "spec.selector", "is empty"),
    ("kueue", "Job/ktrain", "spec.podFailurePolicy", {"rules": [{"action": "Retry"}]},
     "spec.podFailurePolicy.rules.0.action", "FailJob"),
    ("volcano", "Job/vtrain", "spec.schedulerName", "vulcano", "spec.schedulerName", "did you mean volcano?"),
    ("ray", "RayService/rays", f"{RAY}.workerGroupSpecs.0.numOfHosts", 0, f"{RAY}.workerGroupSpecs.0.numOfHosts",
     "1 or more"),
    ("ray", "RayService/rays", f"{RAY}.workerGroupSpecs.0.groupName", "workers_1",
     f"{RAY}.workerGroupSpecs.0.groupName", "pods' names"),
    ("ray", "RayService/rays", f"{RAY}.headGroupSpec.rayStartParams", {"num_gpus": "0"},
     f"{RAY}.headGroupSpec.rayStartParams.num_gpus", "num-gpus"),
    ("ray", "RayService/rays", "spec.serveConfigV2", words("gpus: 4", "gpus: 8"), "spec.serveConfigV2",
     "the largest worker has 4"),
    ("ray", "RayService/rays", "spec.serveConfigV2", words("replicas: 2", "replicas: 9"), "spec.serveConfigV2",
     "needs 36 GPUs"),
    ("ray", "RayService/rays", "spec.serveConfigV2", words("entry:front", "entry:frond"), "spec.serveConfigV2",
     "import_path must be"),
    ("ray-train", "RayJob/rayt", "spec.entrypoint", words("job.yaml", "jobs.yaml"), "spec.entrypoint",
     "did you mean job.yaml?"),
    ("kueue", "Job/ktrain", "spec.parallelism", 1, f"{C}.command", "waits for 2 nodes"),
    ("kueue", "Job/ktrain", "spec.completionMode", "NonIndexed", f"{C}.command", "completionMode: Indexed"),
    ("kueue", "Job/ktrain", f"{POD}.subdomain", "ktrian", f"{POD}.subdomain", "did you mean ktrain?"),
    ("kueue", "Job/ktrain", f"spec.template.metadata.annotations.{KUEUE_LEVEL}", "cumulo.dev/rack",
     f"spec.template.metadata.annotations.{KUEUE_LEVEL}", "no Topology here has the level"),
    ("kueue", "Job/ktrain", f"{C}.command", words("--nproc-per-node=8", "--nproc-per-node=4"), f"{C}.command",
     "the pod has 8 GPUs"),
    ("kueue", "Job/ktrain", f"{C}.command", words("--nnodes=2", "--nnodes=4"), f"{C}.command", "would never start"),
    ("kueue", "Job/ktrain", f"{C}.command", words("--master-addr=ktrain-0.ktrain", "--master-addr=ktrain-1.ktrain"),
     f"{C}.command", "the first pod is ktrain-0.ktrain"),
    ("kueue", "Job/ktrain", f"{C}.command", words("/etc/cumulo/train-tiny.yaml", "/etc/cumulo/train-tny.yaml"),
     f"{C}.command", "did you mean train-tiny.yaml?"),
    ("kueue", "Service/ktrain", "spec.clusterIP", "none", "spec.clusterIP", "None"),
    ("volcano", "Job/vtrain", "spec.plugins", {"env": []}, "spec.plugins", "must have svc"),
    ("volcano", "Job/vtrain", "spec.plugins", {"svc": []}, f"{TASK}.command", "add env to spec.plugins"),
    ("volcano", "Job/vtrain", f"{TASK}.resources.limits.rdma/hca", "1.5", f"{TASK}.resources.limits.rdma/hca",
     "whole number"),
    ("volcano", "HyperNode/spine", "spec.tier", 1, "spec.tier", "leaf-a, which is 1"),
    ("volcano", "HyperNode/spine", "spec.members.1.selector.exactMatch.name", "leaf-c",
     "spec.members.1.selector.exactMatch.name", "there is no HyperNode leaf-c"),
    ("own", "ScaledObject/own", f"{ASKED}.scalerAddress", "own-scaler.default:9091", f"{ASKED}.scalerAddress",
     "its ports are 9090"),
    ("own", "ScaledObject/own", f"{ASKED}.scalerAddress", "scaler.default:9090", f"{ASKED}.scalerAddress",
     "there is no Service scaler"),
    ("own", "ScaledObject/own", f"{ASKED}.pods", "own-pod.default:8000", f"{ASKED}.pods", "own-pods"),
    ("own", "ScaledObject/own", f"{ASKED}.rule", "0..6,interval=soon", f"{ASKED}.rule", "be a time such as"),
    ("own", "ScaledObject/own", f"{ASKED}.rule", words("0..6", "1..9"), f"{ASKED}.rule", "1 to 9 replicas"),
    ("own", "ScaledObject/own", f"{ASKED}.rule", GONE, f"{ASKED}.rule", "required and missing"),
    ("own", "ScaledObject/own", f"{BEHAVIOR}.policies.0.type", "Percentage", f"{BEHAVIOR}.policies.0.type",
     "Percent"),
    ("own", "Deployment/own-scaler", f"{C}.ports.0.containerPort", 9091, f"{C}.command", "use --port 9091"),
]  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_what_is_written_has_no_problem(name: str) -> None:
    assert check_bodies(bodies_of(name), exists=assumed(JOBS[name])) == []


def test_each_break_is_named_at_its_field() -> None:
    unnamed = []
    for name, subject, path, value, blamed, text in BROKEN:
        whole = bodies_of(name)
        if callable(value):
            kind, _, called = subject.partition("/")
            old: Any = next(one for one in whole if (one["kind"], one["metadata"]["name"]) == (kind, called))
            for step in steps_to(old, path):
                old = old[step]
            value = value(old)
            assert value != old
        told = check_bodies(broken(whole, subject, path, value), exists=assumed(JOBS[name]))
        if not any(plain(one.path) == blamed and text in one.message for one in told) or len(told) > 4:
            unnamed.append((subject, path, [str(one) for one in told]))
    assert unnamed == []


@pytest.mark.parametrize("name", ["volcano-2", "my-scheduler", "default-scheduler"])
def test_a_scheduler_of_ones_own_is_no_slip(name: str) -> None:
    bodies = broken(
        bodies_of("wide"), "LeaderWorkerSet/big", f"{GROUP}.workerTemplate.spec.schedulerName", name
    )
    assert check_bodies(bodies) == []
