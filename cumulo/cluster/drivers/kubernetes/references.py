"""What objects say of each other: queues, secrets, targets of autoscalers, selectors. Called by the check, with all
objects that are applied together.

An object that is in the cluster already is named to the check as KIND/NAME.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cumulo.base.nearest import did_you_mean, nearest
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.objects import ObjectSet
from cumulo.cluster.drivers.kubernetes.pods import GPU, PodSpec, quantity
from cumulo.cluster.drivers.kubernetes.rules.gangs import check_flavors, check_gangs, check_pod_gang
from cumulo.cluster.drivers.kubernetes.rules.network import check_network, ports_of
from cumulo.cluster.drivers.kubernetes.rules.programs import check_programs
from cumulo.cluster.drivers.kubernetes.rules.ray import check_ray
from cumulo.cluster.drivers.kubernetes.rules.scaling import check_scaling
from cumulo.cluster.drivers.kubernetes.schemas import shipped_book

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# Of a kind: a field, and the kind that it names.
_FIELDS: Mapping[str, Sequence[tuple[FieldPath, str]]] = {
    "LocalQueue": [(("spec", "clusterQueue"), "ClusterQueue")],
    "ResourceFlavor": [(("spec", "topologyName"), "Topology")],
    "PodGroup": [(("spec", "queue"), "Queue"), (("spec", "priorityClassName"), "PriorityClass")],
    "Queue": [(("spec", "parent"), "Queue")],
    "Job": [(("spec", "queue"), "Queue"), (("spec", "priorityClassName"), "PriorityClass")],
    "StatefulSet": [(("spec", "serviceName"), "Service")],
    "InferencePool": [(("spec", "endpointPickerRef", "name"), "Service")],
}
_CLAIMS = {"resourceClaimName": "ResourceClaim", "resourceClaimTemplateName": "ResourceClaimTemplate"}
# The same, for kinds that a cluster comes with.
_CLASSES: Mapping[str, Sequence[tuple[FieldPath, str]]] = {
    "PersistentVolumeClaim": [(("spec", "storageClassName"), "StorageClass")],
    "Gateway": [(("spec", "gatewayClassName"), "GatewayClass")],
    "Ingress": [(("spec", "ingressClassName"), "IngressClass")],
}


def check_references(objects: ObjectSet) -> None:
    seen: dict[tuple[str, str, str, str], Manifest] = {}
    for one in objects.manifests:
        _check_twice(one, seen)
        for path, kind in _FIELDS.get(one.kind, ()):
            if one.kind != "Job" or one.group == "batch.volcano.sh":
                objects.need(one, path, kind, one.value(*path))
        for path, kind in _CLASSES.get(one.kind, ()):
            objects.need_alike(one, path, kind, one.value(*path))
        _check_queue_label(one, objects)
        _check_kind(one, objects)
        check_network(one, objects)
        check_gangs(one, objects)
        check_scaling(one, objects)
        check_ray(one, objects)
    for pod in objects.pods:
        _check_pod(pod, objects)
        check_pod_gang(pod, objects)
    check_programs(objects)


def _check_twice(one: Manifest, seen: dict[tuple[str, str, str, str], Manifest]) -> None:
    if not one.name or one.kind == "Kustomization":
        return
    key = (one.group, one.kind, one.namespace, one.name)
    if seen.setdefault(key, one) is not one:
        one.blame(
            ("metadata", "name"),
            f"another {one.kind} {one.name} is in {seen[key].file}; one would replace the other",
        )


# -- queues and quotas --------------------------------------------------------------------------------------
def _check_queue_label(one: Manifest, objects: ObjectSet) -> None:
    labels = one.metadata.get("labels")
    name = labels.get(_QUEUE_LABEL) if isinstance(labels, dict) else None
    if name is None:
        queues = [queue.name for queue in objects.manifests if queue.kind == "LocalQueue"]
        if queues and one.kind == "Job" and one.group == "batch" and one.value("spec", "suspend") is True:
            one.blame(
                ("metadata", "labels", _QUEUE_LABEL),
                "is missing, and the Job is suspended (suspend: true): nothing would start it. Use "
                f"{' or '.join(queues)}, or remove suspend",
            )
        return
    objects.need(one, ("metadata", "labels", _QUEUE_LABEL), "LocalQueue", name)
    local = objects.find("LocalQueue", str(name), one.namespace)
    queue = (
        objects.find("ClusterQueue", str(local.value("spec", "clusterQueue")), "")
        if local is not None
        else None
    )
    if queue is None:
        return
    _check_fits(
        one, objects, _nominal(queue), f"the ClusterQueue {queue.name}", ("metadata", "labels", _QUEUE_LABEL)
    )
    check_flavors(one, [pod for pod in objects.pods if pod.owner is one], queue, objects)


def _nominal(queue: Manifest) -> dict[str, float]:
    """What a workload can get at most; without the cohort's part, where that is not limited."""
    found: dict[str, float] = {}
    cohort = queue.value("spec", "cohortName") or queue.value("spec", "cohort")
    for group in queue.value("spec", "resourceGroups") or ():
        for flavor in group.get("flavors") or () if isinstance(group, dict) else ():
            for one in flavor.get("resources") or () if isinstance(flavor, dict) else ():
                name, amount = str(one.get("name")), quantity(one.get("nominalQuota", "inf")) or 0.0
                if cohort:
                    borrowed = one.get("borrowingLimit")
                    amount += float("inf") if borrowed is None else quantity(borrowed) or 0.0
                found[name] = max(found.get(name, 0.0), amount)
    return found


