"""What a pod's program is told, against the pod and the objects around it: variables in its command, ports, files
of ConfigMaps, the time to drain, and the nodes, processes and address of `torchrun`. Called with all objects.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.objects import ObjectSet
from cumulo.cluster.drivers.kubernetes.pods import PodSpec, pods_of, words_of

_VARIABLE = re.compile(r"(?<!\$)\$\(([A-Z][A-Z0-9_]*)\)")
_OF_SERVICES = re.compile(
    r"\w+_SERVICE_(HOST|PORT\w*)|\w+_PORT(_\d+_\w+)?|(KUBERNETES|RAY|FQ_RAY|TPU|GCS)_\w+"
)
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun")
_PORTS = {
    "serve": 8000,
    "scaler": 9090,
}  # where `cumulo serve` and `cumulo kubernetes scaler` listen if not told


def check_programs(objects: ObjectSet) -> None:
    for pod in objects.pods:
        for path, container in pod.containers:
            _check_variables(pod, path, container)
            _check_listening(pod, path, container)
            _check_launcher(pod, path, container, objects)
            _check_files(pod, path, container, words_of(container), command_path(path, container), objects)
    for one in objects.manifests:
        if one.kind == "RayJob":
            _check_entry(one, objects)
        elif one.kind == "LeaderWorkerSet":
            _check_leader(one, objects)


def command_path(path: FieldPath, container: Mapping[str, Any]) -> FieldPath:
    return (*path, "command" if container.get("command") else "args")


def told(words: Sequence[str], *names: str) -> str | None:
    """The value of an option by any of its names, as `--name value` or `--name=value`."""
    for number, word in enumerate(words):
        option, gives, value = word.partition("=")
        if option in names:
            return value if gives else (words[number + 1] if number + 1 < len(words) else "")
    return None


def served_commands(manifests: Sequence[Manifest]) -> Iterator[tuple[FieldPath, list[str], Manifest]]:
    """What containers tell `cumulo serve`, where it is their program; for its own parser."""
    for one in manifests:
        for pod in pods_of(one):
            for path, container in pod.containers:
                words = [str(word) for field in ("command", "args") for word in container.get(field) or ()]
                if words[:3] in (["python", "-m", "cumulo"], ["python3", "-m", "cumulo"]):
                    words = words[2:]
                if words[:2] == ["cumulo", "serve"] and not any("$(" in word for word in words):
                    yield command_path(path, container), words[2:], one


# -- variables ----------------------------------------------------------------------------------------------
def _check_variables(pod: PodSpec, path: FieldPath, container: Mapping[str, Any]) -> None:
    """Kubernetes leaves `$(NAME)` as it is where the container has no such variable."""
    if container.get("envFrom"):
        return
    own = [str(one.get("name")) for one in container.get("env") or () if isinstance(one, dict)]
    given, kind = _given_variables(pod)
    for field in ("command", "args"):
        for word in container.get(field) or ():
            for name in _VARIABLE.findall(str(word)):
                if name in (*own, *given) or _OF_SERVICES.fullmatch(name) or _is_of_tasks(pod, name):
                    continue
                pod.owner.blame(
                    (*path, field),
                    f"uses $({name}), and neither env nor {kind} sets it"
                    f"{did_you_mean(name, [*own, *given], otherwise='')}{_needed(pod, name)}",
                )


def _given_variables(pod: PodSpec) -> tuple[list[str], str]:
    owner = pod.owner
    if owner.kind == "LeaderWorkerSet":
        return ["LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"], "a LeaderWorkerSet"
    if owner.group == "batch.volcano.sh":
        plugins = owner.value("spec", "plugins")
        names = ["VC_TASK_INDEX", "VK_TASK_INDEX"] if isinstance(plugins, dict) and "env" in plugins else []
        if isinstance(plugins, dict) and "pytorch" in plugins:
            names += ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"]
        return names, "one of the plugins"
    if owner.kind in ("Job", "JobSet"):
        indexed = owner.kind == "JobSet" or owner.value("spec", "completionMode") == "Indexed"
        return ["JOB_COMPLETION_INDEX"] if indexed else [], f"a {owner.kind}"
    return [], f"a {owner.kind}"


def _is_of_tasks(pod: PodSpec, name: str) -> bool:
    """Volcano's plugin svc gives the hosts of each task."""
    plugins = pod.owner.value("spec", "plugins")
    return isinstance(plugins, dict) and "svc" in plugins and bool(re.fullmatch(r"VC_\w+_(HOSTS|NUM)", name))


