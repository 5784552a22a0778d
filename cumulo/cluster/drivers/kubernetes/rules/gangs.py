"""Rules for what holds pods together: Volcano's PodGroups and HyperNodes, Kueue's topologies and flavors,
disruption budgets, rollouts of LeaderWorkerSets. Called with all objects together.
"""

from collections.abc import Mapping
from typing import Any

from cumulo.base.nearest import did_you_mean, nearest
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.objects import ObjectSet
from cumulo.cluster.drivers.kubernetes.pods import PodSpec, quantity

_GROUP = "scheduling.k8s.io/group-name"
_QUEUE = "scheduling.volcano.sh/queue-name"
_TOPOLOGY = ("kueue.x-k8s.io/podset-required-topology", "kueue.x-k8s.io/podset-preferred-topology")
_SCHEDULERS = ("default-scheduler", "volcano", "yunikorn")


def check_gangs(one: Manifest, objects: ObjectSet) -> None:
    rule = _RULES.get(one.kind)
    if rule is not None:
        rule(one, objects)


def check_pod_gang(pod: PodSpec, objects: ObjectSet) -> None:
    """Groups, queues, levels of the network and schedulers that a pod's template names."""
    start: FieldPath = (*pod.path[:-1], "metadata", "annotations")
    given = pod.owner.value(*start)
    for name, kind in ((_GROUP, "PodGroup"), (_QUEUE, "Queue")):
        if isinstance(given, dict):
            objects.need(pod.owner, (*start, name), kind, given.get(name))
    levels = [
        str(level.get("nodeLabel"))
        for one in objects.manifests
        if one.kind == "Topology"
        for level in one.value("spec", "levels") or ()
        if isinstance(level, dict)
    ]
    for name in _TOPOLOGY:
        label = given.get(name) if isinstance(given, dict) else None
        if isinstance(label, str) and levels and label not in levels:
            text = f"no Topology here has the level {label}{did_you_mean(label, levels)}"
            pod.owner.blame((*start, name), text)
    _check_scheduler(pod.owner, (*pod.path, "schedulerName"))
    if pod.owner.kind == "Job" and pod.owner.group == "batch":
        objects.need(pod.owner, (*pod.path, "subdomain"), "Service", pod.spec.get("subdomain"))


def _check_scheduler(one: Manifest, path: FieldPath) -> None:
    """Others exist, volcano-2 say: only a slip is blamed."""
    name = one.value(*path)
    close = nearest(name, _SCHEDULERS, likeness=0.85) if isinstance(name, str) else []
    if close and name not in _SCHEDULERS and close[0].count("-") == str(name).count("-"):
        one.blame(path, f"there is no scheduler {name}; did you mean {close[0]}?")


def _check_volcano_queue(one: Manifest, objects: ObjectSet) -> None:
    """What is guaranteed is within what is deserved, and that within what the queue can have at most."""
    del objects
    places: list[FieldPath] = [
        ("spec", "guarantee", "resource"),
        ("spec", "deserved"),
        ("spec", "capability"),
    ]
    for number, less in enumerate(places):
        given = one.value(*less)
        for name, value in given.items() if isinstance(given, dict) else ():
            for more in places[number + 1 :]:
                most = one.value(*more, name)
                low, high = quantity(value), quantity(most) if most is not None else None
                if low is not None and high is not None and low > high:
                    one.blame((*less, str(name)), f"{value} is more than {more[1]}, {most}")


def _check_volcano_job(one: Manifest, objects: ObjectSet) -> None:
    del objects
    if one.group == "batch.volcano.sh":
        _check_scheduler(one, ("spec", "schedulerName"))


def check_flavors(one: Manifest, pods: list[PodSpec], queue: Manifest, objects: ObjectSet) -> None:
    """Kueue puts a flavor's labels on the pods of a workload: they must not ask for another value."""
    labels: list[Mapping[str, Any]] = []
    for group in queue.value("spec", "resourceGroups") or ():
        for flavor in group.get("flavors") or ():
            found = objects.find("ResourceFlavor", str(flavor.get("name")), "")
            nodes = found.value("spec", "nodeLabels") if found is not None else {}
            labels.append(nodes if isinstance(nodes, dict) else {})
    for pod in pods:
        wanted = pod.spec.get("nodeSelector")
        for key, value in wanted.items() if isinstance(wanted, dict) else ():
            offered = [str(found[key]) for found in labels if key in found]
            if len(offered) == len(labels) > 0 and value not in offered:
                text = f"no flavor of the ClusterQueue {queue.name} has nodes with {value}: they have "
                one.blame((*pod.path, "nodeSelector", str(key)), text + " or ".join(sorted(set(offered))))


