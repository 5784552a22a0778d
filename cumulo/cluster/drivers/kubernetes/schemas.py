"""JSON Schemas of Kubernetes objects by apiVersion and kind: those that ship with Cumulo, and those of a folder of
CustomResourceDefinitions. Read by the check of manifests.

The files in `data/` have OpenAPI schemas, in which `$part` names one that several objects share: `core.json` those
of Kubernetes' own objects, `crds.json` those of CustomResourceDefinitions.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cumulo.base.files import read_text_file
from cumulo.errors import ConfigError

DATA = Path(__file__).parent / "data"
SHIPPED = DATA / "crds.json"
Schema = Mapping[str, Any]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KEPT = (
    "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
    "maxProperties", "required", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip


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
        self.kinds, self.parts = kinds, parts
        self.validators: dict[tuple[str, str], Any] = {}  # made by the check when they are needed

    def find(self, api_version: str, kind: str) -> ObjectKind | None:
        return self.kinds.get((api_version, kind))

    def versions_of(self, kind: str) -> list[str]:
        return sorted(version for version, name in self.kinds if name == kind)

    @functools.cached_property
    def definitions(self) -> Schema:
        return {name: strict_schema(one) for name, one in self.parts.items()}

    def json_schema(self, kind: ObjectKind) -> Schema:
        return {**strict_schema(kind.schema), "$defs": self.definitions}


def strict_schema(schema: Schema) -> dict[str, Any]:
    """The OpenAPI schema of a definition as a JSON Schema that refuses unknown fields, as an API server with strict
    field validation does. Rules in CEL are left out: the API server judges them."""
    if "$part" in schema:
        return {"$ref": f"#/$defs/{schema['$part']}"}
    made = {name: schema[name] for name in _KEPT if name in schema}
    if not _compiles(made.get("pattern", "")):
        del made["pattern"]  # Go's expressions have a few forms that Python's do not
    open_ = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    kinds = schema.get("type", [])
    if schema.get("x-kubernetes-int-or-string"):  # Kubernetes' own kinds also read 1.5 as a quantity
        kinds = ["number" if is_quantity(schema.get("pattern")) else "integer", "string"]
    if kinds:
        made["type"] = [
            *([kinds] if isinstance(kinds, str) else kinds),
            *(["null"] * bool(schema.get("nullable"))),
        ]
    if "items" in schema:
        made["items"] = strict_schema(schema["items"])
    rest = schema.get("additionalProperties")
    if "properties" in schema:
        made["properties"] = {name: _field(name, one) for name, one in schema["properties"].items()}
        if not open_ and rest is None:
            made["additionalProperties"] = False
    if isinstance(rest, dict):
        made["additionalProperties"] = strict_schema(rest)
    return made


def is_quantity(pattern: Any) -> bool:
    return "KMGTPE" in str(pattern)


def _compiles(pattern: str) -> bool:
    try:
        return re.compile(pattern) is not None
    except re.error:
        return False


def _field(name: str, schema: Schema) -> dict[str, Any]:
    """CustomResourceDefinitions leave the metadata open."""
    is_open = schema.get("type") == "object" and not {"properties", "additionalProperties"} & schema.keys()
    return strict_schema({"$part": "ObjectMeta"} if name == "metadata" and is_open else schema)


@functools.cache
def shipped_book() -> SchemaBook:
    kinds: list[ObjectKind] = []
    parts: dict[str, Schema] = {}
    for file in (SHIPPED, DATA / "core.json"):
        content = json.loads(file.read_text("utf-8"))
        kinds += [ObjectKind(**one) for one in content["kinds"]]
        parts |= content["parts"]
    parts["PodTemplate"] = _pod_template(kinds, parts)
    parts["PodSpec"] = parts["PodTemplate"]["properties"]["spec"]
    return SchemaBook({(one.api_version, one.kind): one for one in kinds}, parts)


def _pod_template(kinds: list[ObjectKind], parts: Mapping[str, Schema]) -> Schema:
    """A whole PodTemplateSpec is in the schema of LeaderWorkerSet."""
    found = next(one.schema for one in kinds if one.kind == "LeaderWorkerSet")
    for name in ("spec", "leaderWorkerTemplate", "workerTemplate"):
        found = found["properties"][name]
        while "$part" in found:
            found = parts[found["$part"]]
    return found


def book_with(folder: Path | None) -> SchemaBook:
    """The shipped schemas; those of the folder's CustomResourceDefinitions instead, where it has them."""
    shipped = shipped_book()
    if folder is None:
        return shipped
    own = {(one.api_version, one.kind): one for one in read_definitions(folder)}
    return SchemaBook({**shipped.kinds, **own}, shipped.parts)


def read_definitions(folder: Path) -> Iterator[ObjectKind]:
    """Every served version of every CustomResourceDefinition in a folder's YAML files."""
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if not files:
        raise ConfigError(f"{folder} contains no YAML files with CustomResourceDefinitions")
    for path in files:
        text = read_text_file(path, "the definitions in")
        try:
            documents = list(yaml.load_all(text, _LOADER))
        except yaml.YAMLError as error:
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
