"""Rules that hold wherever a field stands, in objects of every kind: named items are named once, amounts and times
are not negative, ports and images have names that the API server or the nodes accept.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest, shown_path
from cumulo.cluster.drivers.kubernetes.pods import PodSpec, quantity

# Lists whose items are told apart by a field.
_IDENTITY = {
    "containers": "name", "initContainers": "name", "volumes": "name", "volumeMounts": "mountPath",
    "volumeClaimTemplates": "metadata.name", "tasks": "name", "workerGroupSpecs": "groupName", "flavors": "name",
    "replicatedJobs": "name", "listeners": "name", "resourceClaims": "name", "ports": "name",
}  # fmt: skip
_AMOUNTS = ("requests", "limits", "hard", "capability", "deserved", "guarantee", "minResources")
_AMOUNT = ("nominalQuota", "borrowingLimit", "lendingLimit", "sizeLimit", "storage")
_LEAST = {
    "terminationGracePeriodSeconds": 0, "activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 0,
    "backoffLimit": 0, "minReadySeconds": 0, "progressDeadlineSeconds": 1, "revisionHistoryLimit": 0,
    "averageUtilization": 1, "stabilizationWindowSeconds": 0, "parallelism": 0, "completions": 0, "replicas": 0,
    "minAvailable": 0, "numOfHosts": 1,
}  # fmt: skip
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9](-?[a-z0-9])*")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_SERVICE_PORT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::\d+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@[A-Za-z0-9]+:[0-9a-f]{{32,}})?"
)
_POD_FIELDS = (
    "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
    "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs",
)  # fmt: skip
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)(\['[^']+'\])?")


def check_everywhere(manifest: Manifest) -> None:
    for path, value in _fields(manifest.body, ()):
        name = str(path[-1])
        if isinstance(value, list) and name in _IDENTITY:
            _check_once(manifest, path, value, _IDENTITY[name])
        elif isinstance(value, dict) and name in _AMOUNTS:
            for resource, amount in value.items():
                _check_amount(manifest, (*path, str(resource)), amount)
        elif name in _AMOUNT:
            _check_amount(manifest, path, value)
        elif (
            name in _LEAST
            and isinstance(value, int)
            and not isinstance(value, bool)
            and value < _LEAST[name]
            and not _is_blamed(manifest, path)
        ):
            manifest.blame(path, f"must be {_LEAST[name]} or more, got {value}")


def _fields(value: Any, path: FieldPath) -> Iterator[tuple[FieldPath, Any]]:
    """Every field of the object, wherever it is."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, str(key)), inner
            yield from _fields(inner, (*path, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _fields(inner, (*path, number))


def _is_blamed(manifest: Manifest, path: FieldPath) -> bool:
    """Whether this field, or one inside of it, is known to be wrong already."""
    shown = shown_path(path)
    return any(f"{problem.path}.".startswith((f"{shown}.", f"{shown}[")) for problem in manifest.problems)


def _check_once(manifest: Manifest, path: FieldPath, items: list[Any], identity: str) -> None:
    seen: dict[str, int] = {}
    for number, one in enumerate(items):
        value: Any = one
        for step in identity.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        if not isinstance(value, str):
            continue
        if value in seen and not _is_blamed(manifest, (*path, number)):
            manifest.blame(
                (*path, number, *identity.split(".")),
                f"{value} is also item {seen[value]} of {path[-1]}; rename one",
            )
        seen.setdefault(value, number)


def _check_amount(manifest: Manifest, path: FieldPath, amount: Any) -> None:
    value = quantity(amount)
    if value is not None and value < 0 and not _is_blamed(manifest, path):
        manifest.blame(path, f"must be 0 or more, got {amount}")


def check_service_ports(manifest: Manifest) -> None:
    ports = [one for one in manifest.value("spec", "ports") or () if isinstance(one, dict)]
    taken: dict[tuple[Any, str], int] = {}
    for number, one in enumerate(ports):
        path: FieldPath = ("spec", "ports", number)
        if len(ports) > 1 and not one.get("name"):
            manifest.blame((*path, "name"), "is required and missing, because the Service has several ports")
        name = one.get("name")
        if isinstance(name, str) and (len(name) > 63 or not _SERVICE_PORT_NAME.fullmatch(name)):
            manifest.blame(
                (*path, "name"), f"{name!r} is not a port's name; use lower-case letters, digits and hyphens"
            )
        key = one.get("port"), str(one.get("protocol") or "TCP")
        if key in taken:
            manifest.blame(
                (*path, "port"), f"{key[0]} is also port {taken[key]} of this Service; use another"
            )
        taken.setdefault(key, number)


def check_pod_names(pod: PodSpec) -> None:
    for path, container in pod.containers:
        image = container.get("image")
        if isinstance(image, str) and image and not _IMAGE.fullmatch(image):
            why = "without a space" if re.search(r"\s", image) else "in lower-case letters, digits, - and _"
            pod.owner.blame((*path, "image"), f"{image!r} is not an image; write registry/name:tag, {why}")
        for number, port in enumerate(container.get("ports") or ()):
            name = port.get("name") if isinstance(port, dict) else None
            if isinstance(name, str) and (len(name) > 15 or not _PORT_NAME.fullmatch(name)):
                pod.owner.blame(
                    (*path, "ports", number, "name"),
                    f"{name!r} is not a port's name; use lower-case letters, digits and hyphens, 15 at most",
                )
        for number, one in enumerate(container.get("env") or ()):
            name = one.get("name") if isinstance(one, dict) else None
            if isinstance(name, str) and not _VARIABLE.fullmatch(name):
                text = f"{name!r} is not a variable's name; use letters, digits and _, such as NCCL_DEBUG"
                pod.owner.blame((*path, "env", number, "name"), text)
            _check_field_of_pod(pod, (*path, "env", number, "valueFrom", "fieldRef", "fieldPath"), one)


def _check_field_of_pod(pod: PodSpec, path: FieldPath, variable: Any) -> None:
    """A variable may be set to one of a few fields of its pod."""
    value: Any = variable
    for step in ("valueFrom", "fieldRef", "fieldPath"):
        value = value.get(step) if isinstance(value, Mapping) else None
    if not isinstance(value, str) or value in _POD_FIELDS or _KEYED_FIELD.fullmatch(value):
        return
    known = did_you_mean(value, _POD_FIELDS)
    pod.owner.blame(path, f"{value} is not a field of a pod that a variable can have{known}")
