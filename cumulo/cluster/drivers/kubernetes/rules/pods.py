"""Rules for pods: affinity, topology spread, probes, init containers, resource claims."""

from collections.abc import Iterator, Mapping
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import PodSpec
from cumulo.cluster.drivers.kubernetes.words import check_word

_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_WAYS = ("exec", "httpGet", "tcpSocket", "grpc")
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_SPREAD_WORDS = {
    "whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    "nodeAffinityPolicy": ("Honor", "Ignore"),
    "nodeTaintsPolicy": ("Honor", "Ignore"),
}


def check_pod_rules(pod: PodSpec) -> None:
    _check_spread(pod)
    _check_weights(pod)
    _check_init(pod)
    for path, container in pod.containers:
        for name in _PROBES:
            probe = container.get(name)
            if isinstance(probe, dict):
                _check_probe(pod.owner, (*path, name), name, probe)
    _check_claims(pod)


def check_expressions(manifest: Manifest) -> None:
    """Every `matchExpressions` and `matchFields`, wherever it is."""
    for path, one in items_of(manifest.body, ()):
        if len(path) < 2 or path[-2] not in ("matchExpressions", "matchFields"):
            continue
        operator, values = one.get("operator"), one.get("values")
        of_nodes = any(step in ("nodeSelectorTerms", "preference", "nodeAffinity") for step in path)
        check_word(
            manifest, (*path, "operator"), operator, (*_OPERATORS, "Gt", "Lt") if of_nodes else _OPERATORS
        )
        if operator in ("In", "NotIn") and not values:
            manifest.blame((*path, "values"), f"is required and missing, because the operator is {operator}")
        if operator in ("Exists", "DoesNotExist") and values:
            manifest.blame((*path, "values"), f"must be left out, because the operator is {operator}")
        if operator in ("Gt", "Lt") and (not isinstance(values, list) or len(values) != 1):
            manifest.blame((*path, "values"), f"needs exactly one number, because the operator is {operator}")


def items_of(value: Any, path: FieldPath) -> Iterator[tuple[FieldPath, Mapping[str, Any]]]:
    """Every mapping that is an item of a list, with its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from items_of(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if isinstance(inner, dict):
                yield (*path, number), inner
            yield from items_of(inner, (*path, number))


def _check_spread(pod: PodSpec) -> None:
    for number, one in enumerate(pod.spec.get("topologySpreadConstraints") or ()):
        if not isinstance(one, dict):
            continue
        path: FieldPath = (*pod.path, "topologySpreadConstraints", number)
        for name, words in _SPREAD_WORDS.items():
            check_word(pod.owner, (*path, name), one.get(name), words)
        for name in ("maxSkew", "minDomains"):
            if isinstance(value := one.get(name), int) and value < 1:
                pod.owner.blame((*path, name), f"must be 1 or more, got {value}")
        if "minDomains" in one and one.get("whenUnsatisfiable") == "ScheduleAnyway":
            pod.owner.blame((*path, "minDomains"), "is only allowed with whenUnsatisfiable: DoNotSchedule")
        selector = one.get("labelSelector")
        wanted = selector.get("matchLabels") if isinstance(selector, dict) else None
        for key, value in wanted.items() if isinstance(wanted, dict) else ():
            if pod.labels.get(key) != value:
                pod.owner.blame(
                    (*path, "labelSelector", "matchLabels", str(key)),
                    f"counts pods with {key}={value}, and the label of these pods is "
                    f"{pod.labels.get(key, 'missing')}: they would not be spread",
                )


def _check_weights(pod: PodSpec) -> None:
    affinity = pod.spec.get("affinity")
    for path, one in items_of(affinity, (*pod.path, "affinity")):
        if path[-2] != "preferredDuringSchedulingIgnoredDuringExecution":
            continue
        weight = one.get("weight")
        if isinstance(weight, int) and not 1 <= weight <= 100:
            pod.owner.blame((*path, "weight"), f"must be 1 to 100, got {weight}")
    for path, one in items_of(affinity, (*pod.path, "affinity")):
        term = one.get("podAffinityTerm", one)
        if "podAffinity" in path or "podAntiAffinity" in path:
            inner: FieldPath = (*path, "podAffinityTerm") if "podAffinityTerm" in one else path
            named = str(path[-2]).endswith("IgnoredDuringExecution")
            if named and isinstance(term, dict) and term.get("topologyKey") == "":
                pod.owner.blame((*inner, "topologyKey"), "must not be empty, such as kubernetes.io/hostname")


def _check_init(pod: PodSpec) -> None:
    for number, one in enumerate(pod.spec.get("initContainers") or ()):
        if not isinstance(one, dict):
            continue
        path: FieldPath = (*pod.path, "initContainers", number)
        again = one.get("restartPolicy")
        check_word(pod.owner, (*path, "restartPolicy"), again, ("Always", "OnFailure", "Never"))
        if again == "Always":
            continue  # a sidecar
        for name in (*_PROBES, "lifecycle"):
            if name in one:
                pod.owner.blame(
                    (*path, name),
                    "is not allowed in an init container, which ends before the others start; with "
                    "restartPolicy: Always it is a sidecar and may have it",
                )


def _check_probe(manifest: Manifest, path: FieldPath, name: str, probe: Mapping[str, Any]) -> None:
    given = [way for way in _WAYS if way in probe]
    if len(given) != 1:
        words = f"{' and '.join(given)}: keep one" if given else "none"
        manifest.blame(path, f"needs exactly one of {', '.join(_WAYS)}, and has {words}")
    wins = probe.get("successThreshold")
    if name != "readinessProbe" and isinstance(wins, int) and wins != 1:
        manifest.blame((*path, "successThreshold"), f"must be 1 for a {name}, got {wins}")
    for field, least in (
        ("periodSeconds", 1), ("timeoutSeconds", 1), ("failureThreshold", 1), ("initialDelaySeconds", 0),
    ):  # fmt: skip
        if isinstance(value := probe.get(field), int) and value < least:
            manifest.blame((*path, field), f"must be {least} or more, got {value}")


def _check_claims(pod: PodSpec) -> None:
    """Claims for devices: containers name those of the pod."""
    known: list[str] = []
    for number, one in enumerate(pod.spec.get("resourceClaims") or ()):
        if not isinstance(one, dict):
            continue
        known.append(str(one.get("name")))
        given = [name for name in ("resourceClaimName", "resourceClaimTemplateName") if one.get(name)]
        if len(given) != 1:
            pod.owner.blame(
                (*pod.path, "resourceClaims", number),
                "needs either resourceClaimName or resourceClaimTemplateName, and has "
                + ("both" if given else "neither"),
            )
    for path, container in pod.containers:
        resources = container.get("resources")
        claims = resources.get("claims") if isinstance(resources, dict) else None
        for number, one in enumerate(claims if isinstance(claims, list) else ()):
            name = str(one.get("name")) if isinstance(one, dict) else ""
            if name and name not in known:
                pod.owner.blame(
                    (*path, "resources", "claims", number, "name"),
                    f"the pod has no resource claim {name}{did_you_mean(name, known)}",
                )
