"""What objects say of each other: queues, secrets, claims, targets of autoscalers, services, ports, labels. Called
by the check, with all objects that are applied together.

An object that is in the cluster already is named to the check as KIND/NAME, or in the annotation
`cumulo.dev/exists` of an object that needs it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import PodSpec, pods_of

EXISTS = "cumulo.dev/exists"  # an annotation with KIND/NAME, separated by commas
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_ALWAYS = {
    ("Queue", "default"), ("Queue", "root"), ("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt"),
    ("PriorityClass", "system-cluster-critical"), ("PriorityClass", "system-node-critical"),
}  # fmt: skip
_CLUSTER_WIDE = {"Queue", "ClusterQueue", "ResourceFlavor", "Topology", "PriorityClass", "HyperNode"}
# Kinds that a cluster comes with, or that are no objects.
_NEVER_MISSED = {"ClusterRole", "User", "Group", "ClusterTriggerAuthentication"}
# Fields by the object's kind, and the kind that they name. Next to a name, `kind` names another kind, `namespace`
# and `optional` mean that the object need not be here.
_FIELDS: Mapping[str, Sequence[tuple[FieldPath, str]]] = {
    "LocalQueue": [(("spec", "clusterQueue"), "ClusterQueue")],
    "ClusterQueue": [(("spec", "resourceGroups", "*", "flavors", "*", "name"), "ResourceFlavor")],
    "ResourceFlavor": [(("spec", "topologyName"), "Topology")],
    "PodGroup": [(("spec", "queue"), "Queue"), (("spec", "priorityClassName"), "PriorityClass")],
    "Queue": [(("spec", "parent"), "Queue")],
    "Job": [(("spec", "queue"), "Queue"), (("spec", "priorityClassName"), "PriorityClass")],
    "StatefulSet": [(("spec", "serviceName"), "Service")],
    "InferencePool": [(("spec", "endpointPickerRef", "name"), "Service")],
    "HorizontalPodAutoscaler": [(("spec", "scaleTargetRef", "name"), "Deployment")],
    "ScaledObject": [
        (("spec", "scaleTargetRef", "name"), "Deployment"),
        (("spec", "triggers", "*", "authenticationRef", "name"), "TriggerAuthentication"),
    ],
    "TriggerAuthentication": [(("spec", "secretTargetRef", "*", "name"), "Secret")],
    "RoleBinding": [(("roleRef", "name"), "Role"), (("subjects", "*", "name"), "ServiceAccount")],
    "ClusterRoleBinding": [(("subjects", "*", "name"), "ServiceAccount")],
    "Gateway": [(("spec", "listeners", "*", "tls", "certificateRefs", "*", "name"), "Secret")],
    "HTTPRoute": [
        (("spec", "parentRefs", "*", "name"), "Gateway"),
        (("spec", "rules", "*", "backendRefs", "*", "name"), "Service"),
    ],
    "Ingress": [
        (("spec", "tls", "*", "secretName"), "Secret"),
        (("spec", "defaultBackend", "service", "name"), "Service"),
        (("spec", "rules", "*", "http", "paths", "*", "backend", "service", "name"), "Service"),
    ],
}
_OF_ALL: Sequence[tuple[FieldPath, str]] = [(("metadata", "labels", QUEUE_LABEL), "LocalQueue")]
_OF_CONTAINERS: Sequence[tuple[FieldPath, str]] = [
    (("env", "*", "valueFrom", "secretKeyRef", "name"), "Secret"),
    (("env", "*", "valueFrom", "configMapKeyRef", "name"), "ConfigMap"),
    (("envFrom", "*", "secretRef", "name"), "Secret"),
    (("envFrom", "*", "configMapRef", "name"), "ConfigMap"),
]
_OF_PODS: Sequence[tuple[FieldPath, str]] = [  # from the pod's template
    (("metadata", "annotations", "scheduling.k8s.io/group-name"), "PodGroup"),
    (("metadata", "annotations", "scheduling.volcano.sh/queue-name"), "Queue"),
    (("spec", "serviceAccountName"), "ServiceAccount"),
    (("spec", "priorityClassName"), "PriorityClass"),
    (("spec", "imagePullSecrets", "*", "name"), "Secret"),
    (("spec", "resourceClaims", "*", "resourceClaimName"), "ResourceClaim"),
    (("spec", "resourceClaims", "*", "resourceClaimTemplateName"), "ResourceClaimTemplate"),
    (("spec", "volumes", "*", "secret", "secretName"), "Secret"),
    (("spec", "volumes", "*", "configMap", "name"), "ConfigMap"),
    (("spec", "volumes", "*", "persistentVolumeClaim", "claimName"), "PersistentVolumeClaim"),
    *(
        (("spec", part, "*", *path), kind)
        for part in ("initContainers", "containers")
        for path, kind in _OF_CONTAINERS
    ),
]
_SELECTORS: Mapping[str, FieldPath] = {
    "Service": ("spec", "selector"),
    "PodDisruptionBudget": ("spec", "selector", "matchLabels"),
    "InferencePool": ("spec", "selector", "matchLabels"),
    "NetworkPolicy": ("spec", "podSelector", "matchLabels"),
}
_BY_OPERATORS = ("ray.io", "leaderworkerset")  # labels that operators give to their pods


class ObjectSet:
    """All objects that stand together, and those that are said to be there."""

    def __init__(self, manifests: Sequence[Manifest], exists: Iterable[str] = ()) -> None:
        self.manifests = manifests
        said = [
            str(value) for one in manifests for _, value in one.matches(("metadata", "annotations", EXISTS))
        ]
        names = [*exists, *(name.strip() for text in said for name in text.split(","))]
        self._there = {tuple(name.split("/", 1)) for name in names} | _ALWAYS
        self.pods = [pod for one in manifests for pod in pods_of(one)]

    def find(self, kind: str, name: str, namespace: str) -> Manifest | None:
        for one in self.manifests:
            near = kind in _CLUSTER_WIDE or one.namespace == namespace
            if one.kind == kind and one.name == name and near:
                return one
        return None

    def need(self, owner: Manifest, path: FieldPath, kind: str, name: Any) -> Manifest | None:
        """The object that a field names. The owner is blamed if it is neither here nor said to be there."""
        if not isinstance(name, str) or not name:
            return None
        found = self.find(kind, name, owner.namespace)
        if found is not None or (kind, name) in self._there:
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

    def chosen_pods(self, labels: Mapping[str, Any], namespace: str) -> list[PodSpec]:
        return [
            pod
            for pod in self.pods
            if pod.owner.namespace == namespace and labels.items() <= pod.labels.items()
        ]


def check_references(objects: ObjectSet) -> None:
    _check_names(objects.manifests)
    for one in (one for one in objects.manifests if one.sound):
        for pattern, kind in (*_OF_ALL, *_FIELDS.get(one.kind, ())):
            for path, name in one.matches(pattern):
                _check_reference(one, path, kind, name, objects)
        _check_selector(one, objects)
    for pod in (one for one in objects.pods if one.owner.sound):
        for pattern, kind in _OF_PODS:
            for path, name in pod.owner.matches(pattern, pod.path[:-1]):
                _check_reference(pod.owner, path, kind, name, objects)
        _check_template(pod)


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
    if kind in _NEVER_MISSED or around.get("optional") or far:
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
    elif kind == "Service":
        for place, port in _ports(around.get("port"), (*start, "port")):
            _check_service_port(one, place, found, port)
    elif kind == "Gateway" and (section := around.get("sectionName")) is not None:
        names = [str(value) for _, value in found.matches(("spec", "listeners", "*", "name"))]
        if section not in names:
            text = f"the Gateway {name} has no listener {section}{did_you_mean(str(section), names)}"
            one.blame((*start, "sectionName"), text)
    elif (given := around.get("apiVersion")) and path[-2] == "scaleTargetRef" and given != found.api_version:
        one.blame((*start, "apiVersion"), f"{kind} {name} is {found.api_version}, not {given}")


def _ports(given: Any, path: FieldPath) -> list[tuple[FieldPath, Any]]:
    """A port stands there as itself, or as {number: 80} or {name: http}."""
    if isinstance(given, dict):
        return [((*path, field), given[field]) for field in ("name", "number") if field in given]
    return [] if given is None else [(path, given)]


def _check_service_port(one: Manifest, path: FieldPath, service: Manifest, port: Any) -> None:
    field = "name" if isinstance(port, str) else "port"
    known = [value for _, value in service.matches(("spec", "ports", "*", field))]
    if service.value("spec", "ports") and port not in known:
        listed = ", ".join(map(str, known)) or "without names"
        one.blame(path, f"the Service {service.name} has no port {port}; its ports are {listed}")


# -- labels -------------------------------------------------------------------------------------------------
def _check_selector(one: Manifest, objects: ObjectSet) -> None:
    if one.kind == "ServiceMonitor":
        _check_monitor(one, objects)
    path = _SELECTORS.get(one.kind)
    wanted = one.value(*path) if path is not None else None
    if path is None or not wanted or any(name in str(key) for key in wanted for name in _BY_OPERATORS):
        return
    chosen = objects.chosen_pods(wanted, one.namespace)
    if not chosen:
        there = {pod.owner.namespace for pod in objects.pods if wanted.items() <= pod.labels.items()}
        near = [_shown(pod.labels) for pod in objects.pods if pod.owner.namespace == one.namespace]
        if there:
            spaces = " and ".join(sorted(there))
            text = f"no pod is in the namespace {one.namespace}; those with these labels are in {spaces}"
            one.blame(path, text)
        elif near:
            have = " or ".join(sorted(set(near)))
            one.blame(path, f"no pod has the labels {_shown(wanted)}; pods here have {have}")
        return
    if one.kind == "Service" and all(pod.owner.sound for pod in chosen):
        _check_target_ports(one, chosen)


def _check_target_ports(one: Manifest, pods: Sequence[PodSpec]) -> None:
    ports = [port for pod in pods for _, container in pod.containers for port in container.get("ports") or ()]
    names = {str(port["name"]) for port in ports if port.get("name")}
    numbers = {port["containerPort"] for port in ports if "containerPort" in port}
    for number, port in enumerate(one.value("spec", "ports") or ()):
        target = port.get("targetPort", port.get("port"))
        path: FieldPath = ("spec", "ports", number, "targetPort")
        if isinstance(target, str) and not target.isdigit() and target not in names:
            one.blame(path, f"its pods have no port {target}{did_you_mean(target, sorted(names))}")
        elif isinstance(target, int) and numbers and target not in numbers:
            listed = ", ".join(map(str, sorted(numbers)))
            one.blame(path, f"its pods listen on {listed}, not on {target}")


def _check_monitor(one: Manifest, objects: ObjectSet) -> None:
    wanted = one.value("spec", "selector", "matchLabels")
    services = [other for other in objects.manifests if other.kind == "Service" and other.sound]
    if not wanted or not services:
        return
    chosen = [other for other in services if wanted.items() <= (other.metadata.get("labels") or {}).items()]
    if not chosen:
        one.blame(("spec", "selector", "matchLabels"), f"no Service has the labels {_shown(wanted)}")
        return
    ports = {str(value) for other in chosen for _, value in other.matches(("spec", "ports", "*", "name"))}
    for path, port in one.matches(("spec", "endpoints", "*", "port")):
        if port not in ports:
            text = f"the Service {chosen[0].name} has no port {port}{did_you_mean(str(port), sorted(ports))}"
            one.blame(path, text)


def _check_template(pod: PodSpec) -> None:
    """What a pod's own template must have: the labels of its selector, and the volumes of its mounts."""
    owner = pod.owner
    wanted = owner.value("spec", "selector", "matchLabels")
    if owner.kind in ("Deployment", "StatefulSet", "DaemonSet") and isinstance(wanted, dict):
        for key, value in wanted.items():
            if pod.labels.get(key) != value:
                has = pod.labels.get(key, "missing")
                text = f"selects pods with {key}={value}, and the template's label is {has}"
                owner.blame(("spec", "selector", "matchLabels", key), text)
    names = [str(name) for _, name in owner.matches(("volumes", "*", "name"), pod.path)]
    names += [
        str(name) for _, name in owner.matches(("spec", "volumeClaimTemplates", "*", "metadata", "name"))
    ]
    for start, _ in pod.containers:
        for path, name in owner.matches(("volumeMounts", "*", "name"), start):
            if name not in names:
                owner.blame(path, f"there is no volume {name}{did_you_mean(str(name), names)}")


def _shown(labels: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())
