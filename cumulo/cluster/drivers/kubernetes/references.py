"""What objects name of each other: queues, secrets, claims, targets of autoscalers, services. Called by the check,
with all objects that are applied together. Labels of selectors and mounts of volumes are left to the API server's
dry run and to kube-linter.

An object that is in the cluster already is named to the check as KIND/NAME, or in the annotation
`cumulo.dev/exists` of an object that needs it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.base.strict import package_yaml
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import pods_of

EXISTS = "cumulo.dev/exists"  # an annotation with KIND/NAME, separated by commas
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def _table() -> Any:
    """The content of data/references.yaml."""
    return package_yaml("cumulo.cluster.drivers.kubernetes", "data/references.yaml")


class ObjectSet:
    """All objects that stand together, and those that are said to be there."""

    def __init__(self, manifests: Sequence[Manifest], exists: Iterable[str] = ()) -> None:
        self.manifests = manifests
        said = [
            str(value) for one in manifests for _, value in one.matches(("metadata", "annotations", EXISTS))
        ]
        names = [*exists, *(name.strip() for text in said for name in text.split(","))]
        self._there = {*names, *_table()["there"]}
        self.pods = [pod for one in manifests for pod in pods_of(one)]

    def find(self, kind: str, name: str, namespace: str) -> Manifest | None:
        for one in self.manifests:
            near = kind in _table()["cluster_wide"] or one.namespace == namespace
            if one.kind == kind and one.name == name and near:
                return one
        return None

    def need(self, owner: Manifest, path: FieldPath, kind: str, name: Any) -> Manifest | None:
        """The object that a field names. The owner is blamed if it is neither here nor said to be there."""
        if not isinstance(name, str) or not name:
            return None
        found = self.find(kind, name, owner.namespace)
        if found is not None or f"{kind}/{name}" in self._there:
            return found
        alike = [one for one in self.manifests if one.kind == kind]
        elsewhere = next((one.namespace for one in alike if one.name == name), None)
        if elsewhere is not None:
            owner.blame(path, f"{kind} {name} is in the namespace {elsewhere}, not in {owner.namespace}")
            return None
        known = sorted({one.name for one in alike})
        there = did_you_mean(name, known) if known else f"; no {kind} is among these files"
        text = f"there is no {kind} {name}{there}; if the cluster has it, add --exists {kind}/{name}"
        owner.blame(path, text)
        return None


def check_references(objects: ObjectSet) -> None:
    _check_names(objects.manifests)
    table = _table()
    for one in (one for one in objects.manifests if one.sound):
        _check_fields(one, (), table["all"] | table["kinds"].get(one.kind, {}), objects)
    for pod in (one for one in objects.pods if one.owner.sound):
        _check_fields(pod.owner, pod.path[:-1], table["pods"], objects)
        for path, _ in pod.containers:
            _check_fields(pod.owner, path, table["containers"], objects)


def _check_fields(one: Manifest, start: FieldPath, fields: Mapping[str, str], objects: ObjectSet) -> None:
    for pattern, kind in fields.items():
        for path, name in one.matches(tuple(pattern.split()), start):
            _check_reference(one, path, kind, name, objects)


def _check_names(manifests: Sequence[Manifest]) -> None:
    seen: dict[tuple[str, ...], Manifest] = {}
    for one in manifests:
        key = (one.group, one.kind, one.namespace, one.name)
        if one.name and one.kind != "Kustomization" and (first := seen.setdefault(key, one)) is not one:
            text = f"another {one.kind} {one.name} is in {first.file}; one would replace the other"
            one.blame(("metadata", "name"), text)


def _check_reference(one: Manifest, path: FieldPath, usual: str, name: Any, objects: ObjectSet) -> None:
    around: Any = one.value(*path[:-1])
    kind = str(around.get("kind") or usual) if path[-1] == "name" else usual
    far = path[-1] == "name" and around.get("namespace", one.namespace) != one.namespace
    if around.get("optional") or far:
        return
    found = objects.need(one, path, kind, name)
    if found is None or not found.sound:
        return
    start = path[:-1]
    if kind in ("Secret", "ConfigMap") and "key" in around:
        keys = {str(key) for part in ("data", "stringData", "binaryData") for key in found.value(part) or ()}
        if around["key"] not in keys:
            text = f"the {kind} {name} has no key {around['key']}{did_you_mean(str(around['key']), sorted(keys))}"
            one.blame((*start, "key"), text)
    elif kind == "Service" and isinstance(around.get("port"), dict):
        number = around["port"].get("number")
        known = [port for _, port in found.matches(("spec", "ports", "*", "port"))]
        if number not in known:
            text = f"the Service {name} has no port {number}; its ports are {', '.join(map(str, known))}"
            one.blame((*start, "port", "number"), text)
    elif (given := around.get("apiVersion")) and path[-2] == "scaleTargetRef" and given != found.api_version:
        one.blame((*start, "apiVersion"), f"{kind} {name} is {found.api_version}, not {given}")