def _needed(pod: PodSpec, name: str) -> str:
    if pod.owner.group == "batch.volcano.sh" and name in ("VC_TASK_INDEX", "VK_TASK_INDEX"):
        return "; add env to spec.plugins"
    return "; use completionMode: Indexed" if name == "JOB_COMPLETION_INDEX" else ""


# -- servers ------------------------------------------------------------------------------------------------
def _check_listening(pod: PodSpec, path: FieldPath, container: Mapping[str, Any]) -> None:
    """The port of `cumulo serve` or of the scaler is one of the container's; there is time to drain."""
    words = words_of(container)
    verb = next((word for at, word in enumerate(words) if word in _PORTS and "cumulo" in words[:at]), None)
    if verb is None or "--rank-of" in words:
        return
    given = told(words, "--port")
    port = int(given) if given and given.isdecimal() else _PORTS[verb]
    ports = [one for one in container.get("ports") or () if isinstance(one, dict)]
    numbers = [one["containerPort"] for one in ports if isinstance(one.get("containerPort"), int)]
    if numbers and port not in numbers:
        pod.owner.blame(
            command_path(path, container),
            f"the program listens on port {port}, and the container's ports are "
            f"{', '.join(map(str, numbers))}: use --port {numbers[0]}",
        )
    drain = told(words, "--drain-timeout")
    grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
    if drain is not None and re.fullmatch(r"\d+(\.\d+)?", drain) and isinstance(grace_s, int):
        needed = float(drain) + _sleeps_first(container)
        if needed > grace_s:
            pod.owner.blame(
                (*pod.path, "terminationGracePeriodSeconds"),
                f"the pod is killed {grace_s} s after it is asked to end, and it sleeps and drains for "
                f"{needed:g} s (--drain-timeout {drain}): use more than {needed:g}",
            )


def _sleeps_first(container: Mapping[str, Any]) -> float:
    words = str((container.get("lifecycle") or {}).get("preStop") or "")
    found = re.search(r"sleep\W+(?:seconds\W+)?(\d+)", words)
    return float(found[1]) if found else 0.0


def _check_leader(one: Manifest, objects: ObjectSet) -> None:
    """Workers join the ranks of their leader, with the leader's model."""
    pods = [pod for pod in objects.pods if pod.owner is one]
    roles: dict[bool, tuple[FieldPath, list[str]]] = {}
    for pod in pods:
        for path, container in pod.containers:
            words = words_of(container)
            if "serve" in words and "cumulo" in words:
                roles["--rank-of" in words] = command_path(path, container), words
    if len(roles) < 2:
        return
    (_, leads), (where, joins) = roles[False], roles[True]
    address, joined = told(leads, "--rank-address"), told(joins, "--rank-of")
    if address and joined and address.rpartition(":")[2] != joined.rpartition(":")[2]:
        one.blame(
            where,
            f"joins port {joined.rpartition(':')[2]}, and its leader waits at "
            f"{address.rpartition(':')[2]} (--rank-address)",
        )
    model, other = (words[words.index("serve") + 1 :][:1] for words in (leads, joins))
    if model != other and not any(word.startswith("-") for word in (*model, *other)):
        one.blame(
            where,
            f"joins with the model {' '.join(other) or 'none'}, and its leader has {' '.join(model) or 'none'}",
        )


