"""The pods that objects make: their specs wherever they stand in an object, how many there are, and the GPUs they
ask for. Read by the checks.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest

GPU = re.compile(r"^(nvidia|amd|intel|gpu\.intel)\.com/(gpu|i915|xe)$")
_UNITS = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2.0**10, "Mi": 2.0**20,
    "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?[0-9.]+)(m|[kMGTP]|[KMGTP]i)?")
_COUNT = re.compile(r"[0-9]+")
# Names of the same options in other servers.
_SAME = {
    "tp": ("-tp", "--tensor-parallel-size", "--tensor_parallel_size"),
    "pp": ("-pp", "--pipeline-parallel-size", "--pipeline_parallel_size"),
}


@dataclass(frozen=True, slots=True)
class PodSpec:
    owner: Manifest
    path: FieldPath  # of the spec
    spec: Mapping[str, Any]
    count: int  # pods that the object makes of it; 1 where it does not say
    group: int = 1  # pods that together hold one copy of the model

    @property
    def containers(self) -> Iterator[tuple[FieldPath, Mapping[str, Any]]]:
        for name in ("initContainers", "containers"):
            for number, one in enumerate(self.spec.get(name) or ()):
                if isinstance(one, dict):
                    yield (*self.path, name, number), one

    def resource(self, name: str, kind: str = "limits") -> float:
        """What one pod asks for; init containers run before the others."""
        most = {"initContainers": 0.0, "containers": 0.0}
        for path, one in self.containers:
            given = (one.get("resources") or {}).get(kind, {}).get(name, 0)
            if GPU.match(name) and isinstance(given, str) and not _COUNT.fullmatch(given):
                continue  # no number of GPUs
            asked = quantity(given) or 0.0
            part = str(path[-2])
            most[part] = max(most[part], asked) if part == "initContainers" else most[part] + asked
        return max(most.values())

    @property
    def gpu_names(self) -> set[str]:
        return {
            name
            for _, one in self.containers
            for kind in ("limits", "requests")
            for name in ((one.get("resources") or {}).get(kind) or {})
            if GPU.match(str(name))
        }

    @property
    def gpus(self) -> float:
        return sum(max(self.resource(name), self.resource(name, "requests")) for name in self.gpu_names)

    @property
    def serves(self) -> bool:
        """Whether it runs `cumulo serve`."""
        words = [_words_of(one) for _, one in self.containers]
        return any(some[at : at + 2] == ["cumulo", "serve"] for some in words for at in range(len(some)))

    def parallel(self, name: str) -> int:
        """tp, pp, dp or ep, as its commands say; 1 where they do not."""
        value = self.option(name)[1]
        return int(value) if value.isdecimal() and int(value) else 1

    def option(self, name: str) -> tuple[FieldPath, str]:
        """The value of --tp, by any of its names, and where it is given; empty where it is not."""
        names = (f"--{name}", *_SAME.get(name, ()))
        for path, one in self.containers:
            for key in ("command", "args"):
                words = _words_of(one, key)
                for number, word in enumerate(words):
                    option, _, value = word.partition("=")
                    if option in names:
                        return (*path, key), value or (words[number + 1] if number + 1 < len(words) else "")
        return self.path, ""


def _words_of(container: Mapping[str, Any], *keys: str) -> list[str]:
    """What it runs, word by word."""
    return [
        word
        for key in keys or ("command", "args")
        for text in container.get(key) or ()
        for word in str(text).split()
    ]


def gpu_path(pod: PodSpec) -> FieldPath:
    """Where a pod asks for GPUs, or would."""
    for path, one in pod.containers:
        for kind in ("limits", "requests"):
            for name in (one.get("resources") or {}).get(kind) or {}:
                if GPU.match(str(name)):
                    return (*path, "resources", kind, str(name))
    return (*pod.path, "containers", 0, "resources")


def quantity(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    match = _QUANTITY.fullmatch(str(value))
    try:
        return float(match[1]) * _UNITS[match[2] or ""] if match else float(str(value))
    except ValueError:
        return None


def pods_of(manifest: Manifest) -> list[PodSpec]:
    found: list[PodSpec] = []
    for path, spec in _specs(manifest.body, ()):
        count, group = _count(manifest, path)
        found.append(PodSpec(manifest, path, spec, count, group))
    return found


def _specs(value: Any, path: FieldPath) -> Iterator[tuple[FieldPath, Mapping[str, Any]]]:
    if isinstance(value, dict):
        if path and path[-1] == "spec" and isinstance(value.get("containers"), list):
            yield path, value
            return
        for key, inner in value.items():
            yield from _specs(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _specs(inner, (*path, number))


def _count(manifest: Manifest, path: FieldPath) -> tuple[int, int]:
    """Pods of one template, and how many pods a copy of the model is spread over."""

    def number(*steps: str | int, otherwise: int = 1) -> int:
        found = manifest.value(*steps)
        return found if isinstance(found, int) and not isinstance(found, bool) else otherwise

    kind = manifest.kind
    if kind == "LeaderWorkerSet":
        size = max(1, number("spec", "leaderWorkerTemplate", "size"))
        replicas = number("spec", "replicas")
        leads = "leaderTemplate" in path
        has_leader = manifest.value("spec", "leaderWorkerTemplate", "leaderTemplate") is not None
        return replicas * (1 if leads else size - has_leader), size
    if "tasks" in path:
        return number("spec", "tasks", path[2], "replicas"), 1
    if "workerGroupSpecs" in path:
        start = path[: path.index("workerGroupSpecs") + 2]
        hosts = max(1, number(*start, "numOfHosts"))
        return number(*start, "replicas") * hosts, hosts
    if "replicatedJobs" in path:
        start = path[: path.index("replicatedJobs") + 2]
        return number(*start, "replicas") * number(*start, "template", "spec", "parallelism"), 1
    if kind == "Job":
        return number("spec", "parallelism"), 1
    return number("spec", "replicas"), 1
