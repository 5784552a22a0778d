"""A team's manifests, broken one thing at a time. They were written without a look at the checks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cluster.drivers.kubernetes.check import check_bodies
from tests.cluster.broken_manifests import GONE, Break, broken

FILE = Path(__file__).parent / "blind_manifests.yaml"
WHOLE = list(yaml.safe_load_all(FILE.read_text("utf-8")))
POD = "spec.template.spec"
C = f"{POD}.containers.0"
RAY_WORKER = "spec.rayClusterSpec.workerGroupSpecs.0"
LWS = "spec.leaderWorkerTemplate"


def _one(kind: str, name: str) -> Any:
    return next(one for one in WHOLE if (one["kind"], one["metadata"]["name"]) == (kind, name))["spec"]


SERVER = _one("Deployment", "transcribe")["template"]["spec"]["containers"][0]
VOLUMES = _one("Deployment", "transcribe")["template"]["spec"]["volumes"]
TASK = _one("Job", "finetune")["tasks"][0]
GROUP = _one("RayJob", "embed")["rayClusterSpec"]["workerGroupSpecs"][0]
# What is broken: kind and name, field, its new value; the field that is blamed, with words of the message.
BROKEN: list[Break] = [
    # Quantities
    (
        "Deployment/transcribe",
        f"{C}.resources.requests.memory",
        "8 Gi",
        f"{C}.resources.requests.memory",
        "8Gi",
    ),
    ("Deployment/transcribe", f"{C}.resources.limits.memory", "24GB", f"{C}.resources.limits.memory", "24G"),
    ("Deployment/transcribe", f"{C}.resources.requests.cpu", "500mm", f"{C}.resources.requests.cpu", "500m"),
    (
        "Deployment/transcribe",
        f"{C}.resources.requests.memory",
        "32Gi",
        f"{C}.resources.requests.memory",
        "24Gi",
    ),
    ("Job/whisper-train", f"{C}.resources.requests.nvidia.com/gpu", 4, f"{C}.resources", "8"),
    ("Job/whisper-train", f"{C}.resources.limits.nvidia.com/gpu", "0.5", f"{C}.resources.limits", "whole"),
    (
        "Deployment/transcribe",
        f"{POD}.volumes.0.emptyDir.sizeLimit",
        "20 GiB",
        f"{POD}.volumes.0.emptyDir.sizeLimit",
        "20Gi",
    ),
    (
        "PersistentVolumeClaim/corpora",
        "spec.resources.requests.storage",
        "-5Gi",
        "spec.resources.requests.storage",
        "-5Gi",
    ),
    # Impossible resources
    ("Job/whisper-train", f"{C}.resources.limits.nvidia.com/gpu", 16, f"{C}.resources", "16"),
    (
        "RayJob/embed",
        f"{RAY_WORKER}.template.spec.containers.0.resources.limits.nvidia.com/gpu",
        12,
        f"{RAY_WORKER}.template.spec.containers.0.resources.limits",
        "12",
    ),
    ("Job/finetune", "spec.tasks.0.replicas", 4, "spec.queue", "asks for 32"),
    ("Job/finetune", "spec.minAvailable", 3, "spec.minAvailable", "2"),
    # Queues, names and references
    (
        "Job/whisper-train",
        "metadata.labels.kueue.x-k8s.io/queue-name",
        "speech",
        "metadata.labels",
        "speech-queue",
    ),
    ("Job/finetune", "spec.queue", "nightlies", "spec.queue", "nightly"),
    ("LocalQueue/speech-queue", "spec.clusterQueue", "all-gpu", "spec.clusterQueue", "all-gpus"),
    (
        "ClusterQueue/all-gpus",
        "spec.resourceGroups.0.flavors.0.name",
        "h100",
        "spec.resourceGroups.0.flavors.0.name",
        "h200",
    ),
    (
        "ClusterQueue/all-gpus",
        "spec.resourceGroups.0.flavors.0.resources.2.name",
        "nvidia.com/gpus",
        "spec.resourceGroups.0.flavors.0.resources",
        "nvidia.com/gpu",
    ),
    (
        "Job/whisper-train",
        f"{POD}.volumes.1.configMap.name",
        "whisper-cfg",
        f"{POD}.volumes.1.configMap.name",
        "whisper-config",
    ),
    ("Job/whisper-train", f"{POD}.serviceAccountName", "trainers", f"{POD}.serviceAccountName", "trainer"),
    (
        "Job/whisper-train",
        f"{POD}.imagePullSecrets.0.name",
        "registry",
        f"{POD}.imagePullSecrets.0",
        "registry-key",
    ),
    ("Job/whisper-train", f"{C}.volumeMounts.0.name", "corpus", f"{C}.volumeMounts.0.name", "corpora"),
    ("RoleBinding/trainer-reads", "roleRef.name", "pods-reader", "roleRef", "pod-reader"),
    ("RoleBinding/trainer-reads", "subjects.0.name", "trainr", "subjects.0", "trainer"),
    # Wrong API versions
    (
        "HorizontalPodAutoscaler/transcribe",
        "apiVersion",
        "autoscaling/v2beta2",
        "apiVersion",
        "autoscaling/v2",
    ),
    ("Ingress/transcribe", "apiVersion", "extensions/v1beta1", "apiVersion", "networking.k8s.io/v1"),
    ("PodDisruptionBudget/transcribe", "apiVersion", "policy/v1beta1", "apiVersion", "policy/v1"),
    ("Deployment/transcribe", "apiVersion", "v1", "apiVersion", "apps/v1"),
    ("RayJob/embed", "apiVersion", "ray.io/v1alpha2", "apiVersion", "ray.io/v1"),
    # Selectors that match nothing
    ("Service/transcribe", "spec.selector.app", "transcriber", "spec.selector", "transcribe"),
    (
        "Deployment/transcribe",
        "spec.template.metadata.labels.app",
        "transcriber",
        "spec.selector.matchLabels",
        "transcribe",
    ),
    ("ServiceMonitor/transcribe", "spec.selector.matchLabels.app", "speech", "spec.selector", "speech"),
    ("PodDisruptionBudget/transcribe", "spec.selector.matchLabels.app", "speech", "spec.selector", "speech"),
    ("ServiceMonitor/transcribe", "spec.endpoints.0.port", "metric", "spec.endpoints.0.port", "metrics"),
    (
        "Ingress/transcribe",
        "spec.rules.0.http.paths.0.backend.service.port.name",
        "http",
        "spec.rules.0.http.paths.0.backend.service.port",
        "web",
    ),
    # Ports and probes
    ("Deployment/transcribe", f"{C}.ports.0.containerPort", 90000, f"{C}.ports.0.containerPort", "65535"),
    ("Service/transcribe", "spec.ports.0.port", 0, "spec.ports.0.port", "65535"),
    ("Service/transcribe", "spec.ports.0.targetPort", "https", "spec.ports.0.targetPort", "http"),
    ("Service/transcribe", "spec.ports.1.name", "web", "spec.ports.1.name", "web"),
    (
        "Deployment/transcribe",
        f"{C}.livenessProbe.httpGet.port",
        9100,
        f"{C}.livenessProbe.httpGet.port",
        "9000",
    ),
    (
        "Deployment/transcribe",
        f"{C}.startupProbe.httpGet.port",
        "htp",
        f"{C}.startupProbe.httpGet.port",
        "http",
    ),
    (
        "Deployment/transcribe",
        f"{C}.readinessProbe.periodSeconds",
        "5s",
        f"{C}.readinessProbe.periodSeconds",
        "5",
    ),
    # Fields and types
    ("Deployment/transcribe", "spec.replicas", "three", "spec.replicas", "number"),
    (
        "Deployment/transcribe",
        f"{POD}.terminationGracePeriodSeconds",
        -1,
        f"{POD}.terminationGracePeriodSeconds",
        "-1",
    ),
    ("Job/whisper-train", f"{POD}.restartPolicy", "Always", f"{POD}.restartPolicy", "Never"),
    ("Job/whisper-train", f"{C}.command", "torchrun train.py", f"{C}.command", "list"),
    ("Job/whisper-train", f"{C}.env.0.value", "0", f"{C}.env.0", "valueFrom"),
    ("LeaderWorkerSet/translate", f"{LWS}.size", 0, f"{LWS}.size", "1"),
    (
        "LeaderWorkerSet/translate",
        f"{LWS}.restartPolicy",
        "RecreateGroup",
        f"{LWS}.restartPolicy",
        "RecreateGroupOnPodRestart",
    ),
    ("LeaderWorkerSet/translate", f"{LWS}.workerTemplate", GONE, LWS, "workerTemplate"),
    ("RayJob/embed", f"{RAY_WORKER}.minReplicas", 3, RAY_WORKER, "3"),
    ("RayJob/embed", f"{RAY_WORKER}.groupname", "gpus", f"{RAY_WORKER}.groupname", "groupName"),
    ("RayJob/embed", "spec.entrypoint", GONE, "spec", "entrypoint"),
    ("HorizontalPodAutoscaler/transcribe", "spec.minReplicas", 10, "spec.minReplicas", "9"),
    ("PodDisruptionBudget/transcribe", "spec.maxUnavailable", 1, "spec", "minAvailable"),
    ("Deployment/transcribe", "metadata.name", "Transcribe_v2", "metadata.name", "lower"),
    ("Deployment/transcribe", "metadata.labels.app", "my app!", "metadata.labels.app", "my app!"),
    (
        "Deployment/transcribe",
        f"{POD}.tolerations.0.effect",
        "NoScheduling",
        f"{POD}.tolerations.0.effect",
        "NoSchedule",
    ),
    ("Deployment/transcribe", f"{C}.image", "registry.example/transcribe: 1.4", f"{C}.image", "1.4"),
    # Written after the ones above, and before the rules for them
    ("Deployment/transcribe", f"{POD}.containers", [SERVER, SERVER], f"{POD}.containers.1", "server"),
    ("Deployment/transcribe", f"{POD}.volumes", VOLUMES + VOLUMES, f"{POD}.volumes.1", "cache"),
    (
        "Deployment/transcribe",
        f"{C}.volumeMounts",
        [{"name": "cache", "mountPath": "/cache"}, {"name": "cache", "mountPath": "/cache", "subPath": "x"}],
        f"{C}.volumeMounts.1",
        "/cache",
    ),
    ("Deployment/transcribe", f"{C}.ports.1.name", "http", f"{C}.ports.1", "http"),
    ("Deployment/transcribe", f"{C}.ports.1.name", "Metrics_Port", f"{C}.ports.1.name", "Metrics_Port"),
    ("Deployment/transcribe", f"{C}.ports.1.protocol", "HTTP", f"{C}.ports.1.protocol", "TCP"),
    ("Service/transcribe", "spec.ports.1.port", 80, "spec.ports.1", "80"),
    ("Service/transcribe", "spec.type", "Loadbalancer", "spec.type", "LoadBalancer"),
    ("Service/transcribe", "spec.ports.1.name", GONE, "spec.ports.1", "name"),
    ("Service/transcribe", "spec.ports.0.nodePort", 8080, "spec.ports.0.nodePort", "30000"),
    ("Job/finetune", "spec.tasks", [TASK, TASK], "spec.tasks.1", "rank"),
    (
        "RayJob/embed",
        "spec.rayClusterSpec.workerGroupSpecs",
        [GROUP, GROUP],
        "spec.rayClusterSpec.workerGroupSpecs.1",
        "gpus",
    ),
    (
        "ClusterQueue/all-gpus",
        "spec.resourceGroups.0.coveredResources",
        ["cpu", "memory"],
        "spec.resourceGroups.0",
        "nvidia.com/gpu",
    ),
    (
        "ClusterQueue/all-gpus",
        "spec.resourceGroups.0.flavors.0.resources.2.nominalQuota",
        "32 GPUs",
        "spec.resourceGroups.0.flavors.0.resources.2.nominalQuota",
        "32 GPUs",
    ),
    (
        "ClusterQueue/all-gpus",
        "spec.resourceGroups.0.flavors.0.resources.2.nominalQuota",
        -4,
        "spec.resourceGroups.0.flavors.0.resources.2.nominalQuota",
        "-4",
    ),
    ("Job/whisper-train", "spec.parallelism", 5, "metadata.labels", "32"),
    ("Job/whisper-train", "spec.completionMode", "indexed", "spec.completionMode", "Indexed"),
    ("Job/whisper-train", "spec.backoffLimit", -1, "spec.backoffLimit", "-1"),
    ("Job/whisper-train", f"{C}.resources.limits.nvidia.com/gpu", "8Gi", f"{C}.resources.limits", "8Gi"),
    (
        "Job/whisper-train",
        f"{C}.env.0.valueFrom.fieldRef.fieldPath",
        "metadata.podName",
        f"{C}.env.0.valueFrom.fieldRef.fieldPath",
        "metadata.name",
    ),
    ("Job/whisper-train", f"{POD}.priorityClassName", "urgent", f"{POD}.priorityClassName", "urgent"),
    ("Job/whisper-train", f"{POD}.nodeSelector", {"gpu": 8}, f"{POD}.nodeSelector.gpu", "string"),
    ("Job/finetune", "spec.policies.0.action", "Restart", "spec.policies.0.action", "RestartPod"),
    ("Job/finetune", "spec.policies.0.event", "PodFail", "spec.policies.0.event", "PodFailed"),
    ("Job/finetune", "spec.plugins", {"mpi2": []}, "spec.plugins", "mpi2"),
    (
        "HorizontalPodAutoscaler/transcribe",
        "spec.scaleTargetRef.name",
        "transcriber",
        "spec.scaleTargetRef",
        "transcribe",
    ),
    (
        "HorizontalPodAutoscaler/transcribe",
        "spec.scaleTargetRef.apiVersion",
        "v1",
        "spec.scaleTargetRef.apiVersion",
        "apps/v1",
    ),
    (
        "HorizontalPodAutoscaler/transcribe",
        "spec.metrics.0.resource.target.averageUtilization",
        0,
        "spec.metrics.0.resource.target.averageUtilization",
        "0",
    ),
    ("Ingress/transcribe", "spec.rules.0.host", "http://speech.example.com", "spec.rules.0.host", "http://"),
    (
        "Ingress/transcribe",
        "spec.rules.0.http.paths.0.pathType",
        "prefix",
        "spec.rules.0.http.paths.0.pathType",
        "Prefix",
    ),
    ("Ingress/transcribe", "spec.rules.0.http.paths.0.path", "v1", "spec.rules.0.http.paths.0.path", "/"),
    ("ServiceMonitor/transcribe", "spec.endpoints.0.interval", "15", "spec.endpoints.0.interval", "15"),
    ("RoleBinding/trainer-reads", "roleRef.kind", "Roles", "roleRef.kind", "Role"),
    ("Namespace/speech", "metadata.name", "Speech", "metadata.name", "lower"),
    ("LeaderWorkerSet/translate", "spec.replicas", -1, "spec.replicas", "0"),
    (
        "PersistentVolumeClaim/corpora",
        "spec.accessModes",
        ["ReadWriteAll"],
        "spec.accessModes.0",
        "ReadWriteMany",
    ),
]


def named(objects: list[Any], blamed: str, words: str) -> list[tuple[str, str]] | None:
    """None: the problem is named at its field; else all that is said."""
    shown = [(one.path.replace("[", ".").replace("]", ""), one.message) for one in check_bodies(objects)]
    hit = any(at.startswith(blamed) and words in f"{at} {message}" for at, message in shown)
    return None if hit else shown


def test_whole_manifests_have_no_problem() -> None:
    assert check_bodies(WHOLE) == []


def test_each_break_is_named_at_its_field() -> None:
    unnamed = []
    for subject, path, value, blamed, words in BROKEN:
        said = named(broken(WHOLE, subject, path, value), blamed, words)
        if said is not None:
            unnamed.append((subject, path, said))
    assert unnamed == [] and len(BROKEN) == 94


def serving(command: list[str], gpus: int, **more: Any) -> list[str]:
    """What is said of a Deployment of `cumulo serve`."""
    pod = copy.deepcopy(_one("Deployment", "transcribe")["template"])
    (one,) = pod["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        one[name]["httpGet"]["path"] = "/ready"
    one |= {"command": [*command, "--port", "9000"], "args": []} | more
    one["resources"]["limits"]["nvidia.com/gpu"] = gpus
    body = copy.deepcopy(next(one for one in WHOLE if one["kind"] == "Deployment"))
    body["spec"]["template"] = pod
    rest = [one for one in WHOLE if one["kind"] != "Deployment"]
    return [f"{one.path}: {one.message}" for one in check_bodies([*rest, body])]


@pytest.mark.parametrize(
    ("words", "gpus", "told"),
    (
        ("cumulo serve m --tp 4", 4, ""),
        ("cumulo serve m --dp 4 --ep 4", 4, ""),
        ("cumulo serve m --dp 4 --ep 4", 2, "need 4 GPUs, and the pod asks for 2"),
        ("cumulo serve m --rank-of lead:9100 --rank-count 8", 8, ""),
        ("cumulo serve m --rank-of lead:9100", 8, "starts 1 rank of the engine and asks for 8 GPUs"),
        ("cumulo serve m --tp 4 --pp 2 --remote-ranks 2 --rank-address a:1", 4, "use --remote-ranks 4"),
        ("python -m cumulo serve m --tp four", 4, "--tp must be a number of 1 or more"),
    ),
)
def test_a_pod_of_ours_starts_as_many_ranks_as_it_asks_gpus_for(words: str, gpus: int, told: str) -> None:
    found = serving(words.split(), gpus)
    assert (told == "" and found == []) or (told and any(told in one for one in found)), found


def test_a_probe_asks_for_what_our_server_answers() -> None:
    wrong = SERVER["livenessProbe"]  # /healthz
    found = serving(["cumulo", "serve", "m"], 1, livenessProbe=wrong)
    assert found == [
        "spec.template.spec.containers[0].livenessProbe.httpGet.path: cumulo serve does not answer /healthz; use "
        "/ready for readiness and start-up, /health for liveness"
    ]
