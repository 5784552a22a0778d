"""Rules for core objects that their schemas leave open: Services, storage, quotas, roles, hosts and ports."""

import ipaddress
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import GPU, PodSpec, quantity
from cumulo.cluster.drivers.kubernetes.words import check_word

_HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MOST_PRIORITY = 1_000_000_000  # above, the cluster's own classes


def check_core_rules(manifest: Manifest) -> None:
    rule = _RULES.get(manifest.kind)
    if rule is not None:
        rule(manifest)


def _check_service(one: Manifest) -> None:
    kind = one.value("spec", "type")
    if kind == "ExternalName" and not one.value("spec", "externalName"):
        one.blame(("spec", "externalName"), "is required and missing, because the type is ExternalName")
    if one.value("spec", "clusterIP") == "None" and kind in ("NodePort", "LoadBalancer"):
        one.blame(("spec", "clusterIP"), f"cannot be None with type: {kind}, which needs an address")
    address = one.value("spec", "clusterIP")
    if isinstance(address, str) and address not in ("", "None"):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            text = f"must be None, or an address, got {address!r}"
            one.blame(("spec", "clusterIP"), text)


def _check_claim(one: Manifest) -> None:
    asked = one.value("spec", "resources", "requests", "storage")
    if asked is None:
        one.blame(("spec", "resources", "requests", "storage"), "is required and missing, such as 100Gi")
    elif (size := quantity(asked)) is not None and size <= 0:
        one.blame(("spec", "resources", "requests", "storage"), f"must be more than 0, got {asked}")


def _check_ingress(one: Manifest) -> None:
    for number, rule in enumerate(one.value("spec", "rules") or ()):
        host = rule.get("host") if isinstance(rule, dict) else None
        if isinstance(host, str) and host and not _HOST.fullmatch(host):
            one.blame(
                ("spec", "rules", number, "host"),
                f"{host!r} is not a host name; write it without scheme, port and path, such as api.example.com",
            )


def _check_policy(one: Manifest) -> None:
    for direction in ("ingress", "egress"):
        for number, rule in enumerate(one.value("spec", direction) or ()):
            for place, given in enumerate(rule.get("ports") or () if isinstance(rule, dict) else ()):
                if not isinstance(given, dict) or "endPort" not in given:
                    continue
                path: FieldPath = ("spec", direction, number, "ports", place, "endPort")
                first, last = given.get("port"), given["endPort"]
                if not isinstance(first, int):
                    one.blame(path, "needs a port that is a number, the first of the range")
                elif isinstance(last, int) and last < first:
                    one.blame(path, f"{last} is less than port, {first}")


def _check_binding(one: Manifest) -> None:
    kinds = ("Role", "ClusterRole") if one.kind == "RoleBinding" else ("ClusterRole",)
    check_word(one, ("roleRef", "kind"), one.value("roleRef", "kind"), kinds)
    for number, subject in enumerate(one.value("subjects") or ()):
        if isinstance(subject, dict):
            path: FieldPath = ("subjects", number, "kind")
            check_word(one, path, subject.get("kind"), ("ServiceAccount", "User", "Group"))


def _check_quota(one: Manifest) -> None:
    hard = one.value("spec", "hard")
    for name, value in hard.items() if isinstance(hard, dict) else ():
        if (amount := quantity(value)) is not None and amount < 0:
            one.blame(("spec", "hard", str(name)), f"must be 0 or more, got {value}")


def _check_range(one: Manifest) -> None:
    for number, limit in enumerate(one.value("spec", "limits") or ()):
        if not isinstance(limit, dict):
            continue
        names = [name for name in ("min", "defaultRequest", "default", "max") if name in limit]
        for less, more in itertools.pairwise(names):
            for resource, value in _amounts(limit[less]).items():
                other = _amounts(limit[more]).get(resource)
                if other is not None and value > other:
                    path: FieldPath = ("spec", "limits", number, less, resource)
                    one.blame(path, f"{limit[less][resource]} is more than {more}, {limit[more][resource]}")


def _amounts(given: Any) -> dict[str, float]:
    found = {str(name): quantity(value) for name, value in given.items()} if isinstance(given, dict) else {}
    return {name: value for name, value in found.items() if value is not None}


def _check_priority(one: Manifest) -> None:
    value = one.body.get("value")
    own = str(one.metadata.get("name")).startswith("system-")
    if isinstance(value, int) and value > _MOST_PRIORITY and not own:
        one.blame(
            ("value",), f"must be {_MOST_PRIORITY:,} or less, got {value:,}: more is for the cluster itself"
        )


def _check_stateful(one: Manifest) -> None:
    if one.value("spec", "serviceName") == "":
        one.blame(("spec", "serviceName"), "must not be empty: it names the headless Service of the pods")


def _check_job(one: Manifest) -> None:
    if one.value("spec", "completionMode") == "Indexed" and one.value("spec", "completions") is None:
        one.blame(("spec", "completions"), "is required and missing, because the completionMode is Indexed")
    for number, rule in enumerate(one.value("spec", "podFailurePolicy", "rules") or ()):
        path: FieldPath = ("spec", "podFailurePolicy", "rules", number, "action")
        action = rule.get("action") if isinstance(rule, dict) else None
        check_word(one, path, action, ("FailJob", "FailIndex", "Ignore", "Count"))


