"""Manifests checked without a cluster: schemas, references between objects, and fit with nodes, quotas and a plan.
`cumulo kubernetes check` runs it.

    problems = check_files([Path("manifests")])
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulo.base.nearest import nearest
from cumulo.cluster.drivers.kubernetes.fit import check_against_plan, check_fit
from cumulo.cluster.drivers.kubernetes.manifest_source import (
    FieldPath,
    Manifest,
    ManifestProblem,
    manifest_files,
    read_manifests,
)
from cumulo.cluster.drivers.kubernetes.references import ObjectSet, check_references
from cumulo.cluster.drivers.kubernetes.schemas import ObjectKind, Schema, SchemaBook, book_with, is_quantity
from cumulo.errors import ConfigError
from cumulo.plan.serve.plan_file import read_plan

_WORDS = {
    "string": "a string", "integer": "a whole number", "number": "a number", "boolean": "true or false",
    "object": "a mapping", "array": "a list", "null": "empty",
}  # fmt: skip
_MOST_SHOWN = 12  # fields of a schema that an error lists


def check_schema(manifest: Manifest, kind: ObjectKind, book: SchemaBook) -> None:
    for error in sorted(_validator(book, kind).iter_errors(manifest.body), key=lambda one: str(one.path)):
        path: FieldPath = tuple(error.absolute_path)
        for field, message in _explained(error):
            manifest.blame((*path, *field), message)


def _validator(book: SchemaBook, kind: ObjectKind) -> Any:
    found = book.validators.get((kind.api_version, kind.kind))
    if found is None:
        found = book.validators[kind.api_version, kind.kind] = _validator_class()(book.json_schema(kind))
    return found


@functools.cache
def _validator_class() -> Any:
    try:
        from jsonschema import Draft202012Validator, validators
    except ImportError as error:
        raise ConfigError(
            "checking manifests needs the jsonschema library: pip install 'cumulo[kubernetes]'"
        ) from error
    return validators.extend(Draft202012Validator, {"x-kubernetes-list-type": _check_unique})


def _check_unique(validator: Any, style: str, items: Any, schema: Schema) -> Iterator[Any]:
    """The keyword of Kubernetes for lists whose items differ in some of their fields."""
    from jsonschema import ValidationError

    keys, seen = schema.get("x-kubernetes-list-map-keys", ()), dict[str, int]()
    for number, one in enumerate(items if isinstance(items, list) and style in ("map", "set") else ()):
        if keys and not isinstance(one, dict):
            continue
        # Ports of the same number may differ in a protocol that is TCP where it is left out.
        named = {key: one.get(key, "TCP" if key == "protocol" else None) for key in keys} if keys else one
        if (first := seen.setdefault(repr(named), number)) != number:
            which = ", ".join(f"{key} {value}" for key, value in named.items()) if keys else str(one)
            text = f"has the same {which} as item {first}; each may occur once"
            yield ValidationError(text, path=[number])


def _explained(error: Any) -> Iterator[tuple[FieldPath, str]]:
    """The fields, relative to the error's own, and what is wrong with them."""
    given, wanted = error.instance, error.validator_value
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        for name in given:
            if name not in known:
                yield (name,), f"is not a field of {_owner(error.absolute_path)}{_meant(str(name), known)}"
    elif error.validator == "required":
        for name in wanted:
            if name not in given:
                yield (name,), "is required and missing"
    elif error.validator == "type":
        yield (), _wrong_type(given, [wanted] if isinstance(wanted, str) else wanted)
    elif error.validator == "enum":
        words = [str(one) for one in wanted if one != ""]
        yield (), f"cannot be {_shown(given)}{_meant_word(str(given), words)} (one of {', '.join(words)})"
    elif error.validator == "pattern" and is_quantity(wanted):
        yield (), f"{_shown(given)} is not a quantity; write a number with a unit, such as 500m, 16Gi or 8"
    else:
        yield (), error.message


def _owner(path: Any) -> str:
    names = [one for one in path if isinstance(one, str)]
    return names[-1] if names else "the object"


