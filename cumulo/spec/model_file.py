"""ModelSpec to plain data and back: what plan files, benchmark reports, the catalogue and the console carry."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cumulo.base.strict import Wording, build
from cumulo.errors import ModelError
from cumulo.spec.model import ModelSpec

FIELDS = Wording(
    error=ModelError,
    table="{where}: expected a table of fields, got {content!r}",
    unknown="{where}: unknown field {names}; known: {known}",
    missing="{where}: missing field {quoted}",
    choice="{where} is {content!r}, which does not fit {kind}",
    mistyped="{where} is {content!r}, which does not fit {kind}",
    entry="{where}: {name}",
    item="{where}",
    kinds={},
    by_hand=False,
)


def to_dict(spec: ModelSpec) -> dict[str, Any]:
    """Only dicts, lists, strings and numbers, so that YAML and JSON both take it; defaults are left out."""
    return plain(spec)


def from_dict(data: Mapping[str, Any]) -> ModelSpec:
    """The inverse of `to_dict`; unknown, missing or mistyped fields are named in a ModelError."""
    return build(ModelSpec, data, "model spec", FIELDS)


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as a table, without what has its default."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if content == field.default:
            continue
        if dataclasses.is_dataclass(content):
            content = plain(content)
        result[field.name] = list(content) if isinstance(content, tuple) else content
    return result