def _check_pod_group(one: Manifest, objects: ObjectSet) -> None:
    members = [pod for pod in objects.pods if _group_of(pod) == one.name]
    least, count = one.value("spec", "minMember"), sum(pod.count for pod in members)
    if members and isinstance(least, int) and least > count:
        text = f"{least} is more than the {count} pods of the group: none of them would ever start"
        one.blame(("spec", "minMember"), text)
    queue = objects.find("Queue", str(one.value("spec", "queue") or "default"), "")
    capability = queue.value("spec", "capability") if queue is not None else None
    if queue is None or not isinstance(capability, dict):
        return
    resources = one.value("spec", "minResources")
    for name, value in resources.items() if isinstance(resources, dict) else ():
        asked, has = quantity(value), quantity(capability.get(name, "inf"))
        if asked is not None and has is not None and asked > has:
            text = (
                f"{value} is more than the Queue {queue.name} has, {capability[name]}: it would never start"
            )
            one.blame(("spec", "minResources", str(name)), text)
    for name in sorted({name for pod in members for name in pod.gpu_names}):
        asked = sum(pod.resource(name) * pod.count for pod in members)
        has = quantity(capability.get(name, "inf"))
        if has is not None and asked > has:
            text = f"its pods ask for {asked:g} of {name}, and the Queue {queue.name} has {has:g}"
            one.blame(("spec", "queue"), text)


def _group_of(pod: PodSpec) -> Any:
    given = pod.owner.value(*pod.path[:-1], "metadata", "annotations")
    return given.get(_GROUP) if isinstance(given, dict) else None


def _check_hyper_node(one: Manifest, objects: ObjectSet) -> None:
    tier = one.value("spec", "tier")
    for number, member in enumerate(one.value("spec", "members") or ()):
        path: FieldPath = ("spec", "members", number, "selector", "exactMatch", "name")
        if not isinstance(member, dict) or member.get("type") != "HyperNode":
            continue
        name = one.value(*path)
        objects.need(one, path, "HyperNode", name)
        below = objects.find("HyperNode", str(name), "")
        inner = below.value("spec", "tier") if below is not None else None
        if isinstance(tier, int) and isinstance(inner, int) and inner >= tier:
            text = f"must be more than the tier of its member {name}, which is {inner}; got {tier}"
            one.blame(("spec", "tier"), text)


def _check_budget(one: Manifest, objects: ObjectSet) -> None:
    """A budget that allows no eviction blocks every drain of a node, and every upgrade of the cluster."""
    gone, left = one.value("spec", "maxUnavailable"), one.value("spec", "minAvailable")
    advice = "no pod could be evicted, so that a node with one of them could never be drained"
    for name, share in (("maxUnavailable", gone), ("minAvailable", left)):
        if (
            isinstance(share, str)
            and share.endswith("%")
            and share[:-1].isdecimal()
            and int(share[:-1]) > 100
        ):
            one.blame(("spec", name), f"must be 100% or less, got {share}")
    if str(gone) in ("0", "0%"):
        one.blame(("spec", "maxUnavailable"), f"is {gone}: {advice}; use 1")
    pods = objects.chosen_pods(one.value("spec", "selector", "matchLabels"), one.namespace)
    count = sum(pod.count for pod in pods)
    if left == "100%" or (isinstance(left, int) and not isinstance(left, bool) and 0 < count <= left):
        has = f" of {count} pods" if count else ""
        one.blame(("spec", "minAvailable"), f"is {left}{has}: {advice}; use maxUnavailable: 1")


def _check_rollout(one: Manifest, objects: ObjectSet) -> None:
    del objects
    path: FieldPath = ("spec", "rolloutStrategy", "rollingUpdateConfiguration")
    given = one.value(*path)
    if not isinstance(given, dict):
        return
    for name in ("maxUnavailable", "maxSurge"):
        value = given.get(name)
        if isinstance(value, str) and not value.removesuffix("%").isdecimal():
            one.blame((*path, name), f"{value!r} is not a number or a percentage; write 1 or 25%")
    shares = [
        str(given.get(name, usual)).rstrip("%") for name, usual in (("maxUnavailable", 1), ("maxSurge", 0))
    ]
    if shares == ["0", "0"]:
        one.blame(path, "maxUnavailable and maxSurge are both 0: no group could ever be replaced")


def _check_pool(one: Manifest, objects: ObjectSet) -> None:
    pods = objects.chosen_pods(one.value("spec", "selector", "matchLabels"), one.namespace)
    numbers = {
        port["containerPort"]
        for pod in pods
        for _, container in pod.containers
        for port in container.get("ports") or ()
        if isinstance(port.get("containerPort"), int)
    }
    for number, port in enumerate(one.value("spec", "targetPorts") or ()):
        value = port.get("number") if isinstance(port, dict) else None
        if isinstance(value, int) and numbers and value not in numbers:
            listed = ", ".join(map(str, sorted(numbers)))
            one.blame(
                ("spec", "targetPorts", number, "number"), f"its pods listen on {listed}, not on {value}"
            )
    picker = one.value("spec", "endpointPickerRef", "name")
    found = objects.find("Service", str(picker), one.namespace)
    asked = one.value("spec", "endpointPickerRef", "port", "number")
    ports = [port.get("port") for port in found.value("spec", "ports") or ()] if found is not None else []
    if isinstance(asked, int) and ports and asked not in ports:
        listed = ", ".join(map(str, ports))
        text = f"the Service {picker} has no port {asked}; its ports are {listed}"
        one.blame(("spec", "endpointPickerRef", "port", "number"), text)


_RULES = {
    "Queue": _check_volcano_queue,
    "Job": _check_volcano_job,
    "PodGroup": _check_pod_group,
    "HyperNode": _check_hyper_node,
    "PodDisruptionBudget": _check_budget,
    "LeaderWorkerSet": _check_rollout,
    "InferencePool": _check_pool,
}