def _check_fits(
    one: Manifest, objects: ObjectSet, quota: Mapping[str, float], what: str, path: FieldPath
) -> None:
    pods = [pod for pod in objects.pods if pod.owner is one]
    for name in sorted({name for pod in pods for name in pod.gpu_names}):
        asked = sum(pod.resource(name) * pod.count for pod in pods)
        if name not in quota:
            one.blame(
                path, f"{what} has no quota for {name}, which this asks for: it would never be admitted"
            )
        elif asked > quota[name]:
            one.blame(
                path,
                f"asks for {asked:g} of {name}, and {what} has {quota[name]:g}: it would never be admitted",
            )
    for name in quota:
        if any(name in pod.gpu_names for pod in pods):
            continue
        asked = sum(max(pod.resource(name), pod.resource(name, "requests")) * pod.count for pod in pods)
        if asked > quota[name]:
            said = f"{asked / 2**30:g}Gi" if name == "memory" else f"{asked:g}"
            has = f"{quota[name] / 2**30:g}Gi" if name == "memory" else f"{quota[name]:g}"
            one.blame(path, f"asks for {said} of {name}, and {what} has {has}: it would never be admitted")


# -- kinds --------------------------------------------------------------------------------------------------
def _check_kind(one: Manifest, objects: ObjectSet) -> None:
    if one.kind == "ClusterQueue":
        for number, group in enumerate(one.value("spec", "resourceGroups") or ()):
            for place, flavor in enumerate(group.get("flavors") or () if isinstance(group, dict) else ()):
                path: FieldPath = ("spec", "resourceGroups", number, "flavors", place, "name")
                objects.need(one, path, "ResourceFlavor", one.value(*path))
                del flavor
    elif one.kind == "Job" and one.group == "batch.volcano.sh":
        queue = objects.find("Queue", str(one.value("spec", "queue") or "default"), "")
        capability = queue.value("spec", "capability") if queue is not None else None
        if queue is not None and isinstance(capability, dict):
            quota = {str(name): quantity(amount) or 0.0 for name, amount in capability.items()}
            if any(GPU.match(name) for name in quota):
                _check_fits(one, objects, quota, f"the Queue {queue.name}", ("spec", "queue"))
    elif one.kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        _check_target(one, objects)
    elif one.kind in ("Service", "PodDisruptionBudget", "InferencePool"):
        _check_pod_selector(one, objects)
    elif one.kind == "ServiceMonitor":
        _check_monitor(one, objects)
    elif one.kind in ("RoleBinding", "ClusterRoleBinding"):
        kind = one.value("roleRef", "kind")
        if kind == "Role":
            objects.need(one, ("roleRef", "name"), "Role", one.value("roleRef", "name"))
        for number, subject in enumerate(one.value("subjects") or ()):
            if isinstance(subject, dict) and subject.get("kind") == "ServiceAccount":
                objects.need(one, ("subjects", number, "name"), "ServiceAccount", subject.get("name"))
    elif one.kind == "TriggerAuthentication":
        for number, ref in enumerate(one.value("spec", "secretTargetRef") or ()):
            _need_key(one, ("spec", "secretTargetRef", number), "Secret", ref, objects)