# -- torchrun -----------------------------------------------------------------------------------------------
def _check_launcher(pod: PodSpec, path: FieldPath, container: Mapping[str, Any], objects: ObjectSet) -> None:
    words = words_of(container)
    if not any(word.rpartition("/")[2] in _LAUNCHERS for word in words):
        return
    where, gpus = command_path(path, container), int(pod.gpus)
    each = told(words, "--nproc-per-node", "--nproc_per_node")
    if each and each.isdecimal() and gpus and int(each) != gpus:
        use = f"--nproc-per-node={gpus}, or ask for {each}"
        pod.owner.blame(
            where, f"starts {each} processes on each node, and the pod has {gpus} GPUs: use {use}"
        )
    nodes = told(words, "--nnodes")
    if nodes and nodes.isdecimal():
        count = _gang(pod, objects)
        if count is not None and int(nodes) != count:
            are = f"there {'is' if count == 1 else 'are'} {count}"
            pod.owner.blame(
                where, f"waits for {nodes} nodes (--nnodes), and {are} at a time; it would never start"
            )
    _check_address(pod, where, told(words, "--master-addr", "--master_addr") or "")


def _gang(pod: PodSpec, objects: ObjectSet) -> int | None:
    """Pods that run it together; None where that is not known."""
    owner = pod.owner
    if owner.group == "batch.volcano.sh":
        return sum(
            one.count
            for one in objects.pods
            if one.owner is owner
            and any(
                word.rpartition("/")[2] in _LAUNCHERS for _, it in one.containers for word in words_of(it)
            )
        )
    if owner.kind == "Job":
        return pod.count
    return pod.group if owner.kind == "LeaderWorkerSet" else None


def _check_address(pod: PodSpec, where: FieldPath, address: str) -> None:
    """Rank 0 is in the first pod, whose name and domain follow from its object."""
    owner, task = pod.owner, ""
    if owner.group == "batch.volcano.sh":
        domain, task = owner.name, str(owner.value(*pod.path[:3], "name"))
        plugins = owner.value("spec", "plugins")
        if address.endswith(f".{domain}") and not (isinstance(plugins, dict) and "svc" in plugins):
            owner.blame(("spec", "plugins"), f"must have svc, because pods are called by name: {address}")
    elif owner.kind == "Job" and owner.group == "batch" and pod.spec.get("subdomain"):
        domain = str(pod.spec["subdomain"])
    else:
        return
    first = f"{owner.name}-{task}-0" if task else f"{owner.name}-0"
    host, _, rest = address.partition(".")
    if "." in address and "$" not in address and (host, rest.partition(".")[0]) != (first, domain):
        owner.blame(where, f"has rank 0 at {address} (--master-addr), and the first pod is {first}.{domain}")


# -- files --------------------------------------------------------------------------------------------------
def _check_files(
    pod: PodSpec,
    path: FieldPath,
    container: Mapping[str, Any],
    words: Sequence[str],
    where: FieldPath,
    objects: ObjectSet,
) -> None:
    """A file that a command names under the mount of a ConfigMap is one of its keys."""
    for mount, found in _mounted_maps(pod, container, objects):
        keys = [str(key) for part in ("data", "binaryData") for key in found.value(part) or ()]
        for word in words:
            file = word.rpartition("=")[2].removeprefix(f"{mount}/")
            if word.rpartition("=")[2].startswith(f"{mount}/") and file and file not in keys:
                pod.owner.blame(
                    where, f"reads {mount}/{file}, and the ConfigMap {found.name} has no {file}"
                    f"{did_you_mean(file, keys)}"
                )  # fmt: skip


def _mounted_maps(
    pod: PodSpec, container: Mapping[str, Any], objects: ObjectSet
) -> Iterator[tuple[str, Manifest]]:
    """Where whole ConfigMaps of these files are mounted."""
    volumes = {one.get("name"): one for one in pod.spec.get("volumes") or () if isinstance(one, dict)}
    for mount in container.get("volumeMounts") or ():
        volume = volumes.get(mount.get("name")) if isinstance(mount, dict) else None
        source = volume.get("configMap") if volume else None
        if not isinstance(source, dict) or source.get("items") or mount.get("subPath"):
            continue
        found = objects.find("ConfigMap", str(source.get("name")), pod.owner.namespace)
        if found is not None:
            yield str(mount.get("mountPath")).rstrip("/"), found


def _check_entry(one: Manifest, objects: ObjectSet) -> None:
    """The entry of a RayJob runs in the head."""
    words = str(one.value("spec", "entrypoint") or "").split()
    for pod in objects.pods:
        if pod.owner is one and "headGroupSpec" in pod.path:
            for path, container in pod.containers:
                _check_files(pod, path, container, words, ("spec", "entrypoint"), objects)
