"""Manifests checked against the plan that they are to carry out: GPUs of a replica, replicas, tp and pp, and what
is left unused of a node. Called by `cumulo kubernetes check --plan`.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

from cumulo.base.strict import build
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import PodSpec, gpu_path, option_value, pods_of
from cumulo.errors import ConfigError
from cumulo.plan.serve.plan_file import ServePlanFile

_WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "RayService")


def read_plan(path: Path) -> ServePlanFile:
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the plan {path}: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or "planned_for" not in found:
        raise ConfigError(f"{path} is not a plan that `cumulo plan serve --out` wrote: it has no planned_for")
    return build(ServePlanFile, found, str(path))


def check_against_plan(manifests: Sequence[Manifest], plan: ServePlanFile, node_gpus: int) -> None:
    """The workloads with GPUs are those of the plan."""
    pods = [
        pod
        for one in manifests
        if one.kind in _WORKLOADS
        for pod in pods_of(one)
        if pod.gpus or _divided(pod)
    ]
    if not pods:
        for one in manifests[:1]:
            one.blame(("kind",), f"no object here serves with GPUs, and the plan has {plan.ranks} of them")
        return
    whole = True
    for pod in pods:
        whole = _check_replica(pod, plan, node_gpus) and whole
    if whole:
        _check_counts(pods, plan)


def _divided(pod: PodSpec) -> bool:
    return pod.parallel("tp") * pod.parallel("pp") > 1


def _check_replica(pod: PodSpec, plan: ServePlanFile, node_gpus: int) -> bool:
    ranks, have = plan.tp * plan.pp, int(pod.gpus) * pod.group
    shape = f"tp={plan.tp}" + (f", pp={plan.pp}" if plan.pp > 1 else "")
    for name, planned in (("tp", plan.tp), ("pp", plan.pp)):
        given = _given(pod, name)
        if given is not None and given != planned:
            pod.owner.blame(
                _command_path(pod, name), f"--{name} is {given}, and the plan has {name}={planned}"
            )
            return False
    if have == ranks:
        return True
    where = gpu_path(pod)
    if have < ranks:
        pod.owner.blame(where, f"a replica of the plan needs {ranks} GPUs ({shape}), and this has {have}")
    else:
        unused = (
            f"{have - ranks} of them are never used" if have % ranks else f"the plan uses {ranks} of them"
        )
        half = f"; a node of {node_gpus} GPUs is partly used" if node_gpus % max(1, int(pod.gpus)) else ""
        pod.owner.blame(
            where,
            f"this asks for {have} GPUs on {node_gpus}-GPU nodes with {shape}: {unused}{half}. Ask for {ranks}",
        )
    return False


def _check_counts(pods: Sequence[PodSpec], plan: ServePlanFile) -> None:
    """Engines in all, and of each role where prefill and decode are apart."""
    roles: dict[str, list[PodSpec]] = {}
    for pod in pods:
        roles.setdefault(_role(pod) if plan.prefill else "", []).append(pod)
    planned = {"": plan.engines} if not plan.prefill else {"prefill": plan.prefill, "decode": plan.decode}
    for role, count in planned.items():
        found = roles.get(role, [])
        engines = sum(pod.count for pod in found) // max(1, found[0].group if found else 1)
        what = f"{role} engines" if role else "replicas"
        if not found:
            pods[0].owner.blame(("kind",), f"the plan has {count} {what}, and no object here runs one")
        elif engines != count:
            gpus = count * plan.tp * plan.pp
            found[0].owner.blame(
                ("spec", "replicas"), f"the plan has {count} {what} ({gpus} GPUs), and this has {engines}"
            )


def _role(pod: PodSpec) -> str:
    words = [
        str(word) for _, one in pod.containers for key in ("command", "args") for word in one.get(key) or ()
    ]
    if "--role" in words[:-1]:
        return words[words.index("--role") + 1]
    return "prefill" if "prefill" in pod.owner.name else "decode"


def _given(pod: PodSpec, name: str) -> int | None:
    path = _command_path(pod, name)
    return pod.parallel(name) if path[-1] in ("command", "args") else None


def _command_path(pod: PodSpec, name: str) -> FieldPath:
    for path, one in pod.containers:
        for key in ("command", "args"):
            words = [word for text in one.get(key) or () for word in str(text).split()]
            if option_value(words, name) is not None:
                return (*path, key)
    return pod.path
