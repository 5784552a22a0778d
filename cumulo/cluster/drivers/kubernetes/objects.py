"""All objects that are checked together, by kind and name, and those that are said to be in the cluster already."""

from collections.abc import Iterable, Sequence
from typing import Any

from cumulo.base.nearest import did_you_mean, nearest
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import PodSpec, pods_of

_ALWAYS = {
    ("Queue", "default"), ("Queue", "root"), ("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt"),
    ("PriorityClass", "system-cluster-critical"), ("PriorityClass", "system-node-critical"),
}  # fmt: skip
_CLUSTER_WIDE = {
    "Queue", "ClusterQueue", "ResourceFlavor", "Topology", "PriorityClass", "HyperNode", "StorageClass",
    "DeviceClass", "GatewayClass", "IngressClass", "RuntimeClass",
}  # fmt: skip


class ObjectSet:
    """All objects that stand together, and those that are said to be there."""

    def __init__(self, manifests: Sequence[Manifest], exists: Iterable[str] = ()) -> None:
        self.manifests = manifests
        self._there = {tuple(one.split("/", 1)) for one in exists} | _ALWAYS
        self.pods = [pod for one in manifests for pod in pods_of(one)]

    def find(self, kind: str, name: str, namespace: str) -> Manifest | None:
        for one in self.manifests:
            if (
                one.kind == kind
                and one.name == name
                and (kind in _CLUSTER_WIDE or one.namespace == namespace)
            ):
                return one
        return None

    def has(self, kind: str, name: str, namespace: str) -> bool:
        return (kind, name) in self._there or self.find(kind, name, namespace) is not None

    def need(self, owner: Manifest, path: FieldPath, kind: str, name: Any) -> None:
        """Blame the owner unless what it names is there."""
        if not isinstance(name, str) or not name or self.has(kind, name, owner.namespace):
            return
        elsewhere = [one for one in self.manifests if one.kind == kind and one.name == name]
        if elsewhere:
            owner.blame(
                path, f"{kind} {name} is in the namespace {elsewhere[0].namespace}, not in {owner.namespace}"
            )
            return
        known = sorted({one.name for one in self.manifests if one.kind == kind})
        there = did_you_mean(name, known) if known else f"; no {kind} is among these files"
        owner.blame(
            path, f"there is no {kind} {name}{there}; if the cluster has it, add --exists {kind}/{name}"
        )

    def need_alike(self, owner: Manifest, path: FieldPath, kind: str, name: Any) -> None:
        """For kinds that a cluster comes with: blame only what looks like a slip of one that is here."""
        if isinstance(name, str) and name and not self.has(kind, name, owner.namespace):
            close = nearest(name, [one.name for one in self.manifests if one.kind == kind])
            if close:
                owner.blame(path, f"there is no {kind} {name}; did you mean {close[0]}?")

    def chosen_pods(self, labels: Any, namespace: str) -> list[PodSpec]:
        """The pods of a namespace that have all these labels."""
        if not isinstance(labels, dict):
            return []
        return [
            pod for pod in self.pods
            if pod.owner.namespace == namespace
            and all(pod.labels.get(key) == value for key, value in labels.items())
        ]  # fmt: skip