_RULES: Mapping[str, Callable[[Manifest], None]] = {
    "Service": _check_service,
    "PersistentVolumeClaim": _check_claim,
    "Ingress": _check_ingress,
    "NetworkPolicy": _check_policy,
    "RoleBinding": _check_binding,
    "ClusterRoleBinding": _check_binding,
    "ResourceQuota": _check_quota,
    "LimitRange": _check_range,
    "PriorityClass": _check_priority,
    "StatefulSet": _check_stateful,
    "Job": _check_job,
}


# -- pods ---------------------------------------------------------------------------------------------------
def check_container_rules(pod: PodSpec) -> None:
    taken: dict[tuple[Any, ...], str] = {}  # ports of the node
    grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
    for path, container in pod.containers:
        for number, env in enumerate(container.get("env") or ()):
            if isinstance(env, dict) and env.get("value") and "valueFrom" in env:
                pod.owner.blame((*path, "env", number), "has value and valueFrom; keep one of the two")
        for number, port in enumerate(container.get("ports") or ()):
            if not isinstance(port, dict) or not port.get("hostPort"):
                continue
            key = port["hostPort"], port.get("protocol", "TCP"), port.get("hostIP", "")
            if key in taken:
                message = f"{port['hostPort']} is taken by container {taken[key]} of the same pod"
                pod.owner.blame((*path, "ports", number, "hostPort"), message)
            taken.setdefault(key, str(container.get("name")))
        _check_user(pod, path, container)
        _check_pre_stop(pod, path, container, grace_s)
        _check_whole(pod, path, container)
    _check_memory_volumes(pod)


def _check_whole(pod: PodSpec, path: FieldPath, container: Mapping[str, Any]) -> None:
    """What devices' plugins offer (rdma/hca, say) is counted, as GPUs are."""
    for kind in ("requests", "limits"):
        for name, asked in ((container.get("resources") or {}).get(kind) or {}).items():
            value = quantity(asked)
            own = "/" in str(name) and not str(name).startswith("kubernetes.io/") and not GPU.match(str(name))
            if own and value is not None and value != int(value):
                text = f"{name} is counted: {asked} cannot be asked for; use a whole number"
                pod.owner.blame((*path, "resources", kind, str(name)), text)


def _check_memory_volumes(pod: PodSpec) -> None:
    """Files in memory count as memory of the containers that write them."""
    limits = [(one.get("resources") or {}).get("limits", {}).get("memory") for _, one in pod.containers]
    if None in limits or not limits:
        return
    whole = sum(quantity(one) or 0.0 for one in limits)
    for number, volume in enumerate(pod.spec.get("volumes") or ()):
        empty = volume.get("emptyDir") if isinstance(volume, dict) else None
        if not isinstance(empty, dict) or empty.get("medium") != "Memory":
            continue
        size = quantity(empty.get("sizeLimit", 0))
        if size is not None and size > whole:
            text = f"{empty['sizeLimit']} in memory is more than the memory of the containers, {limits[0]}"
            path: FieldPath = (*pod.path, "volumes", number, "emptyDir", "sizeLimit")
            pod.owner.blame(path, text + ": a full volume would kill them")


def _check_user(pod: PodSpec, path: FieldPath, container: Mapping[str, Any]) -> None:
    own, whole = container.get("securityContext"), pod.spec.get("securityContext")
    given = {**(whole if isinstance(whole, dict) else {}), **(own if isinstance(own, dict) else {})}
    if given.get("runAsNonRoot") is True and given.get("runAsUser") == 0:
        at: FieldPath = (*path, "securityContext", "runAsUser")
        if not isinstance(own, dict) or "runAsUser" not in own:
            at = (*pod.path, "securityContext", "runAsUser")
        pod.owner.blame(at, "is 0, which is root, and runAsNonRoot is true: the container would never start")


def _check_pre_stop(pod: PodSpec, path: FieldPath, container: Mapping[str, Any], grace_s: Any) -> None:
    lifecycle = container.get("lifecycle")
    hook = lifecycle.get("preStop") if isinstance(lifecycle, dict) else None
    if not isinstance(hook, dict) or not isinstance(grace_s, int):
        return
    sleep, command = hook.get("sleep"), hook.get("exec")
    words = command.get("command") if isinstance(command, dict) else None
    seconds: Any = sleep.get("seconds") if isinstance(sleep, dict) else None
    if isinstance(words, list) and (found := re.search(r"\bsleep (\d+)\b", " ".join(map(str, words)))):
        seconds = int(found[1])
    if isinstance(seconds, int) and seconds >= grace_s:
        pod.owner.blame(
            (*path, "lifecycle", "preStop"),
            f"sleeps {seconds} s, and the pod is killed {grace_s} s after it is asked to end: raise "
            f"terminationGracePeriodSeconds above {seconds}",
        )
