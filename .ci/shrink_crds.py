"""Makes the shipped schemas from CustomResourceDefinitions: no descriptions, equal parts once.

    python .ci/shrink_crds.py FOLDER

Run it when a project publishes new CRDs. The definitions are Apache-2.0; NOTICE, next to the
schemas, names their projects.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from cumulo.cluster.drivers.kubernetes.schemas import SHIPPED, read_definitions

_DROPPED = {"description", "example", "title", "x-kubernetes-map-type"}
_WORTH = 120  # characters of JSON from which a part that occurs twice is stored once


def shrink(folder: Path) -> dict[str, Any]:
    kinds = [
        {
            "group": one.group,
            "version": one.version,
            "kind": one.kind,
            "namespaced": one.namespaced,
            "schema": _plain(one.schema),
        }
        for one in read_definitions(folder)
    ]
    counts: dict[str, int] = {}
    for one in kinds:
        _count(one["schema"], counts)
    parts: dict[str, Any] = {}
    for one in kinds:
        one["schema"] = _shared(one["schema"], counts, parts)
    return {"parts": parts, "kinds": kinds}


def _plain(schema: Any) -> Any:
    """Property names are data: a field may be called `description`."""
    if not isinstance(schema, dict):
        return [_plain(one) for one in schema] if isinstance(schema, list) else schema
    return {
        key: {name: _plain(inner) for name, inner in value.items()} if key == "properties" else _plain(value)
        for key, value in schema.items()
        if key not in _DROPPED
    }


def _key(schema: Any) -> str:
    return json.dumps(schema, sort_keys=True, separators=(",", ":"))


def _inner(schema: dict[str, Any]) -> list[Any]:
    found = list(schema.get("properties", {}).values())
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found.append(schema[key])
    return found


def _count(schema: dict[str, Any], counts: dict[str, int]) -> None:
    key = _key(schema)
    counts[key] = counts.get(key, 0) + 1
    if counts[key] == 1:
        for one in _inner(schema):
            _count(one, counts)


def _shared(schema: dict[str, Any], counts: dict[str, int], parts: dict[str, Any]) -> dict[str, Any]:
    key = _key(schema)
    if counts[key] == 1 or len(key) < _WORTH:
        return _with_parts(schema, counts, parts)
    name = hashlib.sha256(key.encode()).hexdigest()[:8]
    if name not in parts:
        parts[name] = {}
        parts[name] = _with_parts(schema, counts, parts)
    return {"$part": name}


def _with_parts(schema: dict[str, Any], counts: dict[str, int], parts: dict[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    if "properties" in made:
        made["properties"] = {
            name: _shared(inner, counts, parts) for name, inner in made["properties"].items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = _shared(made[key], counts, parts)
    return made


if __name__ == "__main__":
    text = json.dumps(shrink(Path(sys.argv[1])), sort_keys=True, separators=(",", ":"))
    SHIPPED.write_text(text.replace('},"', '},\n"') + "\n", "utf-8")
