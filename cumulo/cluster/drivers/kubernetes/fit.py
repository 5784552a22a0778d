"""Whether the GPUs fit: those of a pod against a node and against the ranks of its program, those of a workload
against its queue's quota, and all of them against the plan that the manifests carry out. Called by the check.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from cumulo.base.strict import build
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import (
    PodSpec,
    gpu_path,
    option_value,
    pods_of,
    quantity,
    words_of,
)
from cumulo.cluster.drivers.kubernetes.references import QUEUE_LABEL, ObjectSet
from cumulo.cluster.served_shape import ServedShape, size_option
from cumulo.errors import ConfigError
from cumulo.plan.serve.plan_file import ServePlanFile

_WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "RayService")


def check_fit(objects: ObjectSet, node_gpus: int) -> None:
    for pod in objects.pods:
        if pod.owner.sound:
            check_gpus(pod, node_gpus)
            for path, container in pod.containers:
                words = words_of(container)
                if _serves(words):
                    _check_ranks(pod, path, words)
    for one in objects.manifests:
        if one.sound:
            _check_quota(one, objects)


# -- pods and nodes -----------------------------------------------------------------------------------------
def check_gpus(pod: PodSpec, node_gpus: int) -> None:
    """Against a node, and against how the program divides the model."""
    gpus, tp, pp = int(pod.gpus), pod.parallel("tp"), pod.parallel("pp")
    where = gpu_path(pod)
    if gpus > node_gpus:
        pods = -(-gpus // node_gpus)
        pod.owner.blame(
            where,
            f"one pod asks for {gpus} GPUs, and a node has {node_gpus}: it would never be placed. Use a "
            f"LeaderWorkerSet with size {pods}, or {node_gpus} GPUs or fewer in a pod",
        )
        return
    if not gpus:
        if tp * pp > 1 and not any(_serves(words_of(one)) for _, one in pod.containers):
            pod.owner.blame(where, f"tp={tp} and pp={pp} need {tp * pp} GPUs, and the pod asks for none")
        return
    ranks, have = tp * pp, gpus * pod.group
    if have < ranks:
        needed = -(-ranks // pod.group)
        pod.owner.blame(
            where, f"tp={tp} and pp={pp} need {ranks} GPUs, and the pod asks for {gpus}: ask for {needed}"
        )
    elif ranks > 1 and have % ranks:
        whole = have // ranks * ranks
        pod.owner.blame(
            where,
            f"this asks for {have} GPUs on {node_gpus}-GPU nodes with tp={tp}{f', pp={pp}' if pp > 1 else ''}: "
            f"{have - whole} of them are never used, and the node is half used. Ask for {whole} or {whole + ranks}",
        )
    elif tp > 1 and gpus % tp and pod.group > 1:
        pod.owner.blame(
            where,
            f"tp={tp} does not divide the {gpus} GPUs of a node: a tensor-parallel group would cross nodes",
        )


def _serves(words: list[str]) -> bool:
    """Whether it is `cumulo serve`, which runs on cores where there is no GPU."""
    return any(words[at : at + 2] == ["cumulo", "serve"] for at in range(len(words)))


def _check_ranks(pod: PodSpec, path: FieldPath, words: list[str]) -> None:
    """A rank has a GPU of its own: as many start in a pod as it asks for."""
    gpus, where = int(pod.gpus), gpu_path(pod)
    options = tuple(words)
    try:
        tp, pp, dp, ep = (size_option(options, name) or 1 for name in ("tp", "pp", "dp", "ep"))
        shape = ServedShape(tp, pp, dp, ep, 1, 0)
        here = shape.ranks - (size_option(options, "remote-ranks") or 0)
        joining = size_option(options, "rank-count") or 1
        replicas = size_option(options, "replicas") or 1
    except ConfigError as error:
        pod.owner.blame((*path, "command"), str(error).removeprefix("serve.options: "))
        return
    if not gpus:
        return
    if "--rank-of" in words:
        if joining != gpus:
            pod.owner.blame(
                where,
                f"the pod starts {joining} rank{'' if joining == 1 else 's'} of the engine and asks for {gpus} "
                f"GPUs: a rank has one GPU; use --rank-count {gpus}",
            )
    elif "--remote-ranks" in words and here != gpus:
        pod.owner.blame(
            where,
            f"{shape.words} has {shape.ranks} ranks; with --remote-ranks {shape.ranks - here} the pod starts "
            f"{here} of them and asks for {gpus} GPUs; use --remote-ranks {shape.ranks - gpus}",
        )
    elif dp * ep > 1 and "--remote-ranks" not in words and here * replicas > gpus:
        need = here * replicas
        pod.owner.blame(where, f"{shape.words} need {need} GPUs, and the pod asks for {gpus}: ask for {need}")


def served_commands(manifests: Sequence[Manifest]) -> Iterator[tuple[FieldPath, list[str], Manifest]]:
    """What containers tell `cumulo serve`, where it is their program; for its own parser."""
    for one in manifests:
        for pod in pods_of(one) if one.sound else ():
            for path, container in pod.containers:
                words = [str(word) for field in ("command", "args") for word in container.get(field) or ()]
                if words[:3] in (["python", "-m", "cumulo"], ["python3", "-m", "cumulo"]):
                    words = words[2:]
                if words[:2] == ["cumulo", "serve"] and not any("$(" in word for word in words):
                    yield (*path, "command" if container.get("command") else "args"), words[2:], one


# -- quotas -------------------------------------------------------------------------------------------------
def _check_quota(one: Manifest, objects: ObjectSet) -> None:
    """A workload that asks for more than its queue can have would never be admitted."""
    pods = [pod for pod in objects.pods if pod.owner is one]
    if one.kind == "Job" and one.group == "batch.volcano.sh":
        path: FieldPath = ("spec", "queue")
        queue = objects.find("Queue", str(one.value(*path) or "default"), "")
        given = queue.value("spec", "capability") if queue is not None and queue.sound else None
        quota = {str(name): quantity(amount) or 0.0 for name, amount in (given or {}).items()}
    else:
        path = ("metadata", "labels", QUEUE_LABEL)
        local = objects.find("LocalQueue", str(one.value(*path)), one.namespace)
        queue = objects.find("ClusterQueue", str(local.value("spec", "clusterQueue")), "") if local else None
        quota = _nominal(queue) if queue is not None and queue.sound else {}
    if queue is None or not quota:
        return
    what = f"the {queue.kind} {queue.name}"
    for name in sorted({name for pod in pods for name in pod.gpu_names} | quota.keys()):
        asked = sum(max(pod.resource(name), pod.resource(name, "requests")) * pod.count for pod in pods)
        if asked and name not in quota and queue.kind == "ClusterQueue":
            text = f"{what} has no quota for {name}, which this asks for: it would never be admitted"
            one.blame(path, text)
        elif asked > quota.get(name, float("inf")):
            said, has = (
                f"{amount / 2**30:g}Gi" if name == "memory" else f"{amount:g}"
                for amount in (asked, quota[name])
            )
            one.blame(path, f"asks for {said} of {name}, and {what} has {has}: it would never be admitted")


def _nominal(queue: Manifest) -> dict[str, float]:
    """What a workload can get at most; a cohort without a limit lends anything."""
    found: dict[str, float] = {}
    cohort = queue.value("spec", "cohortName") or queue.value("spec", "cohort")
    for _, one in queue.matches(("spec", "resourceGroups", "*", "flavors", "*", "resources", "*")):
        name, amount = str(one.get("name")), quantity(one.get("nominalQuota", "inf")) or 0.0
        if cohort:
            borrowed = one.get("borrowingLimit")
            amount += float("inf") if borrowed is None else quantity(borrowed) or 0.0
        found[name] = max(found.get(name, 0.0), amount)
    return found


# -- the plan -----------------------------------------------------------------------------------------------
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
        if one.sound and one.kind in _WORKLOADS
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
