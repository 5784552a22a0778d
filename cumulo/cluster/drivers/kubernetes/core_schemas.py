"""Schemas of the core objects that Cumulo writes, and of those that often stand next to them, in a short notation.

`data/core.yaml` has a line per field: `string`, `integer`, `boolean`, `quantity`, `port` (a number or a name),
`tcp-port` (1 to 65535), `share` (a number or a percentage), `map` (of strings), `object`, `any`, `A|B` (one of
these words), `$Part`, or an object; `[x]` is a list. A name with `!` at its end is required.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).parent / "data" / "core.yaml"
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "natural": {"type": "integer", "minimum": 0},
    "boolean": {"type": "boolean"},
    "number": {"type": "number"},
    "map": {"type": "object", "additionalProperties": {"type": "string"}},
    "object": {"type": "object"},
    "any": {"x-kubernetes-preserve-unknown-fields": True},
    "port": {"x-kubernetes-int-or-string": True},
    "tcp-port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "share": {"x-kubernetes-int-or-string": True, "pattern": r"^[0-9]+%?$"},
    "quantity": {
        "x-kubernetes-int-or-string": True,
        "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$",
    },
}
CoreKind = tuple[str, str, str, bool, Mapping[str, Any]]


def core_kinds(pod_template: Mapping[str, Any]) -> tuple[list[CoreKind], dict[str, Mapping[str, Any]]]:
    """Group, version, kind, whether it is namespaced, and schema of each; and the parts that they refer to."""
    content = yaml.safe_load(_FILE.read_text("utf-8"))
    parts: dict[str, Mapping[str, Any]] = {name: _schema(one) for name, one in content["parts"].items()}
    parts["PodTemplate"] = pod_template
    parts["PodSpec"] = pod_template["properties"]["spec"]
    return list(_kinds(content["kinds"])), parts


def _kinds(content: Mapping[str, Mapping[str, Any]]) -> Iterator[CoreKind]:
    for title, fields in content.items():
        api_version, kind, *words = title.split()
        group, _, version = api_version.rpartition("/")
        schema = _schema({"apiVersion": "string", "kind": "string", "metadata": "object", **fields})
        yield group, version, kind, "cluster" not in words, schema


def _schema(short: Any) -> dict[str, Any]:
    if isinstance(short, list):
        return {"type": "array", "items": _schema(short[0])}
    if isinstance(short, dict):
        if "*" in short:
            return {"type": "object", "additionalProperties": _schema(short["*"])}
        required = [name[:-1] for name in short if name.endswith("!")]
        made: dict[str, Any] = {
            "type": "object",
            "properties": {name.removesuffix("!"): _schema(one) for name, one in short.items()},
        }
        return made | ({"required": required} if required else {})
    if short.startswith("$"):
        return {"$part": short[1:]}
    if short in _PLAIN:
        return dict(_PLAIN[short])
    return {"type": "string", "enum": short.split("|")}
