"""Manifests of further kinds, broken one field at a time: Gateway API, JobSet, resource claims, network policies,
probes, affinity. They were written before the rules for them."""

from pathlib import Path

import yaml

from cumulo.cluster.drivers.kubernetes.check import check_bodies
from tests.cluster.broken_manifests import GONE, Break, broken

FILE = Path(__file__).parent / "other_manifests.yaml"
WHOLE = list(yaml.safe_load_all(FILE.read_text("utf-8")))
SPEC = "spec.template.spec"
SRV = f"{SPEC}.containers.0"
AFFINITY = f"{SPEC}.affinity.nodeAffinity"
REQUIRED = f"{AFFINITY}.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms.0.matchExpressions.0"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution.0"
WORKER = "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.resources.limits"
RANKS = "spec.replicatedJobs.0.template.spec.template.spec"
# What is broken: kind and name, field, its new value; the field that is blamed, with words of the message.
BROKEN: list[Break] = [
    # NetworkPolicy
    ("NetworkPolicy/sglang", "spec.policyTypes", ["Ingress", "Outgress"], "spec.policyTypes.1", "Egress"),
    (
        "NetworkPolicy/sglang",
        "spec.ingress.0.from.1.ipBlock.cidr",
        "10.0.0.0",
        "spec.ingress.0.from.1.ipBlock.cidr",
        "10.0.0.0",
    ),
    (
        "NetworkPolicy/sglang",
        "spec.ingress.0.from.1.ipBlock.except",
        ["192.168.0.0/16"],
        "spec.ingress.0.from.1.ipBlock.except.0",
        "10.0.0.0/8",
    ),
    (
        "NetworkPolicy/sglang",
        "spec.podSelector.matchLabels",
        {"app": "sglan"},
        "spec.podSelector.matchLabels",
        "app=sglan",
    ),
    ("NetworkPolicy/sglang", "spec.ingress.0.ports.0.port", 8000, "spec.ingress.0.ports.0.port", "8000"),
    # Gateway API
    ("Gateway/front", "spec.listeners.0.protocol", "https", "spec.listeners.0.protocol", "HTTPS"),
    (
        "Gateway/front",
        "spec.listeners.0.tls.certificateRefs.0.name",
        "llm-cert",
        "spec.listeners.0.tls.certificateRefs.0",
        "llm-cert",
    ),
    ("Gateway/front", "spec.listeners.0.port", 70000, "spec.listeners.0.port", "65535"),
    ("HTTPRoute/chat", "spec.parentRefs.0.name", "fornt", "spec.parentRefs.0", "front"),
    ("HTTPRoute/chat", "spec.parentRefs.0.sectionName", "http", "spec.parentRefs.0.sectionName", "https"),
    ("HTTPRoute/chat", "spec.rules.0.backendRefs.0.port", 8080, "spec.rules.0.backendRefs.0.port", "80"),
    (
        "HTTPRoute/chat",
        "spec.rules.0.matches.0.path.type",
        "Prefix",
        "spec.rules.0.matches.0.path.type",
        "PathPrefix",
    ),
    (
        "HTTPRoute/chat",
        "spec.rules.0.backendRefs.0.name",
        "sglang-svc",
        "spec.rules.0.backendRefs.0",
        "sglang-svc",
    ),
    ("HTTPRoute/chat", "spec.hostnames", ["api.example.com"], "spec.hostnames.0", "llm.example.com"),
    # JobSet
    ("JobSet/pretrain", "spec.replicatedJobs.0.replica", 2, "spec.replicatedJobs.0.replica", "replicas"),
    ("JobSet/pretrain", "spec.successPolicy.operator", "Every", "spec.successPolicy.operator", "All"),
    (
        "JobSet/pretrain",
        "spec.successPolicy.targetReplicatedJobs",
        ["worker"],
        "spec.successPolicy.targetReplicatedJobs",
        "workers",
    ),
    ("JobSet/pretrain", f"{RANKS}.restartPolicy", "Always", f"{RANKS}.restartPolicy", "Never"),
    (
        "JobSet/pretrain",
        f"{RANKS}.containers.0.resources.limits",
        {"nvidia.com/gpu": 32},
        f"{RANKS}.containers.0.resources",
        "8",
    ),
    ("JobSet/pretrain", "metadata.labels", {"kueue.x-k8s.io/queue-name": "teams"}, "metadata.labels", "team"),
    ("JobSet/pretrain", "spec.replicatedJobs.0.replicas", 4, "metadata.labels", "128 of nvidia.com/gpu"),
    # RayJob
    (
        "RayJob/batch-infer",
        "spec.shutdownAfterJobFinish",
        True,
        "spec.shutdownAfterJobFinish",
        "shutdownAfterJobFinishes",
    ),
    (
        "RayJob/batch-infer",
        "spec.rayClusterSpec.workerGroupSpecs.0.minReplicas",
        5,
        "spec.rayClusterSpec.workerGroupSpecs.0",
        "maxReplicas",
    ),
    ("RayJob/batch-infer", "spec.submissionMode", "K8SJob", "spec.submissionMode", "K8sJobMode"),
    ("RayJob/batch-infer", f"{WORKER}.nvidia.com/gpu", "eight", WORKER, "eight"),
    # KEDA
    (
        "ScaledObject/sglang",
        "spec.triggers.0.authenticationRef.name",
        "prom-token",
        "spec.triggers.0.authenticationRef",
        "prom-auth",
    ),
    (
        "ScaledObject/sglang",
        "spec.triggers.0.metadata.threshold",
        GONE,
        "spec.triggers.0.metadata",
        "threshold",
    ),
    ("ScaledObject/sglang", "spec.triggers.0.type", "promethues", "spec.triggers.0.type", "prometheus"),
    (
        "TriggerAuthentication/prom-auth",
        "spec.secretTargetRef.0.key",
        "bearer",
        "spec.secretTargetRef.0.key",
        "token",
    ),
    # claims, storage
    ("Deployment/sglang", f"{SRV}.resources.claims.0.name", "pairs", f"{SRV}.resources.claims.0", "pair"),
    (
        "Deployment/sglang",
        f"{SPEC}.resourceClaims.0.resourceClaimTemplateName",
        "4-gpus",
        f"{SPEC}.resourceClaims.0.resourceClaimTemplateName",
        "4-gpus",
    ),
    (
        "ResourceClaimTemplate/two-gpus",
        "spec.spec.devices.constraints.0.requests",
        ["gpu"],
        "spec.spec.devices.constraints.0.requests",
        "gpus",
    ),
    (
        "ResourceClaimTemplate/two-gpus",
        "spec.spec.devices.requests.0.exactly.allocationMode",
        "Exact",
        "spec.spec.devices.requests.0.exactly.allocationMode",
        "ExactCount",
    ),
    (
        "PersistentVolumeClaim/weights",
        "spec.resources.request",
        {"storage": "1Ti"},
        "spec.resources.request",
        "requests",
    ),
    (
        "PersistentVolumeClaim/weights",
        "spec.storageClassName",
        "fast-nvm",
        "spec.storageClassName",
        "fast-nvme",
    ),
    (
        "StorageClass/fast-nvme",
        "volumeBindingMode",
        "WaitForConsumer",
        "volumeBindingMode",
        "WaitForFirstConsumer",
    ),
    # initContainers, probes
    (
        "Deployment/sglang",
        f"{SPEC}.initContainers.1.restartPolicy",
        "always",
        f"{SPEC}.initContainers.1.restartPolicy",
        "Always",
    ),
    (
        "Deployment/sglang",
        f"{SPEC}.initContainers.0.volumeMounts.0.name",
        "model",
        f"{SPEC}.initContainers.0.volumeMounts.0",
        "models",
    ),
    (
        "Deployment/sglang",
        f"{SPEC}.initContainers.0.readinessProbe",
        {"tcpSocket": {"port": 1}},
        f"{SPEC}.initContainers.0.readinessProbe",
        "init",
    ),
    ("Deployment/sglang", f"{SPEC}.initContainers.0.name", "server", f"{SRV}.name", "server"),
    (
        "Deployment/sglang",
        f"{SRV}.livenessProbe.successThreshold",
        2,
        f"{SRV}.livenessProbe.successThreshold",
        "1",
    ),
    ("Deployment/sglang", f"{SRV}.startupProbe.exec", {"command": ["true"]}, f"{SRV}.startupProbe", "one"),
    (
        "Deployment/sglang",
        f"{SRV}.startupProbe.httpGet.port",
        "web",
        f"{SRV}.startupProbe.httpGet.port",
        "http",
    ),
    (
        "Deployment/sglang",
        f"{SRV}.readinessProbe.initialDelay",
        5,
        f"{SRV}.readinessProbe.initialDelay",
        "initialDelaySeconds",
    ),
    # affinity, spread
    ("Deployment/sglang", f"{REQUIRED}.operator", "Equals", f"{REQUIRED}.operator", "In"),
    ("Deployment/sglang", f"{REQUIRED}.values", GONE, REQUIRED, "values"),
    ("Deployment/sglang", f"{AFFINITY}.{PREFERRED}.weight", 500, f"{AFFINITY}.{PREFERRED}.weight", "100"),
    (
        "Deployment/sglang",
        f"{SPEC}.affinity.podAntiAffinity.{PREFERRED}.podAffinityTerm.topologyKey",
        GONE,
        f"{SPEC}.affinity.podAntiAffinity.{PREFERRED}.podAffinityTerm",
        "topologyKey",
    ),
    (
        "Deployment/sglang",
        f"{SPEC}.topologySpreadConstraints.0.maxSkew",
        0,
        f"{SPEC}.topologySpreadConstraints.0.maxSkew",
        "1",
    ),
    (
        "Deployment/sglang",
        f"{SPEC}.topologySpreadConstraints.0.whenUnsatisfiable",
        "Ignore",
        f"{SPEC}.topologySpreadConstraints.0.whenUnsatisfiable",
        "ScheduleAnyway",
    ),
    (
        "Deployment/sglang",
        f"{SPEC}.topologySpreadConstraints.0.labelSelector.matchLabels",
        {"app": "sgl"},
        f"{SPEC}.topologySpreadConstraints.0.labelSelector",
        "sgl",
    ),
    # PDB
    ("PodDisruptionBudget/sglang", "spec.minAvailable", 1, "spec", "maxUnavailable"),
    ("PodDisruptionBudget/sglang", "spec.maxUnavailable", "10 %", "spec.maxUnavailable", "10 %"),
    (
        "PodDisruptionBudget/sglang",
        "spec.unhealthyPodEvictionPolicy",
        "Always",
        "spec.unhealthyPodEvictionPolicy",
        "AlwaysAllow",
    ),
    # priority, cron, daemon, rbac, ingress, update strategy
    ("Deployment/sglang", f"{SPEC}.priorityClassName", "train-hi", f"{SPEC}.priorityClassName", "train-high"),
    ("PriorityClass/train-high", "value", "100000", "value", "quotes"),
    ("CronJob/nightly-eval", "spec.schedule", "30 25 * * *", "spec.schedule", "25"),
    ("CronJob/nightly-eval", "spec.concurrencyPolicy", "Forbidden", "spec.concurrencyPolicy", "Forbid"),
    (
        "CronJob/nightly-eval",
        "spec.jobTemplate.spec.template.spec.restartPolicy",
        GONE,
        "spec.jobTemplate.spec.template.spec",
        "restartPolicy",
    ),
    ("DaemonSet/dcgm-exporter", "spec.replicas", 3, "spec.replicas", "replicas"),
    (
        "DaemonSet/dcgm-exporter",
        "spec.selector.matchLabels",
        {"app": "dcgm-exporter"},
        "spec.selector",
        "dcgm",
    ),
    ("RoleBinding/operator", "roleRef.name", "operators", "roleRef", "operator"),
    ("RoleBinding/operator", "subjects.0.name", "op", "subjects.0", "operator"),
    ("Role/operator", "rules.0.verb", ["get"], "rules.0.verb", "verbs"),
    (
        "Ingress/chat",
        "spec.rules.0.http.paths.0.pathType",
        "prefix",
        "spec.rules.0.http.paths.0.pathType",
        "Prefix",
    ),
    (
        "Ingress/chat",
        "spec.rules.0.http.paths.0.backend.service.port.name",
        "web",
        "spec.rules.0.http.paths.0.backend.service.port",
        "http",
    ),
    (
        "Deployment/sglang",
        "spec.strategy.rollingUpdate",
        {"maxSurge": 0, "maxUnavailable": 0},
        "spec.strategy.rollingUpdate",
        "0",
    ),
]


def test_whole_manifests_have_no_problem() -> None:
    assert check_bodies(WHOLE) == []


def test_each_break_is_named_at_its_field() -> None:
    unnamed = []
    for subject, path, value, blamed, words in BROKEN:
        found = check_bodies(broken(WHOLE, subject, path, value))
        shown = [(one.path.replace("[", ".").replace("]", ""), one.message) for one in found]
        if not any(at.startswith(blamed) and words in f"{at} {message}" for at, message in shown):
            unnamed.append((subject, path, shown))
    assert unnamed == []
