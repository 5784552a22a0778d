"""What a kustomization.yaml says of the files around it: resources that are there, and names that they have.
Called by the check of files.
"""

from collections.abc import Sequence
from pathlib import Path

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest

_NAMES = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_COUNTED = ("Deployment", "StatefulSet", "ReplicaSet", "ReplicationController")


def check_kustomizations(manifests: Sequence[Manifest]) -> None:
    counted = sorted({one.name for one in manifests if one.kind in _COUNTED})
    for one in manifests:
        if one.kind != "Kustomization":
            continue
        for field in ("resources", "components"):
            for number, name in enumerate(one.value(field) or ()):
                _check_path(one, (field, number), name)
        for number, patch in enumerate(one.value("patches") or ()):
            if isinstance(patch, dict) and patch.get("path"):
                _check_path(one, ("patches", number, "path"), patch["path"])
        for number, replicas in enumerate(one.value("replicas") or ()):
            name = replicas.get("name") if isinstance(replicas, dict) else None
            if isinstance(name, str) and counted and name not in counted:
                text = f"there is no Deployment or StatefulSet {name}{did_you_mean(name, counted)}"
                one.blame(("replicas", number, "name"), text)


def _check_path(one: Manifest, path: FieldPath, name: object) -> None:
    if not isinstance(name, str) or "://" in name or "?" in name or name.startswith(("github.com/", "git@")):
        return  # elsewhere
    folder = Path(one.file).parent
    found = folder / name
    if not found.exists():
        there = sorted(file.name for file in folder.glob("*.y*ml") if file.name not in _NAMES)
        one.blame(path, f"there is no {found}{did_you_mean(name, there) if there else ''}")
    elif found.is_dir() and not any((found / file).exists() for file in _NAMES):
        one.blame(path, f"the folder {found} has no kustomization.yaml")