def _check_target(one: Manifest, objects: ObjectSet) -> None:
    target = one.value("spec", "scaleTargetRef")
    if not isinstance(target, dict):
        return
    kind = str(target.get("kind") or "Deployment")
    kinds = sorted({name for _, name in shipped_book().kinds})
    if kind not in kinds and (close := nearest(kind, kinds)):
        one.blame(("spec", "scaleTargetRef", "kind"), f"there is no kind {kind}; did you mean {close[0]}?")
        return
    objects.need(one, ("spec", "scaleTargetRef", "name"), kind, target.get("name"))
    found = objects.find(kind, str(target.get("name")), one.namespace)
    given = target.get("apiVersion")
    if found is not None and given and given != found.api_version:
        one.blame(
            ("spec", "scaleTargetRef", "apiVersion"),
            f"{kind} {found.name} is {found.api_version}, not {given}",
        )
    for number, trigger in enumerate(one.value("spec", "triggers") or ()):
        ref = trigger.get("authenticationRef") if isinstance(trigger, dict) else None
        if isinstance(ref, dict) and ref.get("kind", "TriggerAuthentication") == "TriggerAuthentication":
            path: FieldPath = ("spec", "triggers", number, "authenticationRef", "name")
            objects.need(one, path, "TriggerAuthentication", ref.get("name"))


def _check_pod_selector(one: Manifest, objects: ObjectSet) -> None:
    path: FieldPath = ("spec", "selector") if one.kind == "Service" else ("spec", "selector", "matchLabels")
    wanted = one.value(*path)
    pods = [pod for pod in objects.pods if pod.owner.namespace == one.namespace]
    if not isinstance(wanted, dict) or not wanted:
        return
    if not pods:
        there = {
            pod.owner.namespace
            for pod in objects.pods
            if all(pod.labels.get(key) == value for key, value in wanted.items())
        }
        if there:
            one.blame(
                path,
                f"no pod is in the namespace {one.namespace}; those with these labels are in "
                f"{' and '.join(sorted(there))}",
            )
        return
    chosen = [pod for pod in pods if all(pod.labels.get(key) == value for key, value in wanted.items())]
    if not chosen:
        if any("ray.io" in str(key) or str(key).startswith("leaderworkerset") for key in wanted):
            return  # labels that an operator gives to its pods
        labels = [", ".join(f"{key}={value}" for key, value in pod.labels.items()) for pod in pods]
        shown = ", ".join(f"{key}={value}" for key, value in wanted.items())
        one.blame(path, f"no pod has the labels {shown}; pods here have {' or '.join(sorted(set(labels)))}")
        return
    names, numbers = ports_of(chosen)
    if one.kind == "Service":
        for number, port in enumerate(one.value("spec", "ports") or ()):
            target = port.get("targetPort", port.get("port")) if isinstance(port, dict) else None
            if isinstance(target, str) and not target.isdigit() and target not in names:
                one.blame(
                    ("spec", "ports", number, "targetPort"),
                    f"its pods have no port {target}{did_you_mean(target, sorted(names))}",
                )
            elif isinstance(target, int) and numbers and target not in numbers:
                one.blame(
                    ("spec", "ports", number, "targetPort"),
                    f"its pods listen on {', '.join(map(str, sorted(numbers)))}, not on {target}",
                )


