"""The GPUs of pods: against a node, against how the program divides the model, and against the ranks of `cumulo
serve` that start in each pod.
"""

from collections.abc import Mapping
from typing import Any

from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath
from cumulo.cluster.drivers.kubernetes.pods import PodSpec, gpu_path, words_of
from cumulo.cluster.served_shape import ServedShape, size_option
from cumulo.errors import ConfigError

_ROUTES = ("/ready", "/health", "/metrics", "/v1/models")  # of `cumulo serve`, for probes
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


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


def check_ranks(pod: PodSpec) -> None:
    for path, container in pod.containers:
        words = words_of(container)
        if _serves(words):
            _check_count(pod, words)
            _check_probes(pod, path, container)


def _check_count(pod: PodSpec, words: list[str]) -> None:
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
        pod.owner.blame(
            (*where[: where.index("resources")], "command"), str(error).removeprefix("serve.options: ")
        )
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


def _check_probes(pod: PodSpec, path: FieldPath, container: Mapping[str, Any]) -> None:
    for name in _PROBES:
        probe = container.get(name)
        asked = probe.get("httpGet") if isinstance(probe, dict) else None
        route = asked.get("path") if isinstance(asked, dict) else None
        if isinstance(route, str) and route.partition("?")[0] not in _ROUTES:
            pod.owner.blame(
                (*path, name, "httpGet", "path"),
                f"cumulo serve does not answer {route}; use /ready for readiness and start-up, "
                "/health for liveness",
            )