def _wrong_type(given: Any, wanted: list[str]) -> str:
    needed = " or ".join(_WORDS[one] for one in wanted)
    if given is None:
        return f"is empty (null); {needed} is needed, or leave the field out"
    advice = ""
    if wanted[0] == "string" and isinstance(given, int | float):
        advice = f': put it in quotes, "{str(given).lower()}"'
    elif wanted[0] in ("integer", "number", "boolean") and isinstance(given, str):
        advice = ": remove the quotes"
    return f"must be {needed}, got {_shown(given)}{advice}"


def _meant(name: str, known: Mapping[str, Any]) -> str:
    if hint := _meant_word(name, list(known)):
        return hint
    listed = [one for one in known if one != "status"]
    more = ", …" if len(listed) > _MOST_SHOWN else ""
    return f"; its fields are {', '.join(listed[:_MOST_SHOWN])}{more}"


def _meant_word(word: str, known: list[str]) -> str:
    lowered = {one.lower(): one for one in known}
    close = [lowered[word.lower()]] if word.lower() in lowered else nearest(word, known)
    return f"; did you mean {close[0]}?" if close else ""


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) < 60 else text[:57] + "…"


USUAL_NODE_GPUS = 8


def check_files(
    paths: Sequence[Path],
    *,
    crds: Path | None = None,
    node_gpus: int = USUAL_NODE_GPUS,
    exists: Iterable[str] = (),
    plan: Path | None = None,
) -> tuple[list[Manifest], list[ManifestProblem]]:
    """`plan`: what `cumulo plan serve --out` wrote, which the manifests are to carry out."""
    planned = None if plan is None else read_plan(plan)
    manifests = [one for path in manifest_files(list(paths)) for one in read_manifests(path)]
    check_manifests(manifests, book_with(crds), node_gpus, exists)
    if planned is not None:
        check_against_plan([one for one in manifests if one.body], planned, node_gpus)
    return manifests, [problem for one in manifests for problem in one.problems]


def check_manifests(
    manifests: Sequence[Manifest], book: SchemaBook, node_gpus: int, exists: Iterable[str] = ()
) -> list[ManifestProblem]:
    whole = [one for one in manifests if one.body]
    for one in whole:
        _check_one(one, book)
        one.sound = not one.problems
    check_together(whole, node_gpus, exists)
    return [problem for one in manifests for problem in one.problems]


def check_together(
    manifests: Sequence[Manifest], node_gpus: int, exists: Iterable[str] = ()
) -> list[ManifestProblem]:
    """References and fit, without schemas: what is also checked before manifests are written."""
    objects = ObjectSet(manifests, exists)
    check_references(objects)
    check_fit(objects, node_gpus)
    return [problem for one in manifests for problem in one.problems]


def _check_one(one: Manifest, book: SchemaBook) -> None:
    for name in ("apiVersion", "kind"):
        if not isinstance(one.body.get(name), str) or not one.body[name]:
            one.blame((name,), "is required and missing")
            return
    kind = book.find(one.api_version, one.kind)
    if kind is None:
        _blame_unknown(one, book)
        return
    check_schema(one, kind, book)
    if not one.name and one.kind != "Kustomization":
        one.blame(("metadata", "name"), "is required and missing")
    if not kind.namespaced and one.metadata.get("namespace"):
        one.blame(
            ("metadata", "namespace"), f"a {one.kind} belongs to the whole cluster: remove its namespace"
        )


def _blame_unknown(one: Manifest, book: SchemaBook) -> None:
    versions = book.versions_of(one.kind)
    if versions:
        close = nearest(one.api_version, versions)
        hint = f"; did you mean {close[0]}?" if close else f"; use {' or '.join(versions)}"
        one.blame(("apiVersion",), f"{one.kind} has no version {one.api_version}{hint}")
        return
    kinds = sorted({name for _, name in book.kinds})
    close = nearest(one.kind, kinds)
    known = f"; give its definition with --crds. Known: {', '.join(kinds)}"
    hint = f"; did you mean {close[0]}?" if close else known
    one.blame(("kind",), f"there is no schema for {one.kind} of {one.api_version}{hint}")