def _check_monitor(one: Manifest, objects: ObjectSet) -> None:
    wanted = one.value("spec", "selector", "matchLabels")
    services = [other for other in objects.manifests if other.kind == "Service"]
    if not isinstance(wanted, dict) or not services:
        return
    chosen = [
        other
        for other in services
        if all((other.metadata.get("labels") or {}).get(key) == value for key, value in wanted.items())
    ]
    if not chosen:
        shown = ", ".join(f"{key}={value}" for key, value in wanted.items())
        one.blame(("spec", "selector", "matchLabels"), f"no Service has the labels {shown}")
        return
    ports = {str(port.get("name")) for other in chosen for port in other.value("spec", "ports") or ()}
    for number, endpoint in enumerate(one.value("spec", "endpoints") or ()):
        port = endpoint.get("port") if isinstance(endpoint, dict) else None
        if port is not None and port not in ports:
            one.blame(
                ("spec", "endpoints", number, "port"),
                f"the Service {chosen[0].name} has no port {port}{did_you_mean(str(port), sorted(ports))}",
            )


# -- pods ---------------------------------------------------------------------------------------------------
def _check_pod(pod: PodSpec, objects: ObjectSet) -> None:
    owner, spec = pod.owner, pod.spec
    objects.need(owner, (*pod.path, "serviceAccountName"), "ServiceAccount", spec.get("serviceAccountName"))
    objects.need(owner, (*pod.path, "priorityClassName"), "PriorityClass", spec.get("priorityClassName"))
    for number, secret in enumerate(spec.get("imagePullSecrets") or ()):
        if isinstance(secret, dict):
            objects.need(owner, (*pod.path, "imagePullSecrets", number, "name"), "Secret", secret.get("name"))
    objects.need_alike(owner, (*pod.path, "runtimeClassName"), "RuntimeClass", spec.get("runtimeClassName"))
    for number, claim in enumerate(spec.get("resourceClaims") or ()):
        for field, kind in _CLAIMS.items():
            if isinstance(claim, dict):
                objects.need(owner, (*pod.path, "resourceClaims", number, field), kind, claim.get(field))
    for path, kind, name in _volume_references(pod):
        objects.need(owner, path, kind, name)
    for path, container in pod.containers:
        for number, one in enumerate(container.get("env") or ()):
            source = one.get("valueFrom") if isinstance(one, dict) else None
            for field, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                if isinstance(source, dict) and isinstance(source.get(field), dict):
                    here = (*path, "env", number, "valueFrom", field)
                    _need_key(owner, here, kind, source[field], objects)
        for number, one in enumerate(container.get("envFrom") or ()):
            for field, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                ref = one.get(field) if isinstance(one, dict) else None
                if isinstance(ref, dict) and not ref.get("optional"):
                    objects.need(owner, (*path, "envFrom", number, field, "name"), kind, ref.get("name"))


def _volume_references(pod: PodSpec) -> Iterator[tuple[FieldPath, str, Any]]:
    for number, volume in enumerate(pod.spec.get("volumes") or ()):
        for source, name, kind in (
            ("secret", "secretName", "Secret"),
            ("configMap", "name", "ConfigMap"),
            ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
        ):
            given = volume.get(source) if isinstance(volume, dict) else None
            if isinstance(given, dict) and not given.get("optional"):
                yield (*pod.path, "volumes", number, source, name), kind, given.get(name)


def _need_key(owner: Manifest, path: FieldPath, kind: str, ref: Any, objects: ObjectSet) -> None:
    if not isinstance(ref, dict) or ref.get("optional"):
        return
    objects.need(owner, (*path, "name"), kind, ref.get("name"))
    found, key = objects.find(kind, str(ref.get("name")), owner.namespace), ref.get("key")
    if found is None or key is None:
        return
    keys = {str(one) for part in ("data", "stringData", "binaryData") for one in found.value(part) or ()}
    if key not in keys:
        owner.blame(
            (*path, "key"), f"the {kind} {found.name} has no key {key}{did_you_mean(str(key), sorted(keys))}"
        )
