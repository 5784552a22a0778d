"""ModelSpec to plain data and back: what plan files, benchmark reports, the catalogue and the console carry."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cumulo.base.strict import build
from cumulo.errors import ModelError
from cumulo.spec.model import ModelSpec


def to_dict(spec: ModelSpec) -> dict[str, Any]:
    """Only dicts, lists, strings and numbers, so that YAML and JSON both take it; defaults are left out."""
    return plain(spec)


def from_dict(data: Mapping[str, Any]) -> ModelSpec:
    """The inverse of `to_dict`; unknown, missing or mistyped fields are named in a ModelError."""
    return build(ModelSpec, data, "model spec", ModelError, by_hand=False)


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
