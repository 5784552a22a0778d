"""Schemas of Kubernetes objects by apiVersion and kind: those that ship with Cumulo, and those of a folder of
CustomResourceDefinitions. Read by the check of manifests.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cumulo.cluster.drivers.kubernetes.core_schemas import core_kinds
from cumulo.errors import ConfigError

DATA = Path(__file__).parent / "data"
SHIPPED = DATA / "crds.json"
Schema = Mapping[str, Any]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class ObjectKind:
    group: str  # "" for core objects
    version: str
    kind: str
    namespaced: bool
    schema: Schema

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


class SchemaBook:
    """All kinds that are known, and the parts that shipped schemas share."""

    def __init__(self, kinds: Mapping[tuple[str, str], ObjectKind], parts: Mapping[str, Schema]) -> None:
        self.kinds, self._parts = kinds, parts

    def find(self, api_version: str, kind: str) -> ObjectKind | None:
        return self.kinds.get((api_version, kind))

    def versions_of(self, kind: str) -> list[str]:
        return sorted(version for version, name in self.kinds if name == kind)

    def resolve(self, schema: Schema) -> Schema:
        """A schema itself where it is kept as a part."""
        while (name := schema.get("$part")) is not None:
            schema = self._parts[name]
        return schema


@functools.cache
def shipped_book() -> SchemaBook:
    content = json.loads(SHIPPED.read_text("utf-8"))
    parts: dict[str, Schema] = dict(content["parts"])
    kinds = [ObjectKind(**one) for one in content["kinds"]]
    return _book(kinds, parts)


def book_with(folder: Path | None) -> SchemaBook:
    """The shipped schemas; those of the folder's CustomResourceDefinitions instead, where it has them."""
    shipped = shipped_book()
    if folder is None:
        return shipped
    own = {(one.api_version, one.kind): one for one in read_definitions(folder)}
    return SchemaBook({**shipped.kinds, **own}, shipped._parts)


def _book(kinds: list[ObjectKind], parts: dict[str, Schema]) -> SchemaBook:
    pod = SchemaBook({}, parts).resolve
    leader_worker = next(one for one in kinds if one.kind == "LeaderWorkerSet")
    template: Schema = leader_worker.schema
    # A whole PodTemplateSpec is in the schema of LeaderWorkerSet.
    for name in ("spec", "leaderWorkerTemplate", "workerTemplate"):
        template = pod(pod(template)["properties"][name])
    core, core_parts = core_kinds(template)
    known = {(one.api_version, one.kind): one for one in kinds}
    for group, version, kind, namespaced, schema in core:
        made = ObjectKind(group, version, kind, namespaced, schema)
        known[made.api_version, kind] = made
    return SchemaBook(known, {**parts, **core_parts})


def read_definitions(folder: Path) -> Iterator[ObjectKind]:
    """Every served version of every CustomResourceDefinition in a folder's YAML files."""
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if not files:
        raise ConfigError(f"{folder} contains no YAML files with CustomResourceDefinitions")
    for path in files:
        try:
            documents = list(yaml.load_all(path.read_text("utf-8"), _LOADER))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the definitions in {path}: {error}") from error
        for document in documents:
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                yield from _kinds_of(document["spec"])


def _kinds_of(spec: Mapping[str, Any]) -> Iterator[ObjectKind]:
    for version in spec["versions"]:
        if version.get("served", True):
            yield ObjectKind(
                spec["group"],
                version["name"],
                spec["names"]["kind"],
                spec.get("scope") == "Namespaced",
                version["schema"]["openAPIV3Schema"],
            )
