"""Whether the GPUs fit: those of a pod against a node and against the ranks of its program, those of a workload
against its queue's quota, and all of them against the plan that the manifests carry out. Called by the check.
"""

from collections.abc import Iterator, Sequence

from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import PodSpec, gpu_path, pods_of, quantity
from cumulo.cluster.drivers.kubernetes.references import QUEUE_LABEL, ObjectSet
from cumulo.cluster.served_shape import ServedShape
from cumulo.errors import ConfigError
from cumulo.plan.serve.plan_file import ServePlanFile

_WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "RayService")


def check_fit(objects: ObjectSet, node_gpus: int) -> None:
    for pod in objects.pods:
        if pod.owner.sound:
            _check_gpus(pod, node_gpus)
    for one in objects.manifests:
        if one.sound:
            _check_quota(one, objects)


# -- pods and nodes -----------------------------------------------------------------------------------------
def _check_gpus(pod: PodSpec, node_gpus: int) -> None:
    """Against a node, and against how the program divides the model: a rank has a GPU of its own."""
    sizes = {name: pod.parallel(name) for name in ("tp", "pp", "dp", "ep")}
    gpus, tp = int(pod.gpus), sizes["tp"]
    try:
        ranks, have = ServedShape(**sizes, replicas=1, prefill=0).ranks, gpus * pod.group
    except ConfigError as error:
        pod.owner.blame(pod.path, str(error))
        return
    shape = " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name in ("tp", "pp"))
    wrong = ""
    if gpus > node_gpus:
        wrong = (
            f"one pod asks for {gpus} GPUs, and a node has {node_gpus}: it would never be placed. Use a "
            f"LeaderWorkerSet with size {-(-gpus // node_gpus)}, or {node_gpus} GPUs or fewer in a pod"
        )
    elif not gpus:
        if ranks > 1 and not pod.serves:  # `cumulo serve` runs on cores where there is no GPU
            wrong = f"{shape} need {ranks} GPUs, and the pod asks for none"
    elif have < ranks:
        wrong = f"{shape} need {ranks} GPUs, and the pod asks for {gpus}: ask for {-(-ranks // pod.group)}"
    elif have % ranks:
        whole = have // ranks * ranks
        wrong = (
            f"this asks for {have} GPUs on {node_gpus}-GPU nodes with {shape.replace(' and pp=1', '')}: "
            f"{have - whole} of them are never used, and the node is half used. Ask for {whole} or {whole + ranks}"
        )
    elif gpus % tp and pod.group > 1:
        wrong = (
            f"tp={tp} does not divide the {gpus} GPUs of a node: a tensor-parallel group would cross nodes"
        )
    if wrong:
        pod.owner.blame(gpu_path(pod), wrong)


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
def check_against_plan(manifests: Sequence[Manifest], plan: ServePlanFile, node_gpus: int) -> None:
    """The workloads with GPUs are those of the plan."""
    pods = [
        pod
        for one in manifests
        if one.sound and one.kind in _WORKLOADS
        for pod in pods_of(one)
        if pod.gpus or pod.parallel("tp") * pod.parallel("pp") > 1
    ]
    if not pods:
        for one in manifests[:1]:
            one.blame(("kind",), f"no object here serves with GPUs, and the plan has {plan.ranks} of them")
        return
    whole = [_check_replica(pod, plan, node_gpus) for pod in pods]
    if all(whole):
        _check_counts(pods, plan)


def _check_replica(pod: PodSpec, plan: ServePlanFile, node_gpus: int) -> bool:
    ranks, have = plan.tp * plan.pp, int(pod.gpus) * pod.group
    shape = f"tp={plan.tp}" + (f", pp={plan.pp}" if plan.pp > 1 else "")
    for name, planned in (("tp", plan.tp), ("pp", plan.pp)):
        path, given = pod.option(name)
        if given and pod.parallel(name) != planned:
            pod.owner.blame(path, f"--{name} is {given}, and the plan has {name}={planned}")
            return False
    if have < ranks:
        text = f"a replica of the plan needs {ranks} GPUs ({shape}), and this has {have}"
        pod.owner.blame(gpu_path(pod), text)
    elif have > ranks:
        unused = (
            f"{have - ranks} of them are never used" if have % ranks else f"the plan uses {ranks} of them"
        )
        text = f"this asks for {have} GPUs on {node_gpus}-GPU nodes with {shape}: {unused}. Ask for {ranks}"
        pod.owner.blame(gpu_path(pod), text)
    return have == ranks


def _check_counts(pods: Sequence[PodSpec], plan: ServePlanFile) -> None:
    """Engines in all, and of each role where prefill and decode are apart."""
    planned = {"": plan.engines} if not plan.prefill else {"prefill": plan.prefill, "decode": plan.decode}
    for role, count in planned.items():
        found = [pod for pod in pods if not role or _role(pod) == role]
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
    return pod.option("role")[1] or ("prefill" if "prefill" in pod.owner.name else "decode")
