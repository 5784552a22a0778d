"""What a schema cannot say of one object: names, selectors, ports, volumes, limits, GPUs. Called by the check."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import GPU, PodSpec, pods_of, quantity
from cumulo.cluster.drivers.kubernetes.ray_serve_config import check_serve_config
from cumulo.cluster.drivers.kubernetes.rules.batch import check_batch_rules, check_restart
from cumulo.cluster.drivers.kubernetes.rules.core import check_container_rules, check_core_rules
from cumulo.cluster.drivers.kubernetes.rules.everywhere import (
    check_everywhere,
    check_pod_names,
    check_service_ports,
)
from cumulo.cluster.drivers.kubernetes.rules.pods import check_expressions, check_pod_rules
from cumulo.cluster.drivers.kubernetes.rules.ranks import check_gpus, check_ranks
from cumulo.cluster.drivers.kubernetes.sense_kinds import check_gang, check_strategy, check_triggers
from cumulo.cluster.drivers.kubernetes.words import check_word

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_MOST_NAME, _MOST_LABEL = 253, 63
_RAY_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
_PULL = ("Always", "IfNotPresent", "Never")
_POD_WORDS = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "preemptionPolicy": ("PreemptLowerPriority", "Never"),
}
_SCHEMES = ("HTTP", "HTTPS")
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_MEDIUMS = ("", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi")
_LEAST_MEMORY = 1.0  # bytes: less is a unit gone wrong
_TOLERATION = {
    "operator": ("Equal", "Exists", "Lt", "Gt"),
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
}


def check_sense(manifest: Manifest, node_gpus: int) -> None:
    _check_name(manifest)
    _check_replicas(manifest)
    _check_kind(manifest)
    check_expressions(manifest)
    check_batch_rules(manifest)
    check_core_rules(manifest)
    if manifest.kind == "Secret":
        _check_secret(manifest)
    for pod in pods_of(manifest):
        _check_labels(manifest, pod.labels, (*pod.path[:-1], "metadata", "labels"))
        _check_selector(manifest, pod)
        _check_containers(pod)
        _check_pod_words(pod)
        check_pod_rules(pod)
        check_container_rules(pod)
        check_restart(pod)
        check_pod_names(pod)
        check_gpus(pod, node_gpus)
        check_ranks(pod)
    check_everywhere(manifest)


def _check_name(manifest: Manifest) -> None:
    if manifest.kind == "Kustomization":
        return
    name = manifest.metadata.get("name")
    if not name and not manifest.metadata.get("generateName"):
        manifest.blame(("metadata", "name"), "is required and missing")
    elif isinstance(name, str) and (not _NAME.fullmatch(name) or len(name) > _MOST_NAME):
        manifest.blame(
            ("metadata", "name"),
            f"{name!r} is not a name; use lower-case letters, digits, hyphens and dots, {_MOST_NAME} at most",
        )
    _check_labels(manifest, manifest.metadata.get("labels"), ("metadata", "labels"))


def _check_labels(manifest: Manifest, labels: Any, path: FieldPath) -> None:
    for key, value in labels.items() if isinstance(labels, dict) else ():
        if isinstance(value, str) and (not _LABEL.fullmatch(value) or len(value) > _MOST_LABEL):
            manifest.blame(
                (*path, str(key)),
                f"{value!r} is not a label's value; use letters, digits, '-', '_' and '.', {_MOST_LABEL} at most",
            )


def _check_replicas(manifest: Manifest) -> None:
    """The fewest must not be more than the most."""
    pairs = {
        "HorizontalPodAutoscaler": ("minReplicas", "maxReplicas"),
        "ScaledObject": ("minReplicaCount", "maxReplicaCount"),
    }
    if manifest.kind in pairs:
        low_name, high_name = pairs[manifest.kind]
        low, high = manifest.value("spec", low_name), manifest.value("spec", high_name)
        if isinstance(low, int) and isinstance(high, int) and low > high:
            manifest.blame(("spec", low_name), f"{low} is more than {high_name}, {high}")
    if manifest.kind == "HorizontalPodAutoscaler" and manifest.value("spec", "minReplicas") == 0:
        manifest.blame(
            ("spec", "minReplicas"), "an HPA does not scale to zero; use 1 or more, or a KEDA ScaledObject"
        )
    for path, group in _worker_groups(manifest):
        low, now, high = (group.get(name) for name in ("minReplicas", "replicas", "maxReplicas"))
        for less, more, name, other in (
            (low, now, "minReplicas", "replicas"),
            (now, high, "replicas", "maxReplicas"),
            (low, high, "minReplicas", "maxReplicas"),
        ):
            if isinstance(less, int) and isinstance(more, int) and less > more:
                manifest.blame((*path, name), f"{less} is more than {other}, {more}")


def _worker_groups(manifest: Manifest) -> list[tuple[FieldPath, Mapping[str, Any]]]:
    found: list[tuple[FieldPath, Mapping[str, Any]]] = []
    for start in (("spec",), ("spec", "rayClusterSpec"), ("spec", "rayClusterConfig")):
        groups = manifest.value(*start, "workerGroupSpecs")
        for number, one in enumerate(groups if isinstance(groups, list) else ()):
            if isinstance(one, dict):
                found.append(((*start, "workerGroupSpecs", number), one))
    return found


def _check_kind(manifest: Manifest) -> None:
    spec = manifest.body.get("spec")
    if not isinstance(spec, dict):
        return
    if manifest.kind == "PodDisruptionBudget":
        given = [name for name in ("minAvailable", "maxUnavailable") if name in spec]
        if len(given) != 1:
            manifest.blame(
                ("spec",),
                "needs either minAvailable or maxUnavailable, and has " + ("both" if given else "neither"),
            )
    if manifest.kind == "Job" and manifest.group == "batch.volcano.sh":
        check_gang(manifest, spec)
    if manifest.kind == "LeaderWorkerSet":
        size = manifest.value("spec", "leaderWorkerTemplate", "size")
        if isinstance(size, int) and size < 1:
            manifest.blame(("spec", "leaderWorkerTemplate", "size"), f"must be 1 or more, got {size}")
    if manifest.kind == "ClusterQueue":
        _check_cluster_queue(manifest)
    if manifest.kind == "LocalQueue" and not spec.get("clusterQueue"):
        manifest.blame(("spec", "clusterQueue"), "is required and missing: the queue would admit nothing")
    if manifest.kind in ("ScaledObject", "ScaledJob"):
        check_triggers(manifest, spec)
    if manifest.kind == "Deployment":
        check_strategy(manifest, spec)
    if manifest.kind == "RayJob":
        _check_ray_job(manifest, spec)
    if manifest.kind == "RayService":
        check_serve_config(manifest)
    if manifest.kind == "Service":
        _check_service(manifest, spec)
        check_service_ports(manifest)
    if manifest.kind == "HorizontalPodAutoscaler":
        for number, metric in enumerate(spec.get("metrics") or ()):
            if isinstance(metric, dict):
                _check_metric(manifest, metric, ("spec", "metrics", number))


def _check_ray_job(manifest: Manifest, spec: Mapping[str, Any]) -> None:
    mode = spec.get("submissionMode", "K8sJobMode")
    check_word(manifest, ("spec", "submissionMode"), mode, _RAY_MODES)
    if not spec.get("entrypoint") and mode != "InteractiveMode":
        manifest.blame(("spec", "entrypoint"), "is required and missing: the command that the job runs")
    if not spec.get("rayClusterSpec") and not spec.get("clusterSelector"):
        manifest.blame(("spec", "rayClusterSpec"), "is required and missing, or clusterSelector instead")


def _check_service(manifest: Manifest, spec: Mapping[str, Any]) -> None:
    for number, port in enumerate(spec.get("ports") or ()):
        for name, low, high in (("port", 1, 65535), ("targetPort", 1, 65535), ("nodePort", 30000, 32767)):
            value = port.get(name) if isinstance(port, dict) else None
            if isinstance(value, int) and not low <= value <= high:
                manifest.blame(("spec", "ports", number, name), f"must be {low} to {high}, got {value}")


def _check_secret(manifest: Manifest) -> None:
    data = manifest.body.get("data")
    for key, value in data.items() if isinstance(data, dict) else ():
        try:
            base64.b64decode(str(value), validate=True)
        except binascii.Error:
            manifest.blame(("data", str(key)), "is not base64; put plain text under stringData")


def _check_pod_words(pod: PodSpec) -> None:
    for name, known in _POD_WORDS.items():
        check_word(pod.owner, (*pod.path, name), pod.spec.get(name), known)
    for path, one in pod.containers:
        check_word(pod.owner, (*path, "imagePullPolicy"), one.get("imagePullPolicy"), _PULL)
        for number, port in enumerate(one.get("ports") or ()):
            if isinstance(port, dict):
                check_word(pod.owner, (*path, "ports", number, "protocol"), port.get("protocol"), _PROTOCOLS)
    for number, volume in enumerate(pod.spec.get("volumes") or ()):
        empty = volume.get("emptyDir") if isinstance(volume, dict) else None
        if isinstance(empty, dict):
            medium = empty.get("medium")
            check_word(pod.owner, (*pod.path, "volumes", number, "emptyDir", "medium"), medium, _MEDIUMS)
    for number, one in enumerate(pod.spec.get("tolerations") or ()):
        if isinstance(one, dict):
            for name, known in _TOLERATION.items():
                check_word(pod.owner, (*pod.path, "tolerations", number, name), one.get(name), known)


def _check_metric(manifest: Manifest, metric: Mapping[str, Any], path: FieldPath) -> None:
    kind = str(metric.get("type", ""))
    field = kind[:1].lower() + kind[1:]
    if field and field not in metric:
        manifest.blame((*path, field), f"is required and missing, because the metric's type is {kind}")
    target = (metric.get(field) or {}).get("target") if isinstance(metric.get(field), dict) else None
    if isinstance(target, dict):
        needed = {"Utilization": "averageUtilization", "Value": "value", "AverageValue": "averageValue"}.get(
            str(target.get("type"))
        )
        if needed and needed not in target:
            manifest.blame(
                (*path, field, "target", needed),
                f"is required and missing, because the target's type is {target['type']}",
            )


def _check_cluster_queue(manifest: Manifest) -> None:
    for number, group in enumerate(manifest.value("spec", "resourceGroups") or ()):
        covered = group.get("coveredResources") if isinstance(group, dict) else None
        for place, flavor in enumerate(group.get("flavors") or () if isinstance(group, dict) else ()):
            names = [one.get("name") for one in flavor.get("resources") or () if isinstance(one, dict)]
            if isinstance(covered, list) and names != covered:
                manifest.blame(
                    ("spec", "resourceGroups", number, "flavors", place, "resources"),
                    f"must list the coveredResources in their order, {', '.join(map(str, covered))}; got "
                    f"{', '.join(map(str, names)) or 'none'}",
                )


def _check_selector(manifest: Manifest, pod: PodSpec) -> None:
    wanted = manifest.value("spec", "selector", "matchLabels")
    if manifest.kind not in ("Deployment", "StatefulSet", "DaemonSet") or not isinstance(wanted, dict):
        return
    for key, value in wanted.items():
        if pod.labels.get(key) != value:
            manifest.blame(
                ("spec", "selector", "matchLabels", str(key)),
                f"selects pods with {key}={value}, and the template's label is {pod.labels.get(key, 'missing')}",
            )


def _check_containers(pod: PodSpec) -> None:
    volumes = {one.get("name") for one in pod.spec.get("volumes") or () if isinstance(one, dict)}
    volumes |= {
        (one.get("metadata") or {}).get("name")
        for one in pod.owner.value("spec", "volumeClaimTemplates") or ()
        if isinstance(one, dict)
    }
    names: set[str] = set()
    for path, one in pod.containers:
        if not one.get("image"):
            pod.owner.blame((*path, "image"), "is required and missing")
        if (name := str(one.get("name"))) in names:
            pod.owner.blame((*path, "name"), f"two containers are called {name}")
        names.add(name)
        for number, mount in enumerate(one.get("volumeMounts") or ()):
            known = [str(volume) for volume in volumes]
            if isinstance(mount, dict) and mount.get("name") not in volumes:
                pod.owner.blame(
                    (*path, "volumeMounts", number, "name"),
                    f"there is no volume {mount.get('name')}{did_you_mean(str(mount.get('name')), known)}",
                )
        _check_ports(pod, path, one)
        _check_limits(pod, path, one.get("resources"))


def _check_ports(pod: PodSpec, path: FieldPath, container: Mapping[str, Any]) -> None:
    ports = [one for one in container.get("ports") or () if isinstance(one, dict)]
    names = {one["name"] for one in ports if one.get("name")}
    numbers = {one["containerPort"] for one in ports if isinstance(one.get("containerPort"), int)}
    for number, one in enumerate(ports):
        value = one.get("containerPort")
        if isinstance(value, int) and not 1 <= value <= 65535:
            pod.owner.blame((*path, "ports", number, "containerPort"), f"a port is 1 to 65535, got {value}")
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        for way in ("httpGet", "tcpSocket"):
            target = (container.get(probe) or {}).get(way) or {}
            port = target.get("port")
            check_word(pod.owner, (*path, probe, way, "scheme"), target.get("scheme"), _SCHEMES)
            if isinstance(port, str) and not port.isdigit() and port not in names:
                pod.owner.blame(
                    (*path, probe, way, "port"),
                    f"the container has no port {port}{did_you_mean(port, sorted(names))}",
                )
            if isinstance(port, int) and ports and port not in numbers:
                listed = ", ".join(map(str, sorted(numbers)))
                pod.owner.blame(
                    (*path, probe, way, "port"), f"the container has no port {port}; its ports are {listed}"
                )


def _check_limits(pod: PodSpec, path: FieldPath, resources: Any) -> None:
    if not isinstance(resources, dict):
        return
    requests, limits = (resources.get(kind) or {} for kind in ("requests", "limits"))
    if not isinstance(requests, dict) or not isinstance(limits, dict):
        return
    for name, asked in requests.items():
        low, high = quantity(asked), quantity(limits.get(name))
        if low is not None and high is not None and low > high:
            pod.owner.blame(
                (*path, "resources", "requests", name), f"{asked} is more than the limit, {limits[name]}"
            )
        if GPU.match(str(name)) and name not in limits:
            pod.owner.blame(
                (*path, "resources", "limits", name),
                f"is required and missing: {name} needs a limit equal to the request",
            )
    for kind, given in (("requests", requests), ("limits", limits)):
        for name, asked in given.items():
            value = quantity(asked)
            if GPU.match(str(name)) and (value or 0) >= 1 and re.fullmatch(r"\d+[A-Za-z]+", str(asked)):
                digits = re.sub(r"\D", "", str(asked))
                message = f"GPUs are counted without a unit, and this is {asked}; did you mean {digits}?"
                pod.owner.blame((*path, "resources", kind, name), message)
                continue
            if name == "memory" and value is not None and 0 < value < _LEAST_MEMORY:
                meant = str(asked).removesuffix("m")
                pod.owner.blame(
                    (*path, "resources", kind, name),
                    f"{asked} is less than a byte: m means a thousandth; did you mean {meant}Mi?",
                )
            if GPU.match(str(name)) and value is not None and (value != int(value) or value < 0):
                pod.owner.blame(
                    (*path, "resources", kind, name),
                    f"GPUs are whole: {asked} cannot be asked for; use 1 or more",
                )
            if (
                GPU.match(str(name))
                and kind == "requests"
                and name in limits
                and value != quantity(limits[name])
            ):
                pod.owner.blame(
                    (*path, "resources", kind, name),
                    f"must equal the limit, {limits[name]}, because GPUs are not shared; got {asked}",
                )
