"""Rules for Ray clusters on Kubernetes: names of groups, options of `ray start`, and whether the replicas of Ray
Serve find GPUs on the workers. Called with all objects together.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from cumulo.base.nearest import nearest
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.objects import ObjectSet

_GROUP = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?")
_CLUSTERS = {"RayCluster": "", "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
_START = (
    "address", "port", "num-cpus", "num-gpus", "memory", "object-store-memory", "resources", "labels", "block",
    "dashboard-host", "dashboard-port", "dashboard-agent-listen-port", "metrics-export-port", "node-ip-address",
    "redis-password", "redis-username", "plasma-directory", "system-config", "log-color", "disable-usage-stats",
    "include-dashboard", "ray-client-server-port", "node-manager-port", "object-manager-port",
    "min-worker-port", "max-worker-port", "worker-port-list", "temp-dir", "no-monitor", "tracing-startup-hook",
)  # fmt: skip
_ENTRY = "cumulo.cluster.drivers.kubernetes.ray_entry"
_APPLICATIONS = ("front", "engines")


def check_ray(one: Manifest, objects: ObjectSet) -> None:
    if one.kind not in _CLUSTERS:
        return
    start: FieldPath = ("spec", *filter(None, [_CLUSTERS[one.kind]]))
    groups: list[FieldPath] = [(*start, "headGroupSpec")]
    groups += [
        (*start, "workerGroupSpecs", number)
        for number in range(len(one.value(*start, "workerGroupSpecs") or ()))
    ]
    for path in groups:
        name, options = one.value(*path, "groupName"), one.value(*path, "rayStartParams")
        if isinstance(name, str) and not _GROUP.fullmatch(name):
            text = f"{name!r} becomes a part of the pods' names; use lower-case letters, digits and hyphens"
            one.blame((*path, "groupName"), text)
        for option in options if isinstance(options, dict) else ():
            if option not in _START and (close := nearest(str(option), _START, likeness=0.8)):
                text = f"is not an option of `ray start`; did you mean {close[0]}?"
                one.blame((*path, "rayStartParams", str(option)), text)
    if one.kind == "RayService":
        _check_devices(one, groups, objects)


def _check_devices(one: Manifest, groups: list[FieldPath], objects: ObjectSet) -> None:
    """A replica lies on one worker, and all of them on as many workers as there may be."""
    pods = {pod.path[:-2]: int(pod.gpus) for pod in objects.pods if pod.owner is one}
    each = {path: pods.get(path, 0) for path in groups}
    largest = max(each.values(), default=0)
    total = 0
    for path, gpus in each.items():
        most = one.value(*path, "maxReplicas")
        count = one.value(*path, "replicas") if most is None else most
        total += gpus * (count if isinstance(count, int) else 1)
    for where, asked, replicas in _asked(one):
        if asked > largest:
            text = f"{where} asks for {asked:g} GPUs in one replica, and the largest worker has {largest}"
            one.blame(("spec", "serveConfigV2"), f"{text}: it would never start")
        elif asked * replicas > total:
            text = f"{where} needs {asked * replicas:g} GPUs for {replicas} replicas, and all workers have {total}"
            one.blame(("spec", "serveConfigV2"), f"{text} (maxReplicas)")


def _asked(one: Manifest) -> Iterator[tuple[str, float, int]]:
    """The GPUs of a replica, and how many replicas there are, of each deployment that says so."""
    try:
        config = yaml.safe_load(str(one.value("spec", "serveConfigV2")))
    except yaml.YAMLError:
        return  # said elsewhere
    applications = config.get("applications") if isinstance(config, dict) else None
    for number, app in enumerate(applications if isinstance(applications, list) else ()):
        if not isinstance(app, dict):
            continue
        where = f"applications[{number}]"
        module, _, name = str(app.get("import_path")).replace(":", ".").rpartition(".")
        if f"{module}.{name}" == _ENTRY or (module == _ENTRY and name not in _APPLICATIONS):
            known = " or ".join(f"{_ENTRY}:{one}" for one in _APPLICATIONS)
            one.blame(("spec", "serveConfigV2"), f"{where}.import_path must be {known}")
        args = app.get("args")
        if module == _ENTRY and name == "engines" and isinstance(args, dict):
            yield f"{where}.args", *_amounts(args, "gpus", "replicas")
        for place, deployment in enumerate(app.get("deployments") or ()):
            options = deployment.get("ray_actor_options") if isinstance(deployment, dict) else None
            if isinstance(options, dict):
                both = {**deployment, **options}
                yield f"{where}.deployments[{place}]", *_amounts(both, "num_gpus", "num_replicas")


def _amounts(given: Mapping[str, Any], gpus: str, replicas: str) -> tuple[float, int]:
    asked, count = given.get(gpus), given.get(replicas)
    return (
        float(asked) if isinstance(asked, int | float) and not isinstance(asked, bool) else 0.0,
        count if isinstance(count, int) and not isinstance(count, bool) else 1,
    )
