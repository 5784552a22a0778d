"""An object against its schema, as an API server with strict field validation checks it: unknown fields, wrong
types, missing fields, values out of range. Called by the check of manifests.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cumulo.base.nearest import nearest
from cumulo.cluster.drivers.kubernetes.cel import keeps_rule
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import pods_of
from cumulo.cluster.drivers.kubernetes.schemas import ObjectKind, Schema, SchemaBook

_WORDS = {
    "string": "a string", "integer": "a whole number", "number": "a number", "boolean": "true or false",
    "object": "a mapping", "array": "a list",
}  # fmt: skip
_EMPTY: Mapping[str, Any] = {"string": "", "object": {}, "array": []}
_META: Schema = {
    "type": "object",
    "properties": {
        **{
            name: {"type": "string"}
            for name in ("name", "generateName", "namespace", "uid", "resourceVersion", "selfLink")
        },
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "ownerReferences": {"type": "array", "items": {"type": "object"}},
        "managedFields": {"type": "array", "items": {"type": "object"}},
        **{name: {"x-kubernetes-preserve-unknown-fields": True} for name in ("creationTimestamp",)},
        **{name: {"type": "string"} for name in ("deletionTimestamp",)},
        **{name: {"type": "integer"} for name in ("generation", "deletionGracePeriodSeconds")},
    },
}
_CORE = {"", "apps", "batch", "autoscaling", "policy"}
_MOST_SHOWN = 12  # fields of a schema that an error lists
_RANGE = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


def check_schema(manifest: Manifest, kind: ObjectKind, book: SchemaBook) -> None:
    _Checker(manifest, book).check(manifest.body, kind.schema, ())
    manifest.leave_out_misshapen()


def leave_out_misshapen(manifest: Manifest, book: SchemaBook) -> None:
    """Of an object without a schema: what its name, labels and pods cannot be, for the checks of other objects."""
    tried = Manifest(manifest.file, manifest.body)
    checker = _Checker(tried, book)
    if "metadata" in manifest.body:
        checker.check(manifest.body["metadata"], _META, ("metadata",))
    for pod in pods_of(manifest):
        checker.check(pod.spec, {"$part": "PodSpec"}, pod.path)
    manifest.misshapen = tried.misshapen
    manifest.leave_out_misshapen()


class _Checker:
    def __init__(self, manifest: Manifest, book: SchemaBook) -> None:
        self._manifest, self._book = manifest, book
        self._is_core = manifest.group in _CORE

    def _blame(self, path: FieldPath, message: str) -> None:
        self._manifest.blame(path, message)

    def _blame_type(self, path: FieldPath, message: str, schema: Schema) -> None:
        self._blame(path, message)
        if path:
            self._manifest.misshapen[path] = _EMPTY.get(str(schema.get("type")))

    def check(self, value: Any, schema: Schema, path: FieldPath) -> None:
        schema = self._book.resolve(schema)
        if value is None:
            if not schema.get("nullable") and path and not schema.get("x-kubernetes-preserve-unknown-fields"):
                self._blame_type(
                    path, f"is empty (null); {_wanted(schema)} is needed, or leave the field out", schema
                )
            return
        if schema.get("x-kubernetes-int-or-string"):
            # Kubernetes' own kinds read 1.5 as a quantity; custom ones do not.
            taken = (
                int | float | str if self._is_core and "KMGTPE" in schema.get("pattern", "") else int | str
            )
            if isinstance(value, bool) or not isinstance(value, taken):
                self._blame_type(path, f"must be a whole number or a string, got {_shown(value)}", schema)
                return
        elif not self._has_type(value, schema, path):
            return
        before = len(self._manifest.problems)
        self._check_value(value, schema, path)
        if isinstance(value, dict):
            self._check_mapping(value, schema, path)
        elif isinstance(value, list):
            self._check_list(value, schema, path)
        if len(self._manifest.problems) == before:
            self._check_rules(value, schema, path)

    def _check_rules(self, value: Any, schema: Schema, path: FieldPath) -> None:
        for rule in schema.get("x-kubernetes-validations", ()):
            if not keeps_rule(rule["rule"], self._with_defaults(value, schema)):
                self._blame(path, str(rule.get("message") or f"does not keep the rule {rule['rule']}"))

    def _with_defaults(self, value: Any, schema: Schema) -> Any:
        """As the API server completes it before it judges."""
        schema = self._book.resolve(schema)
        if isinstance(value, list) and isinstance(schema.get("items"), dict):
            return [self._with_defaults(one, schema["items"]) for one in value]
        if not isinstance(value, dict):
            return value
        known = schema.get("properties", {})
        made = {name: self._with_defaults(one, known.get(name, {})) for name, one in value.items()}
        for name, inner in known.items():
            if name not in made and "default" in (found := self._book.resolve(inner)):
                made[name] = found["default"]
        return made

    def _has_type(self, value: Any, schema: Schema, path: FieldPath) -> bool:
        wanted = schema.get("type")
        fits = {
            "string": isinstance(value, str),
            "boolean": isinstance(value, bool),
            "integer": (isinstance(value, int) and not isinstance(value, bool))
            or (isinstance(value, float) and value.is_integer()),
            "number": isinstance(value, int | float) and not isinstance(value, bool),
            "object": isinstance(value, dict),
            "array": isinstance(value, list),
        }.get(str(wanted), True)
        if not fits:
            text = f"must be {_WORDS[str(wanted)]}, got {_shown(value)}{_advice(value, str(wanted))}"
            self._blame_type(path, text, schema)
        return fits

    def _check_value(self, value: Any, schema: Schema, path: FieldPath) -> None:
        if "enum" in schema and value not in schema["enum"]:
            self._blame(path, f"cannot be {_shown(value)}{_one_of(value, schema['enum'])}")
            return
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_range(value, schema, path)
        if isinstance(value, str):
            pattern = schema.get("pattern")
            if pattern is not None and not _matches(pattern, value):
                self._blame(path, f"{_shown(value)} {_pattern_words(pattern, str(value))}")
        if isinstance(value, str | list | dict):
            self._check_size(value, schema, path)

    def _check_range(self, value: float, schema: Schema, path: FieldPath) -> None:
        low, high = _RANGE.get(str(schema.get("format")), (None, None))
        low = schema.get("minimum", low)
        high = schema.get("maximum", high)
        if low is not None and value < low:
            self._blame(path, f"must be {low} or more, got {value}")
        if high is not None and value > high:
            self._blame(path, f"must be {high} or less, got {value}")

    def _check_size(self, value: Any, schema: Schema, path: FieldPath) -> None:
        what, unit = ("Length", "characters") if isinstance(value, str) else ("Items", "items")
        if isinstance(value, dict):
            what, unit = "Properties", "fields"
        least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
        if least is not None and len(value) < least:
            self._blame(path, f"needs {least} {unit} or more, got {len(value)}")
        if most is not None and len(value) > most:
            self._blame(path, f"may have {most} {unit} at most, got {len(value)}")

    def _check_mapping(self, value: Mapping[Any, Any], schema: Schema, path: FieldPath) -> None:
        # CRDs leave it open; KEDA calls a map of its own so.
        if path and path[-1] == "metadata" and "additionalProperties" not in schema:
            schema = _META
        known = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                typed = nearest(name, [str(key) for key in value if key not in known])
                hint = f"; {typed[0]} is not a field: did you mean {name}?" if typed else ""
                self._blame((*path, name), f"is required and missing{hint}")
        rest = schema.get("additionalProperties")
        keeps = schema.get("x-kubernetes-preserve-unknown-fields") or (
            not known and not isinstance(rest, dict)
        )
        for key, inner in value.items():
            here = (*path, key if isinstance(key, int) else str(key))
            if key in known:
                self.check(inner, known[key], here)
            elif isinstance(rest, dict):
                self._check_key(key, path)
                self.check(inner, rest, here)
            elif not keeps:
                self._blame(here, f"is not a field of {_of(path)}{_fields(str(key), known)}")

    def _check_key(self, key: Any, path: FieldPath) -> None:
        if not isinstance(key, str):
            self._blame((*path, str(key)), f"the key {key!r} must be a string: put it in quotes")

    def _check_list(self, value: list[Any], schema: Schema, path: FieldPath) -> None:
        inner = schema.get("items")
        if isinstance(inner, dict):
            for number, one in enumerate(value):
                self.check(one, inner, (*path, number))
        style = schema.get("x-kubernetes-list-type")
        if style not in ("map", "set"):
            return
        keys = schema.get("x-kubernetes-list-map-keys", ())
        seen: dict[str, int] = {}
        for number, one in enumerate(value):
            if style == "map" and not isinstance(one, dict):
                continue
            # Ports of the same number may differ in a protocol that is TCP where it is left out.
            named = {key: one.get(key, "TCP" if key == "protocol" else None) for key in keys} if keys else one
            if (first := seen.setdefault(repr(named), number)) != number:
                which = ", ".join(f"{key} {val}" for key, val in named.items()) if keys else _shown(one)
                self._blame((*path, number), f"has the same {which} as item {first}; each may occur once")


def _fields(name: str, known: Mapping[str, Any]) -> str:
    lowered = {one.lower(): one for one in known}
    if name.lower() in lowered:
        return f"; did you mean {lowered[name.lower()]}?"
    if close := nearest(name, known):
        return f"; did you mean {close[0]}?"
    listed = [one for one in known if one != "status"]
    more = ", …" if len(listed) > _MOST_SHOWN else ""
    return f"; its fields are {', '.join(listed[:_MOST_SHOWN])}{more}"


def _one_of(value: Any, known: list[Any]) -> str:
    words = [str(one) for one in known if one != ""]
    lowered = {one.lower(): one for one in words}
    close = [lowered[str(value).lower()]] if str(value).lower() in lowered else nearest(str(value), words)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"; use one of {', '.join(words)}" if not hint else hint + f" (one of {', '.join(words)})"


def _of(path: FieldPath) -> str:
    names = [one for one in path if isinstance(one, str)]
    return names[-1] if names else "the object"


def _wanted(schema: Schema) -> str:
    return _WORDS.get(str(schema.get("type")), "a value")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) < 60 else text[:57] + "…"


def _advice(value: Any, wanted: str) -> str:
    if wanted == "string" and isinstance(value, int | float | bool):
        return f': put it in quotes, "{str(value).lower() if isinstance(value, bool) else value}"'
    if wanted in ("integer", "number") and isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?", value):
        return ": remove the quotes"
    if wanted == "boolean" and isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
        return ": remove the quotes, and write true or false"
    if wanted == "array" and not isinstance(value, list):
        return ": write it as an item, after `- `"
    return ""


@lru_cache(256)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:  # Go's expressions have a few forms that Python's do not
        return None


def _matches(pattern: str, value: str) -> bool:
    compiled = _compiled(pattern)
    return compiled is None or compiled.search(value) is not None


_LOOSE_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGTP]?)(i?)[bB]?\s*")


def _meant_quantity(value: str) -> str:
    """`8 Gi`, `24GB` and `20 GiB` are meant as 8Gi, 24G and 20Gi."""
    match = _LOOSE_QUANTITY.fullmatch(value)
    if match is None:
        return ""
    unit = match[2] if match[3] or match[2] != "K" else "k"
    return f"; did you mean {match[1]}{unit}{match[3]}?"


def _pattern_words(pattern: str, value: str) -> str:
    if "KMGTPE" in pattern:
        meant = _meant_quantity(value)
        return f"is not a quantity; write a number with a unit, such as 500m, 16Gi or 8{meant}"
    if pattern == "^[0-9]+%?$":
        return "is not a number or a percentage; write 1 or 25%, without a space"
    if pattern.startswith("^[a-z0-9]") or "[a-z0-9]([-a-z0-9]*[a-z0-9])?" in pattern:
        return "is not a name; use lower-case letters, digits and hyphens, and begin and end with a letter or digit"
    return f"does not have the required form ({pattern})"
