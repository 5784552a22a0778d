"""ModelSpec to plain data and back: what plan files, benchmark reports, the catalogue and the console carry."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from cumulo.errors import ModelError
from cumulo.spec.model import ModelSpec

T = TypeVar("T")


def to_dict(spec: ModelSpec) -> dict[str, Any]:
    """Only dicts, lists, strings and numbers, so that YAML and JSON both take it; defaults are left out."""
    return plain(spec)


def from_dict(data: Mapping[str, Any]) -> ModelSpec:
    """The inverse of `to_dict`; unknown, missing or mistyped fields are named in a ModelError."""
    return build(ModelSpec, data, "model spec")


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


def build(kind: type[T], data: Any, where: str) -> T:
    """An instance of dataclass `kind` from a table; `where` is what errors call it."""
    if not isinstance(data, Mapping):
        raise ModelError(f"{where}: expected a table of fields, got {data!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := [name for name in data if name not in fields]:
        raise ModelError(
            f"{where}: unknown field {', '.join(map(repr, unknown))}; known: {', '.join(fields)}"
        )
    if missing := [
        name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in data
    ]:
        raise ModelError(f"{where}: missing field {', '.join(map(repr, missing))}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], content, f"{where}: {name}") for name, content in data.items()})


def _value(hint: Any, content: Any, where: str) -> Any:
    """`content` as the field's type wants it; YAML and JSON know no tuples and write 1.0 as 1."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if content is None:
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
        return _value(hint, content, where)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type[Any], hint), content, where)
    if origin is tuple and isinstance(content, (list, tuple)):
        return tuple(_value(typing.get_args(hint)[0], item, where) for item in content)
    if origin is Mapping and isinstance(content, Mapping):
        item = typing.get_args(hint)[1]
        return {str(key): _value(item, value, f"{where}: {key}") for key, value in content.items()}
    if origin is typing.Literal and content in typing.get_args(hint):
        return content
    if hint is float and isinstance(content, int) and not isinstance(content, bool):
        return float(content)
    if origin is None and type(content) is hint:
        return content
    raise ModelError(f"{where} is {content!r}, which does not fit {getattr(hint, '__name__', hint)}")
